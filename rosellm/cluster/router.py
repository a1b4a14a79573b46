"""Decide which replica runs which request, without any dependence on engines or Ray."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rosellm.cluster.known_prefixes import KnownPrefixes

MUCH_BUSIER = 2


@dataclass(eq=False, slots=True)
class Routed:
    """A request in the router.

    n_prompt: number of prompt tokens.
    n_new: maximum number of output tokens.
    marks: the marks of the prompt (``known_prefixes.marks``); empty without a prefix cache.
    n_left: number of the request's ``n_tokens`` that are outstanding.
    """

    request_id: int
    n_prompt: int
    n_new: int
    marks: tuple[int, ...] = ()
    n_left: int = 0

    def __post_init__(self) -> None:
        self.n_left = self.n_tokens

    @property
    def n_tokens(self) -> int:
        return self.n_prompt + self.n_new


@dataclass(eq=False, slots=True)
class Place:
    """The router's view of a live replica.

    known: an estimate of the prefixes that the replica has cached.
    requests: the replica's requests, by id.
    n_left: number of outstanding tokens of ``requests``.
    """

    known: KnownPrefixes
    requests: dict[int, Routed] = field(default_factory=dict)
    n_left: int = 0


class Router:
    """A router that assigns each request to the replica with the fewest outstanding tokens.

    window: maximum number of requests that a replica holds. Further requests wait here in order, so that a
        replica whose requests end early receives more of them.
    known_blocks: maximum number of blocks in a replica's prefix cache.

    If another replica's prefix cache holds more of the prompt, the request goes there instead, unless that
    replica is much busier: it has more than ``MUCH_BUSIER`` times the outstanding tokens of the least busy
    replica, and the difference is more than this request's tokens. Requests of a lost replica are queued
    again at the front. Outstanding tokens are prompt tokens plus output tokens.
    """

    def __init__(self, window: int, known_blocks: int = 0) -> None:
        self._window, self._known_blocks = window, known_blocks
        self._places: dict[int, Place] = {}
        self._waiting: deque[Routed] = deque()
        self._runs_on: dict[int, int] = {}

    @property
    def live(self) -> list[int]:
        """The indices of the replicas that can run requests."""
        return list(self._places)

    def outstanding(self, replica: int) -> int:
        """Return the number of outstanding tokens, prompt and output, of the replica's requests."""
        return self._places[replica].n_left

    def running(self, replica: int) -> list[int]:
        """Return the ids of the replica's requests."""
        return list(self._places[replica].requests)

    def add(self, replica: int) -> None:
        """Start assigning requests to a replica."""
        self._places[replica] = Place(KnownPrefixes(self._known_blocks))

    def lose(self, replica: int) -> list[int]:
        """Remove a replica, queue its requests again at the front, and return their ids."""
        lost = list(self._places.pop(replica).requests.values())
        for request in reversed(lost):
            request.n_left = request.n_tokens
            del self._runs_on[request.request_id]
            self._waiting.appendleft(request)
        return [request.request_id for request in lost]

    def submit(self, request: Routed) -> None:
        self._waiting.append(request)

    def assign(self) -> list[tuple[int, int]]:
        """Assign waiting requests to replicas with fewer than ``window``; return (replica, id) pairs."""
        given = []
        while self._waiting and (free := self._with_room()):
            request = self._waiting.popleft()
            replica = self._choose(request, free)
            place = self._places[replica]
            place.requests[request.request_id] = request
            place.n_left += request.n_left
            place.known.add(request.marks)
            self._runs_on[request.request_id] = replica
            given.append((replica, request.request_id))
        return given

    def note(self, request_id: int, n_generated: int) -> None:
        """Record that a running request has been prefilled and has ``n_generated`` output tokens."""
        place = self._places[self._runs_on[request_id]]
        request = place.requests[request_id]
        n_left = request.n_new - n_generated
        place.n_left += n_left - request.n_left
        request.n_left = n_left

    def finish(self, request_id: int) -> None:
        """Remove a running request that has ended."""
        place = self._places[self._runs_on.pop(request_id)]
        place.n_left -= place.requests.pop(request_id).n_left

    def withdraw(self, request_id: int) -> int | None:
        """Remove a cancelled request; return the replica that runs the request, or None if it was waiting."""
        replica = self._runs_on.get(request_id)
        if replica is None:
            self._waiting.remove(next(one for one in self._waiting if one.request_id == request_id))
        else:
            self.finish(request_id)
        return replica

    def clear(self) -> None:
        """Forget all requests, but keep the estimates of cached prefixes."""
        self._waiting.clear()
        self._runs_on.clear()
        for place in self._places.values():
            place.requests.clear()
            place.n_left = 0

    def _with_room(self) -> list[int]:
        return [replica for replica, place in self._places.items() if len(place.requests) < self._window]

    def _choose(self, request: Routed, free: list[int]) -> int:
        """Choose from the replicas ``free``: the least busy, or one with more of the prompt cached."""
        least = min(free, key=self.outstanding)
        known = {replica: self._places[replica].known.length(request.marks) for replica in free}
        best = min(free, key=lambda replica: (-known[replica], self.outstanding(replica)))
        if known[best] == known[least]:
            return least
        limit = max(MUCH_BUSIER * self.outstanding(least), self.outstanding(least) + request.n_tokens)
        return best if self.outstanding(best) <= limit else least
