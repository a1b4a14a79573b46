"""What stands in front of replicas: the project's router, and simpler ones to know what it is worth."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Protocol

from rosellm.roseinfer.cluster.router import Routed, Router

NO_WINDOW = 1 << 30


class AnyRouter(Protocol):
    """What a simulation asks of ``cluster.router.Router``."""

    def add(self, replica: int) -> None:
        """A replica takes requests from now on."""

    def lose(self, replica: int) -> list[int]:
        """A replica is gone; its requests wait again, before all others."""

    def submit(self, request: Routed) -> None:
        """Queue a request."""

    def assign(self) -> list[tuple[int, int]]:
        """Give waiting requests to replicas: (replica, request id), in order."""

    def note(self, request_id: int, n_generated: int) -> None:
        """A running request has that many tokens by now."""

    def finish(self, request_id: int) -> None:
        """A running request has ended."""


Choose = Callable[[dict[int, dict[int, Routed]]], int]  # replica → its requests; who gets the next one


class CountingRouter:
    """Chooses by how many requests each replica has, at most; of their lengths it knows nothing."""

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
        """See ``AnyRouter``; nobody is ever full."""
        given = []
        while self._waiting and self._requests:
            request = self._waiting.popleft()
            replica = self._choose(self._requests)
            self._requests[replica][request.request_id] = request
            self._runs_on[request.request_id] = replica
            given.append((replica, request.request_id))
        return given

    def note(self, request_id: int, n_generated: int) -> None:
        """Nothing is made of it."""

    def finish(self, request_id: int) -> None:
        """See ``AnyRouter``."""
        del self._requests[self._runs_on.pop(request_id)][request_id]


def at_random() -> CountingRouter:
    """Any replica, each as likely, seeded."""
    draw = random.Random(0)
    return CountingRouter(lambda requests: draw.choice(list(requests)))


def round_robin() -> CountingRouter:
    """One replica after the other."""
    turns: deque[int] = deque()

    def next_one(requests: dict[int, dict[int, Routed]]) -> int:
        while True:
            if not turns:
                turns.extend(requests)
            if (replica := turns.popleft()) in requests:
                return replica

    return CountingRouter(next_one)


def fewest_requests() -> CountingRouter:
    """A replica with the fewest requests, as load balancers count connections."""
    return CountingRouter(lambda requests: min(requests, key=lambda replica: len(requests[replica])))


def fewest_tokens() -> Router:
    """The project's own, without a limit of what a replica holds."""
    return Router(NO_WINDOW)


ROUTERS: dict[str, Callable[[], AnyRouter]] = {
    "at random": at_random,
    "round robin": round_robin,
    "fewest requests": fewest_requests,
    "fewest tokens": fewest_tokens,
}
