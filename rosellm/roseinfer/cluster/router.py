"""The router: which replica runs which request. Knows neither engines nor Ray."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rosellm.roseinfer.cluster.known_prefixes import KnownPrefixes

MUCH_BUSIER = 2


@dataclass(eq=False, slots=True)
class Routed:
    """A request on its way: ``n_tokens`` are outstanding in all, ``n_left`` of them still.

    marks: of its prompt's beginnings, as ``known_prefixes.marks`` tells them; none without a prefix cache.
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
    """A live replica as the router sees it: its requests, their outstanding tokens, its cached prefixes."""

    known: KnownPrefixes
    requests: dict[int, Routed] = field(default_factory=dict)
    n_left: int = 0


class Router:
    """Gives each request to the replica with the fewest outstanding tokens, of prompts and still to generate.

    If a replica's prefix cache has more of the prompt, the request goes there instead, unless that replica is
    much busier: has more than ``MUCH_BUSIER`` times the outstanding tokens of the least busy one, and more
    than this request's tokens beyond them. A replica holds at most ``window`` requests; further ones wait
    here, in order, so that replicas whose requests end early get more of them. Requests of a replica that is
    lost wait again, before all others. ``known_blocks``: how many blocks a replica's prefix cache may hold.
    """

    def __init__(self, window: int, known_blocks: int = 0) -> None:
        self._window, self._known_blocks = window, known_blocks
        self._places: dict[int, Place] = {}
        self._waiting: deque[Routed] = deque()
        self._runs_on: dict[int, int] = {}

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._runs_on)

    @property
    def live(self) -> list[int]:
        """The replicas that take requests."""
        return list(self._places)

    def outstanding(self, replica: int) -> int:
        """Tokens of the replica's prompts, and those it has still to generate."""
        return self._places[replica].n_left

    def running(self, replica: int) -> list[int]:
        """Ids of the requests that the replica has."""
        return list(self._places[replica].requests)

    def add(self, replica: int) -> None:
        """A replica takes requests from now on."""
        self._places[replica] = Place(KnownPrefixes(self._known_blocks))

    def lose(self, replica: int) -> list[int]:
        """A replica is gone; returns the ids of its requests, which wait again."""
        lost = list(self._places.pop(replica).requests.values())
        for request in reversed(lost):
            request.n_left = request.n_tokens
            del self._runs_on[request.request_id]
            self._waiting.appendleft(request)
        return [request.request_id for request in lost]

    def submit(self, request: Routed) -> None:
        """Queue a request."""
        self._waiting.append(request)

    def assign(self) -> list[tuple[int, int]]:
        """Give waiting requests to replicas with room: (replica, request id), in order."""
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
        """A running request has that many tokens by now, and its prompt is done."""
        place = self._places[self._runs_on[request_id]]
        request = place.requests[request_id]
        n_left = request.n_new - n_generated
        place.n_left += n_left - request.n_left
        request.n_left = n_left

    def finish(self, request_id: int) -> None:
        """A running request has ended."""
        place = self._places[self._runs_on.pop(request_id)]
        place.n_left -= place.requests.pop(request_id).n_left

    def withdraw(self, request_id: int) -> int | None:
        """A request is cancelled; returns the replica that runs it, None if it was waiting."""
        replica = self._runs_on.get(request_id)
        if replica is None:
            self._waiting.remove(next(one for one in self._waiting if one.request_id == request_id))
        else:
            self.finish(request_id)
        return replica

    def clear(self) -> None:
        """Forget all requests, but not what the replicas' caches have."""
        self._waiting.clear()
        self._runs_on.clear()
        for place in self._places.values():
            place.requests.clear()
            place.n_left = 0

    def _with_room(self) -> list[int]:
        return [replica for replica, place in self._places.items() if len(place.requests) < self._window]

    def _choose(self, request: Routed, free: list[int]) -> int:
        """The least busy, or one that has more of the prompt cached, if it is not much busier."""
        least = min(free, key=self.outstanding)
        known = {replica: self._places[replica].known.length(request.marks) for replica in free}
        best = min(free, key=lambda replica: (-known[replica], self.outstanding(replica)))
        if known[best] == known[least]:
            return least
        limit = max(MUCH_BUSIER * self.outstanding(least), self.outstanding(least) + request.n_tokens)
        return best if self.outstanding(best) <= limit else least
