"""Admission: which waiting requests start now, within the iteration's limits and the free KV blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Literal

from rosellm.errors import RoseError, describe
from rosellm.roseinfer.cache.budget import BlockBudget
from rosellm.roseinfer.cache.kv_blocks import blocks_for
from rosellm.roseinfer.request import Sequence

POLICIES = ("fifo", "pack")
ACTIVE_PER_SPARE_BLOCK = 1


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one scheduler iteration.

    max_batch_size: sequences that are active at the same time; None uses the engine's. prefill_max_batch_size
    and prefill_token_budget: prompts and prompt tokens prefilled per iteration; the last prompt is cut at the
    budget and continues, before others, in the next iteration (chunked prefill, arXiv:2308.16369).
    prefill_chunk: the token budget of iterations in which requests decode, None for the same one; every
    iteration decodes first, so no running request waits for more than one chunk of a long prompt between two
    tokens. admission_policy: "fifo" admits strictly in order; "pack" admits the shortest prompts among the
    first ``pack_lookahead`` waiting, with every ``fifo_every``-th round in fifo order to prevent starvation.
    max_in_flight: waiting and active requests in total; None sets no limit.
    """

    max_batch_size: int | None = None
    prefill_max_batch_size: int = 256
    prefill_token_budget: int = 16384
    prefill_chunk: int | None = None
    admission_policy: Literal["fifo", "pack"] = "fifo"
    pack_lookahead: int = 64
    fifo_every: int = 8
    max_in_flight: int | None = None

    def __post_init__(self) -> None:
        if self.admission_policy not in POLICIES:
            raise RoseError(
                f"admission_policy is {describe(self.admission_policy)}; use {' or '.join(POLICIES)}"
            )
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "admission_policy" or (value is None and field.default is None):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RoseError(f"{field.name} is {describe(value)}; it must be a whole number, 1 or more")


class Room:
    """KV blocks per layer available to one round of admission.

    n_active: number of running sequences. prefilling: those whose prompts are not fully cached yet. ``free``:
    blocks that are free or held only by the prefix cache, less those that ``prefilling`` will take.

    A request that can grow to its full length alongside all others is always admitted. Beyond that, admission
    is optimistic, since requests may end early: the tokens to be computed need blocks, and one block is kept
    free per ``ACTIVE_PER_SPARE_BLOCK`` running sequences, so that a new one is not preempted at once.
    """

    def __init__(self, budget: BlockBudget, n_active: int, prefilling: list[Sequence]) -> None:
        self.budget, self.n_active = budget, n_active
        self.free = budget.available - budget.blocks_to_prefill(prefilling)

    def take(self, sequence: Sequence) -> bool:
        """Return whether the request may start; if so, its blocks are promised to it."""
        need = blocks_for(len(sequence.tokens), self.budget.blocks.block_size)
        spare = -(-self.n_active // ACTIVE_PER_SPARE_BLOCK)
        if self.budget.max_blocks(sequence) > self.budget.unreserved and need + spare > self.free:
            return False
        self.free -= need
        self.n_active += 1
        self.budget.reserve(sequence)
        return True


class WaitingQueue:
    """Requests in order of arrival, with preempted ones at the front."""

    def __init__(self, limits: SchedulerConfig) -> None:
        self._limits = limits
        self._waiting: deque[Sequence] = deque()
        self._packed_rounds = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def append(self, request: Sequence) -> None:
        self._waiting.append(request)

    def put_back(self, request: Sequence) -> None:
        """Queue a preempted request at the front; put several back youngest first."""
        self._waiting.appendleft(request)

    def remove(self, request: Sequence) -> bool:
        """Remove a request; return False if it is not waiting."""
        if request not in self._waiting:
            return False
        self._waiting.remove(request)
        return True

    def clear(self) -> list[Sequence]:
        """Remove and return all requests."""
        requests = list(self._waiting)
        self._waiting.clear()
        return requests

    def admit(self, places: int, tokens: int, room: Room) -> list[Sequence]:
        """Remove and return requests that start now: at most ``places``, up to ``tokens`` to compute."""
        if self._limits.admission_policy == "fifo":
            return self._in_order(places, tokens, room)
        if self._packed_rounds < self._limits.fifo_every - 1:
            chosen = self._shortest(places, tokens, room)
            self._packed_rounds += bool(chosen)
            return chosen
        chosen = self._in_order(places, tokens, room)
        if chosen:  # a forced round lasts until the head of the queue fits, so none overtakes it
            self._packed_rounds = 0
        return chosen

    def _in_order(self, places: int, tokens: int, room: Room) -> list[Sequence]:
        chosen = _fill(self._waiting, places, tokens, room, skip=False)
        for _ in chosen:
            self._waiting.popleft()
        return chosen

    def _shortest(self, places: int, tokens: int, room: Room) -> list[Sequence]:
        """Admit by first fit, fewest tokens to compute first, to serve as many requests as possible."""
        n_looked_at = min(self._limits.pack_lookahead, len(self._waiting))
        looked_at = [self._waiting.popleft() for _ in range(n_looked_at)]
        by_length = sorted(looked_at, key=lambda request: request.prefill_length)
        chosen = _fill(by_length, places, tokens, room, skip=True)
        taken = set(chosen)
        self._waiting.extendleft(request for request in reversed(looked_at) if request not in taken)
        return chosen


def _fill(requests: Iterable[Sequence], places: int, tokens: int, room: Room, skip: bool) -> list[Sequence]:
    """Return the requests that fit until places or tokens run out; ``skip`` passes over those that do not."""
    chosen: list[Sequence] = []
    for request in requests:
        if len(chosen) == places or tokens < 1:
            break
        if room.take(request):
            tokens -= request.prefill_length
            chosen.append(request)
        elif not skip:
            break
    return chosen


def config_or_default(config: SchedulerConfig | None) -> SchedulerConfig:
    """Return ``config``, or the default for None; raise ``RoseError`` for any other type."""
    if config is not None and not isinstance(config, SchedulerConfig):
        raise RoseError(f"config is {describe(config)}; give a SchedulerConfig")
    return config or SchedulerConfig()


def batch_size_of(config: SchedulerConfig, most: int) -> int:
    """Return the limit on active sequences; raise ``RoseError`` if it exceeds ``most``, the engine's."""
    size = config.max_batch_size or most
    if size > most:
        raise RoseError(f"max_batch_size is {size}; the engine decodes at most {most} sequences together")
    return size
