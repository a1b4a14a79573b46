"""Routers in front of replicas: the project's own, and simpler ones for comparison."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random

from rosellm.cluster.router import Routed, Router

NO_WINDOW = 1 << 30
GPUS_OF_A_HOST = 8


def fewest_tokens() -> Router:
    """Return the project's own router, without a limit on what a replica holds."""
    return Router(NO_WINDOW)


class RequestCounter(Router):
    """Chooses the replica with the fewest requests, as load balancers count connections."""

    def submit(self, request: Routed) -> None:
        """Queue a request; all requests count the same."""
        super().submit(Routed(request.request_id, n_prompt=0, n_new=1))

    def note(self, request_id: int, n_generated: int) -> None:
        """Do nothing: progress does not matter."""


@dataclass(eq=False)
class Group:
    """Replicas behind a router of their own, and the requests that they run."""

    router: Router = field(default_factory=fewest_tokens)
    requests: dict[int, Routed] = field(default_factory=dict)


class Dealer:
    """Deals requests to groups of ``size`` replicas, such as hosts, knowing only which have a live replica.

    It has the interface of ``Router`` that a simulation uses. choose: returns one of the given groups.
    """

    def __init__(self, size: int, choose: Callable[[list[Group]], Group]) -> None:
        self._size, self._choose = size, choose
        self._groups: dict[int, Group] = {}  # those with a live replica
        self._waiting: deque[Routed] = deque()
        self._runs_in: dict[int, Group] = {}

    def add(self, replica: int) -> None:
        """Start assigning requests to a replica."""
        self._groups.setdefault(replica // self._size, Group()).router.add(replica)

    def lose(self, replica: int) -> list[int]:
        """Remove a replica; its requests are queued first, in other groups if it was its group's last."""
        group = self._groups[replica // self._size]
        lost = group.router.lose(replica)
        if not group.router.live:
            del self._groups[replica // self._size]
            self._waiting.extendleft(reversed(group.requests.values()))
        return lost

    def submit(self, request: Routed) -> None:
        """Queue a request."""
        self._waiting.append(request)

    def assign(self) -> list[tuple[int, int]]:
        """Assign waiting requests to replicas; return (replica, request id) pairs, in order."""
        groups = list(self._groups.values())
        while self._waiting and groups:
            request, group = self._waiting.popleft(), self._choose(groups)
            group.requests[request.request_id] = request
            group.router.submit(request)
            self._runs_in[request.request_id] = group
        return [given for group in groups for given in group.router.assign()]

    def note(self, request_id: int, n_generated: int) -> None:
        """Update the number of tokens that a running request has generated."""
        self._runs_in[request_id].router.note(request_id, n_generated)

    def finish(self, request_id: int) -> None:
        """Remove a running request that has ended."""
        group = self._runs_in.pop(request_id)
        group.router.finish(request_id)
        del group.requests[request_id]


def in_turn() -> Callable[[list[Group]], Group]:
    """Return a choice that goes round the groups."""
    turns = count()
    return lambda groups: groups[next(turns) % len(groups)]


ROUTERS: dict[str, Callable[[], Router | Dealer]] = {
    "at random": lambda: Dealer(1, Random(0).choice),
    "round robin": lambda: Dealer(1, in_turn()),
    "fewest requests": lambda: RequestCounter(NO_WINDOW),
    "fewest tokens": fewest_tokens,
    "by host": lambda: Dealer(GPUS_OF_A_HOST, in_turn()),
}
