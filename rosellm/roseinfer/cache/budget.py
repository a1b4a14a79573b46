"""KV blocks a layer: how many there can be, and how many are free, promised and needed."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rosellm.models.model import GPT
from rosellm.roseinfer.cache.kv_blocks import KVBlockManager, blocks_for
from rosellm.roseinfer.cache.prefix_cache import PrefixCache
from rosellm.roseinfer.request import Sequence

CPU_KV_BYTES = 2 << 30
GPU_KV_SHARE = 0.6
STEPS_ASSURED = 16


class BlockBudget:
    """What of the KV cache is free, promised and needed; all counts are blocks a layer.

    run_ahead: begun steps that may be unfinished, so that so many tokens of a sequence may be on their way.
    ``promised``: what the admitted sequences hold once all of them have grown to their full length, which
    may be more than there is.
    """

    def __init__(self, blocks: KVBlockManager, prefix_cache: PrefixCache | None, run_ahead: int) -> None:
        self.blocks, self.prefix_cache, self.run_ahead = blocks, prefix_cache, run_ahead
        self.promised = 0
        self._assured: list[Sequence] | None = None  # they have blocks for so many steps more
        self._assured_steps = self._assured_need = 0

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return min(map(self.blocks.num_free_blocks, range(self.blocks.num_pools)))

    @property
    def available(self) -> int:
        """Blocks that are free, or that only the prefix cache holds."""
        return self.free + (0 if self.prefix_cache is None else self.prefix_cache.num_evictable())

    @property
    def unpromised(self) -> int:
        """What is left for a further sequence to grow to its full length, beside all that are admitted."""
        return self.blocks.max_blocks_per_layer - self.promised

    def promise(self, sequence: Sequence) -> None:
        """The sequence is admitted."""
        self.promised += self.at_most(sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """The sequence, once admitted, has given up its blocks."""
        self.promised -= self.at_most(sequence)

    def at_most(self, sequence: Sequence) -> int:
        """What the sequence may come to hold; its last token is never cached."""
        return blocks_for(sequence.max_length - 1, self.blocks.block_size)

    def to_prefill(self, sequences: list[Sequence], counts: list[int] | None = None) -> int:
        """What caching ``counts`` more tokens takes, None: all the rest; clones of shared blocks count."""
        chunks = [s.n_to_prefill for s in sequences] if counts is None else counts
        return sum(self._to_hold(s, s.n_cached + n) for s, n in zip(sequences, chunks, strict=True))

    def to_decode(self, sequences: list[Sequence], steps: int = 1) -> list[int]:
        """What each needs for the tokens cached by the end of so many steps begun from now."""
        ahead = self.run_ahead + steps - 1
        return [self._to_hold(s, min(len(s.tokens) + ahead, s.max_length - 1)) for s in sequences]

    def make_room(self, n_blocks: int, sequences: Iterable[Sequence] = ()) -> bool:
        """Evict cached prefixes until ``n_blocks`` are free, which ``sequences`` need; whether they are.

        Where that does not suffice, prefixes go that share the last blocks of ``sequences``, too: that frees
        none, but saves a clone.
        """
        if self.prefix_cache is not None:
            self.prefix_cache.make_room(n_blocks, [i for s in sequences for i in s.block_ids[0][-1:]])
        return self.free >= n_blocks

    def make_room_to_prefill(self, sequences: list[Sequence], counts: list[int]) -> bool:
        """Whether there are blocks for these tokens; cached prefixes are evicted as far as needed."""
        at_most = sum(counts) // self.blocks.block_size + 2 * len(sequences)
        if self.free >= at_most or self.make_room(self.to_prefill(sequences, counts), sequences):
            return True
        return self.free >= self.to_prefill(sequences, counts)  # sharing may have ended

    def make_room_to_decode(self, sequences: list[Sequence]) -> bool:
        """Whether there are blocks for one more step, cached prefixes being evicted as far as needed.

        What the sequences need (their last block is full, or shared and so cloned) is counted only where
        there is not a free block for each token that may be on its way.
        """
        if self.free >= (self.run_ahead + 1) * len(sequences):
            return True
        if self.make_room(sum(self.to_decode(sequences)), sequences):
            return True
        return self.free >= sum(self.to_decode(sequences))  # sharing may have ended

    def assure_decode(self, sequences: list[Sequence]) -> bool:
        """As :meth:`make_room_to_decode`, for whoever passes the same list, unchanged, step after step.

        Counted for some steps at once, since that takes a look at every sequence; what was counted then holds
        as long as so many blocks are free, whoever else takes some.
        """
        if self._assured is sequences and self._assured_steps and self.free >= self._assured_need:
            self._assured_steps -= 1
            return True
        self._assured, self._assured_steps = sequences, STEPS_ASSURED - 1
        self._assured_need = sum(self.to_decode(sequences, STEPS_ASSURED))
        return self.free >= self._assured_need or self.make_room_to_decode(sequences)

    def _to_hold(self, sequence: Sequence, length: int) -> int:
        """Blocks, with the clone of a last one that is shared, for so many tokens in all."""
        held, size = sequence.block_ids[0], self.blocks.block_size
        reserved = self.blocks.tokens_reserved(held)
        if length <= reserved:
            return 0
        cloned = reserved % size > 0 and self.blocks.ref_count(held[-1]) > 1
        return blocks_for(length, size) - len(held) + cloned


def kv_blocks_within_memory(gpt: GPT, wanted: int, block_size: int) -> int:
    """``wanted`` blocks a layer, or as many as the KV cache may take; at least 1.

    It may take ``GPU_KV_SHARE`` of a GPU's free memory, ``CPU_KV_BYTES`` on a CPU.
    """
    budget = CPU_KV_BYTES
    if gpt.device.type == "cuda":
        budget = int(GPU_KV_SHARE * torch.cuda.mem_get_info(gpt.device)[0])
    block_bytes = block_size * gpt.config.kv_bytes_per_token(gpt.dtype.itemsize)
    return max(1, min(wanted, budget // block_bytes))
