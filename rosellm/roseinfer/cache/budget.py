"""The budget of KV blocks: how many are free, how many are reserved, and how many sequences will need."""

from __future__ import annotations

from collections.abc import Iterable

from rosellm.roseinfer.cache.kv_blocks import KVBlocks, blocks_for
from rosellm.roseinfer.cache.prefix_cache import PrefixCache
from rosellm.roseinfer.request import Sequence

STEPS_ENSURED = 16


class BlockBudget:
    """Counts of free, reserved and needed blocks of the KV cache; one block spans all layers.

    blocks: the KV cache.
    prefix_cache: holds blocks that can be evicted; None if prompts are not cached.
    run_ahead: maximum number of steps in flight.
    per_step: maximum number of tokens that a step adds per sequence.
    reserved: number of blocks that all admitted sequences would hold at full length; may exceed the total.
    """

    def __init__(
        self, blocks: KVBlocks, prefix_cache: PrefixCache | None, run_ahead: int, per_step: int = 1
    ) -> None:
        self.blocks, self.prefix_cache = blocks, prefix_cache
        self.run_ahead, self.per_step = run_ahead, per_step
        self.reserved = 0
        self._ensured: list[Sequence] | None = None  # the list that has blocks for _ensured_steps more steps
        self._ensured_steps = self._ensured_need = 0

    @property
    def free(self) -> int:
        """The number of blocks held neither by a sequence nor by a prefix-cache entry."""
        return self.blocks.num_free_blocks()

    @property
    def available(self) -> int:
        """The number of blocks that are free or held only by the prefix cache."""
        return self.free + (0 if self.prefix_cache is None else self.prefix_cache.num_evictable())

    @property
    def unreserved(self) -> int:
        """The number of blocks not reserved for admitted sequences; may be negative."""
        return self.blocks.max_blocks_per_layer - self.reserved

    def reserve(self, sequence: Sequence) -> None:
        """Add the blocks of a newly admitted sequence, at full length, to ``reserved``."""
        self.reserved += self.max_blocks(sequence)

    def unreserve(self, sequence: Sequence) -> None:
        """Subtract the blocks of a sequence that has freed them from ``reserved``."""
        self.reserved -= self.max_blocks(sequence)

    def max_blocks(self, sequence: Sequence) -> int:
        """Return the maximum number of blocks that the sequence can hold; its last token is never cached."""
        return blocks_for(sequence.max_length - 1, self.blocks.block_size)

    def cached_prefix(self, sequence: Sequence) -> tuple[int, list[int]]:
        """Return the number of cached tokens with which a new sequence would start, and their blocks."""
        if not self.prefix_cache or sequence.prompt_logprobs is not None:
            return 0, []
        return self.prefix_cache.look_up(sequence.tokens[: sequence.prefill_length])

    def blocks_to_prefill(self, sequences: list[Sequence], counts: list[int] | None = None) -> int:
        """Return how many new blocks are needed to cache ``counts[i]`` more tokens of each sequence i.

        counts: None means all tokens still to be prefilled.

        Clones of shared blocks are included.
        """
        chunks = [s.n_to_prefill for s in sequences] if counts is None else counts
        return sum(self._to_hold(s, s.num_cached_tokens + n) for s, n in zip(sequences, chunks, strict=True))

    def blocks_to_decode(self, sequences: list[Sequence], steps: int = 1) -> list[int]:
        """Return how many new blocks each sequence needs for the steps in flight and ``steps`` more steps."""
        ahead = (self.run_ahead + steps) * self.per_step - 1
        return [self._to_hold(s, min(len(s.tokens) + ahead, s.max_length - 1)) for s in sequences]

    def make_room(self, n_blocks: int, sequences: Iterable[Sequence] = ()) -> bool:
        """Evict cached prefixes until ``n_blocks`` blocks are free; return whether that many are free.

        sequences: sequences whose last blocks will be written to. If eviction frees too few blocks, prefixes
            that share these last blocks are evicted too: this frees no block, but the shared block need not
            be cloned.
        """
        if self.prefix_cache is not None:
            self.prefix_cache.make_room(n_blocks, [i for s in sequences for i in s.block_ids[-1:]])
        return self.free >= n_blocks

    def make_room_to_prefill(self, sequences: list[Sequence], counts: list[int]) -> bool:
        """Evict cached prefixes if needed; return whether ``counts[i]`` more tokens of each sequence fit."""
        at_most = sum(counts) // self.blocks.block_size + 2 * len(sequences)
        if self.free >= at_most or self.make_room(self.blocks_to_prefill(sequences, counts), sequences):
            return True
        return self.free >= self.blocks_to_prefill(sequences, counts)  # evictions may have saved clones

    def make_room_to_decode(self, sequences: list[Sequence]) -> bool:
        """Evict cached prefixes if needed; return whether there are enough blocks for one more step.

        A sequence needs a block if its last one is full, or is shared and must be cloned. The exact need is
        computed only if fewer blocks are free than tokens can be in flight.
        """
        if self.free >= (self.run_ahead + 1) * self.per_step * len(sequences):
            return True
        if self.make_room(sum(self.blocks_to_decode(sequences)), sequences):
            return True
        return self.free >= sum(self.blocks_to_decode(sequences))  # evictions may have saved clones

    def ensure_decode(self, sequences: list[Sequence]) -> bool:
        """Like :meth:`make_room_to_decode`, for callers that pass the same, unchanged list at every step.

        Counting visits every sequence, so blocks are counted for ``STEPS_ENSURED`` steps at once. The result
        is reused for these steps as long as that many blocks are free, even if other sequences allocate
        blocks.
        """
        if self._ensured is sequences and self._ensured_steps and self.free >= self._ensured_need:
            self._ensured_steps -= 1
            return True
        self._ensured, self._ensured_steps = sequences, STEPS_ENSURED - 1
        each = blocks_for((self.run_ahead + STEPS_ENSURED) * self.per_step, self.blocks.block_size) + 1
        self._ensured_need = each * len(sequences)  # an upper bound, which is quick to compute
        if self.free >= self._ensured_need:
            return True
        self._ensured_need = sum(self.blocks_to_decode(sequences, STEPS_ENSURED))
        return self.free >= self._ensured_need or self.make_room_to_decode(sequences)

    def _to_hold(self, sequence: Sequence, length: int) -> int:
        """Return how many more blocks ``sequence`` needs to hold ``length`` tokens.

        The clone of a shared, partly filled last block is included.
        """
        held, size = sequence.block_ids, self.blocks.block_size
        reserved = self.blocks.tokens_reserved(held)
        if length <= reserved:
            return 0
        cloned = reserved % size > 0 and self.blocks.ref_count(held[-1]) > 1
        return blocks_for(length, size) - len(held) + cloned
