"""Admission: which waiting requests start now, given the iteration's limits and the free KV blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import islice
from typing import Literal

from rosellm.errors import RoseError, describe
from rosellm.roseinfer.cache.budget import BlockBudget
from rosellm.roseinfer.cache.kv_blocks import blocks_for
from rosellm.roseinfer.cache.prefix_cache import PrefixCache, Tokens
from rosellm.roseinfer.request import Sequence

POLICIES = ("fifo", "pack")


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one scheduler iteration.

    max_batch_size: maximum number of sequences active at the same time; None means the engine's limit.
    prefill_max_batch_size: maximum number of prompts prefilled per iteration.
    prefill_token_budget: maximum number of prompt tokens prefilled per iteration; the last prompt is cut at
        the budget and continues, before other prompts, in the next iteration (chunked prefill,
        arXiv:2308.16369).
    prefill_chunk: the token budget of iterations in which requests decode; None means
        ``prefill_token_budget``. Every iteration decodes first, so between two of its tokens a running
        request waits for at most one chunk of a long prompt.
    admission_policy: "fifo" admits in order of arrival; "pack" admits the shortest prompts among the first
        ``pack_lookahead`` waiting ones. Both pass over requests that wait for another one's prefill.
    fifo_every: with "pack", one in this many iterations that admit requests does so in fifo order, to prevent
        starvation.
    max_in_flight: maximum number of waiting and active requests together; None means no limit.

    Raises ``RoseError`` for invalid values.
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
    """The KV blocks available to one call of :meth:`WaitingQueue.admit`.

    budget: counts the blocks of the cache.
    n_active: number of running sequences.
    prefilling: the running sequences whose prompts are not fully cached yet.
    free: number of blocks that are free or held only by the prefix cache, minus the blocks that
        ``prefilling`` will take.
    prefix_cache: where requests find the prompts of others; None if they do not. With it, a request waits
        while another one computes the block that it would compute next, until that one is cached.

    A request is always admitted if it and all admitted requests can grow to full length together. Beyond
    that, admission is optimistic, since requests may end early: there must be blocks for the tokens to be
    computed, and one more free block per running sequence, so that a new request is not preempted at once.
    """

    def __init__(
        self, budget: BlockBudget, n_active: int, prefilling: list[Sequence], prefix_cache: PrefixCache | None
    ) -> None:
        self.budget, self.n_active, self.prefix_cache = budget, n_active, prefix_cache
        self.free = budget.available - budget.blocks_to_prefill(prefilling)
        self._shared: set[int] = set()  # cached blocks that admitted requests keep from being evicted
        self._computed_now: set[Tokens] = set()  # what _next_block returns for requests being prefilled
        if prefix_cache is not None:
            self._computed_now.update(self._next_block(s, budget.cached_prefix(s)[0]) for s in prefilling)

    def take(self, sequence: Sequence) -> int | None:
        """Reserve the request's blocks if it may start, and return how many tokens it computes.

        Returns 0 if it waits for tokens that another request is computing, and None if there are too few
        blocks. Tokens and blocks that the prefix cache holds are not counted, except that these blocks can no
        longer be evicted.
        """
        if sequence.waits_for_parent:
            return 0
        blocks = self.budget.blocks
        n_cached, shared = self.budget.cached_prefix(sequence)
        next_block = self._next_block(sequence, n_cached)
        if next_block and next_block in self._computed_now and sequence.prompt_logprobs is None:
            return 0
        need = blocks_for(len(sequence.tokens), blocks.block_size)
        kept: set[int] = set()
        if n_cached:
            n_full = n_cached // blocks.block_size
            kept = {b for b in shared[:n_full] if blocks.is_evictable(b)} - self._shared
            need += len(kept) - n_full
        if self.budget.max_blocks(sequence) > self.budget.unreserved and need + self.n_active > self.free:
            return None
        self.free -= need
        self.n_active += 1
        self._shared |= kept
        self.budget.reserve(sequence)
        self._computed_now.add(next_block)
        return sequence.prefill_length - n_cached

    def _next_block(self, sequence: Sequence, n_cached: int) -> Tokens:
        """Return the prompt up to the end of the block after its ``n_cached`` cached tokens.

        Returns () if the prompt has no token after that block, or if there is no prefix cache.
        """
        if self.prefix_cache is None:
            return ()
        end = n_cached + max(self.budget.blocks.block_size, self.prefix_cache.alignment)
        return tuple(sequence.tokens[:end]) if end < sequence.n_prompt else ()


class WaitingQueue(deque[Sequence]):
    """The waiting requests in order of arrival; preempted requests return to the front."""

    def __init__(self, limits: SchedulerConfig) -> None:
        super().__init__()
        self._limits, self._packed_rounds = limits, 0

    def admit(self, places: int, tokens: int, room: Room) -> list[Sequence]:
        """Remove and return the requests that start now.

        places: maximum number of requests.
        tokens: number of tokens to compute; the last admitted request may exceed it, and is then cut.
        room: the available KV blocks.
        """
        limits = self._limits
        packs = limits.admission_policy == "pack" and self._packed_rounds < limits.fifo_every - 1
        admitted = self._shortest(places, tokens, room) if packs else self._first(places, tokens, room)
        if admitted:  # a fifo round repeats until the head of the queue fits, so none overtakes it
            self._packed_rounds = self._packed_rounds + 1 if packs else 0
        return admitted

    def _first(self, places: int, tokens: int, room: Room) -> list[Sequence]:
        admitted = _fill(self, places, tokens, room, skip=False)
        self._remove(admitted)
        return admitted

    def _shortest(self, places: int, tokens: int, room: Room) -> list[Sequence]:
        """Remove and return requests from the first ``pack_lookahead``, in order of fewest tokens to compute.

        Requests for which there are too few blocks are skipped.
        """
        candidates = islice(self, self._limits.pack_lookahead)
        by_length = sorted(candidates, key=lambda request: request.prefill_length)
        admitted = _fill(by_length, places, tokens, room, skip=True)
        self._remove(admitted)
        return admitted

    def _remove(self, admitted: list[Sequence]) -> None:
        """Remove requests that are near the front; the rest keep their places in the queue."""
        gone = set(admitted)
        kept: list[Sequence] = []
        while gone:
            request = self.popleft()
            if request in gone:
                gone.remove(request)
            else:
                kept.append(request)
        self.extendleft(reversed(kept))


def _fill(requests: Iterable[Sequence], places: int, tokens: int, room: Room, skip: bool) -> list[Sequence]:
    """Return the first requests that fit into ``places``, ``tokens`` and ``room``, and reserve their blocks.

    skip: whether to pass over a request for which there are too few blocks, instead of stopping at it.

    A request that waits for another one's prefill is always passed over.
    """
    admitted: list[Sequence] = []
    for request in requests:
        if len(admitted) == places or tokens < 1:
            break
        n_computed = room.take(request)
        if n_computed:
            tokens -= n_computed
            admitted.append(request)
        elif n_computed is None and not skip:
            break
    return admitted


def config_or_default(config: SchedulerConfig | None) -> SchedulerConfig:
    """Return ``config``, or the default if it is None; raise ``RoseError`` for any other type."""
    if config is not None and not isinstance(config, SchedulerConfig):
        raise RoseError(f"config is {describe(config)}; give a SchedulerConfig")
    return config or SchedulerConfig()


def batch_size_of(config: SchedulerConfig, most: int) -> int:
    """Return the maximum number of active sequences; raise ``RoseError`` if it exceeds ``most``.

    most: the engine's limit.
    """
    size = config.max_batch_size or most
    if size > most:
        raise RoseError(f"max_batch_size is {size}; the engine decodes at most {most} sequences together")
    return size
