"""Routers in front of replicas: the project's own, and simpler ones for comparison."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

from rosellm.cluster.router import Routed, Router

NO_WINDOW = 1 << 30
GPUS_OF_A_HOST = 8


class AnyRouter(Protocol):
    """The interface of ``cluster.router.Router`` that a simulation uses."""

    def add(self, replica: int) -> None:
        """Add a replica, which takes requests from now on."""

    def lose(self, replica: int) -> list[int]:
        """Remove a replica; its requests, which are returned, are queued before all others."""

    def submit(self, request: Routed) -> None:
        """Queue a request."""

    def assign(self) -> list[tuple[int, int]]:
        """Assign waiting requests to replicas: (replica, request id), in order."""

    def note(self, request_id: int, n_generated: int) -> None:
        """Update the number of tokens that a running request has generated."""

    def finish(self, request_id: int) -> None:
        """Remove a running request that has ended."""


Choose = Callable[[dict[int, dict[int, Routed]]], int]  # replica → its requests; returns the next replica


class CountingRouter:
    """Chooses at most by the number of requests per replica, regardless of their lengths."""

    def __init__(self, choose: Choose) -> None:
        self._choose = choose
        self._requests: dict[int, dict[int, Routed]] = {}
        self._waiting: deque[Routed] = deque()
        self._runs_on: dict[int, int] = {}

    def add(self, replica: int) -> None:
        """See ``AnyRouter``."""
        self._requests[replica] = {}

    def lose(self, replica: int) -> list[int]:
        """See ``AnyRouter``."""
        lost = list(self._requests.pop(replica).values())
        self._waiting.extendleft(reversed(lost))
        return [request.request_id for request in lost]

    def submit(self, request: Routed) -> None:
        """See ``AnyRouter``."""
        self._waiting.append(request)

    def assign(self) -> list[tuple[int, int]]:
        """See ``AnyRouter``; replicas are never full."""
        given = []
        while self._waiting and self._requests:
            request = self._waiting.popleft()
            replica = self._choose(self._requests)
            self._requests[replica][request.request_id] = request
            self._runs_on[request.request_id] = replica
            given.append((replica, request.request_id))
        return given

    def note(self, request_id: int, n_generated: int) -> None:
        """Do nothing: progress does not matter."""

    def finish(self, request_id: int) -> None:
        """See ``AnyRouter``."""
        del self._requests[self._runs_on.pop(request_id)][request_id]


def at_random() -> CountingRouter:
    """Return a router that chooses replicas uniformly at random, seeded."""
    draw = random.Random(0)
    return CountingRouter(lambda requests: draw.choice(list(requests)))


def round_robin() -> CountingRouter:
    """Return a router that cycles through the replicas."""
    turns: deque[int] = deque()

    def next_one(requests: dict[int, dict[int, Routed]]) -> int:
        while True:
            if not turns:
                turns.extend(requests)
            if (replica := turns.popleft()) in requests:
                return replica

    return CountingRouter(next_one)


def fewest_requests() -> CountingRouter:
    """Return a router to a replica with the fewest requests, as load balancers count connections."""
    return CountingRouter(lambda requests: min(requests, key=lambda replica: len(requests[replica])))


def fewest_tokens() -> Router:
    """Return the project's own router, without a limit on what a replica holds."""
    return Router(NO_WINDOW)


class Grouped:
    """Groups of ``size`` replicas, such as a host's, each behind a router of its own, used in rotation.

    The front router knows only which groups have a live replica.
    """

    def __init__(self, size: int, make: Callable[[], AnyRouter]) -> None:
        self._size, self._make = size, make
        self._groups: dict[int, _Group] = {}
        self._turns: deque[_Group] = deque()  # groups with a live replica
        self._waiting: deque[Routed] = deque()
        self._runs_in: dict[int, _Group] = {}
        self._due: dict[_Group, None] = {}  # whose routers may have requests to assign

    def add(self, replica: int) -> None:
        """See ``AnyRouter``."""
        group = self._groups.setdefault(replica // self._size, _Group(self._make()))
        if not group.live:
            self._turns.append(group)
        group.live.add(replica)
        group.router.add(replica)

    def lose(self, replica: int) -> list[int]:
        """See ``AnyRouter``; requests of a group's last replica go to other groups."""
        group = self._groups[replica // self._size]
        lost = group.router.lose(replica)
        group.live.remove(replica)
        self._due[group] = None
        if not group.live:
            self._turns.remove(group)
            self._waiting.extendleft(reversed(group.requests.values()))
            group.router, group.requests = self._make(), {}
        return lost

    def submit(self, request: Routed) -> None:
        """See ``AnyRouter``."""
        self._waiting.append(request)

    def assign(self) -> list[tuple[int, int]]:
        """See ``AnyRouter``."""
        while self._waiting and self._turns:
            request, group = self._waiting.popleft(), self._turns[0]
            self._turns.rotate(-1)
            group.requests[request.request_id] = request
            group.router.submit(request)
            self._runs_in[request.request_id] = group
            self._due[group] = None
        due, self._due = self._due, {}
        return [given for group in due for given in group.router.assign()]

    def note(self, request_id: int, n_generated: int) -> None:
        """See ``AnyRouter``."""
        self._runs_in[request_id].router.note(request_id, n_generated)

    def finish(self, request_id: int) -> None:
        """See ``AnyRouter``."""
        group = self._runs_in.pop(request_id)
        group.router.finish(request_id)
        del group.requests[request_id]
        self._due[group] = None


@dataclass(eq=False, slots=True)
class _Group:
    router: AnyRouter
    live: set[int] = field(default_factory=set)
    requests: dict[int, Routed] = field(default_factory=dict)


def by_host() -> Grouped:
    """Return eight replicas behind each of the project's routers."""
    return Grouped(GPUS_OF_A_HOST, fewest_tokens)


ROUTERS: dict[str, Callable[[], AnyRouter]] = {
    "at random": at_random,
    "round robin": round_robin,
    "fewest requests": fewest_requests,
    "fewest tokens": fewest_tokens,
    "by host": by_host,
}


def routing_us(router: AnyRouter, n: int, requests: int = 300) -> float:
    """Return the µs that this machine takes to route one request over ``n`` replicas."""
    for replica in range(n):
        router.add(replica)
    start = perf_counter()
    for number in range(requests):
        router.submit(Routed(number, 1, 1))
        router.assign()
    return (perf_counter() - start) / requests * 1e6
