"""Admission: which of the waiting requests start now, and whether the KV cache has room for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from rosellm.roseinfer.outputs import IncrementalText, RequestMetrics
from rosellm.roseinfer.request import Sequence

ACTIVE_PER_SPARE_BLOCK = 1


@dataclass(eq=False)
class Request:
    """A request in flight, with the KV blocks a layer that it may come to hold."""

    sequence: Sequence
    metrics: RequestMetrics
    text: IncrementalText | None
    blocks: int


@dataclass
class Room:
    """KV blocks a layer for one round of admission.

    free: those that nobody holds, or that only the prefix cache does. unreserved: what would be left if all
    active sequences grew to their full length, negative where they cannot all do so at once. n_active: how
    many sequences run. block_size: tokens a block.

    A request that can grow to its full length beside all others is always admitted. Beyond that, admission
    is optimistic, since requests may end early: the tokens to be computed need a place, and a block is kept
    free for every ``ACTIVE_PER_SPARE_BLOCK`` that run, lest one be preempted as soon as it has started.
    """

    free: int
    unreserved: int
    n_active: int
    block_size: int

    def take(self, request: Request) -> bool:
        """Whether the request may start; if so, its blocks are counted as taken."""
        need = -(-request.sequence.prefill_length // self.block_size)
        spare = -(-self.n_active // ACTIVE_PER_SPARE_BLOCK)
        if request.blocks > self.unreserved and need + spare > self.free:
            return False
        self.free -= need
        self.unreserved -= request.blocks
        self.n_active += 1
        return True


class Limits(Protocol):
    """The part of ``SchedulerConfig`` that admission goes by."""

    admission_policy: str
    pack_lookahead: int
    fifo_every: int


class WaitingQueue:
    """Requests in the order of their arrival, those that were preempted before all others."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: deque[Request] = deque()
        self._packed_rounds = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def append(self, request: Request) -> None:
        self._waiting.append(request)

    def put_back(self, request: Request) -> None:
        """A request that was preempted; of several, the youngest comes first."""
        self._waiting.appendleft(request)

    def remove(self, request: Request) -> bool:
        """Take a request out; False if it does not wait."""
        if request not in self._waiting:
            return False
        self._waiting.remove(request)
        return True

    def clear(self) -> list[Request]:
        """Take all out."""
        requests = list(self._waiting)
        self._waiting.clear()
        return requests

    def admit(self, places: int, tokens: int, room: Room) -> list[Request]:
        """Take out those that start now: at most ``places``, until ``tokens`` are to be computed."""
        if self._limits.admission_policy == "fifo":
            return self._in_order(places, tokens, room)
        if self._packed_rounds < self._limits.fifo_every - 1:
            chosen = self._shortest(places, tokens, room)
            self._packed_rounds += bool(chosen)
            return chosen
        chosen = self._in_order(places, tokens, room)
        if chosen:  # a forced round lasts until the head of the queue fits: nobody overtakes it any more
            self._packed_rounds = 0
        return chosen

    def _in_order(self, places: int, tokens: int, room: Room) -> list[Request]:
        chosen = _fill(self._waiting, places, tokens, room, skip=False)
        for _ in chosen:
            self._waiting.popleft()
        return chosen

    def _shortest(self, places: int, tokens: int, room: Room) -> list[Request]:
        """First fit in order of the tokens to compute, so that the budget serves as many as it can."""
        n_looked_at = min(self._limits.pack_lookahead, len(self._waiting))
        looked_at = [self._waiting.popleft() for _ in range(n_looked_at)]
        by_length = sorted(looked_at, key=lambda request: request.sequence.prefill_length)
        chosen = _fill(by_length, places, tokens, room, skip=True)
        taken = set(chosen)
        self._waiting.extendleft(request for request in reversed(looked_at) if request not in taken)
        return chosen


def _fill(requests: Iterable[Request], places: int, tokens: int, room: Room, skip: bool) -> list[Request]:
    """Those that fit, passing over the others if ``skip``, until places or tokens are used up."""
    chosen: list[Request] = []
    for request in requests:
        if len(chosen) == places or tokens < 1:
            break
        if room.take(request):
            tokens -= request.sequence.prefill_length
            chosen.append(request)
        elif not skip:
            break
    return chosen
