"""The paged KV cache (PagedAttention, arXiv:2309.06180) and its block allocator.

Block i holds the same tokens in every layer, so a block is allocated once for all layers. All metadata are
Python integers. In an engine, the only device work done here is cloning a shared block (copy on write).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence as SequenceOf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rosellm.errors import KVCacheExhausted
from rosellm.models.quantized import CODES, AnyHeads, QuantizedHeads


def blocks_for(n_tokens: int, block_size: int) -> int:
    """Return the number of blocks needed for ``n_tokens`` tokens."""
    return -(-n_tokens // block_size)


class KVBlocks:
    """Keys and values of all layers in reference-counted blocks, each ``[L, N_BLOCKS, H_kv, BLOCK_SIZE, D]``.

    num_heads: number of key/value heads.
    dtype: dtype of keys and values.
    form: the format to which they are quantised, a key of ``quantized.CODES``; None for none.
    caches: existing tensors of keys and values; None allocates them.
    copy_everywhere: runs :meth:`copy_block` in every cache with these block ids, such as those of other ranks
        and of a draft model; None if there is only this one.

    Callers keep a list of block ids per sequence and pass it in; methods that add tokens extend the list in
    place. A full shared block is never cloned: a new block follows it. A partly filled shared block is cloned
    before the first write (copy on write), so its other holders are unaffected. ``KVCacheExhausted`` is
    raised before anything changes.
    """

    k_cache: Any  # a tensor, or ``QuantizedHeads``
    v_cache: Any
    copy_everywhere: Callable[[int, int], object] | None = None

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        block_size: int,
        max_blocks_per_layer: int,
        device: torch.device | str,
        dtype: torch.dtype,
        caches: tuple[Tensor, Tensor] | None = None,
        form: str | None = None,
    ) -> None:
        shape = (num_layers, max_blocks_per_layer, num_heads, block_size, head_dim)
        new = (_heads_on(torch.device(device), shape, dtype, form) for _ in range(2))
        self.k_cache, self.v_cache = new if caches is None else caches
        self.num_layers, self.block_size = num_layers, block_size
        self.max_blocks_per_layer = max_blocks_per_layer
        self._lengths = [0] * max_blocks_per_layer  # number of tokens with slots, per block
        self._refs = [0] * max_blocks_per_layer
        self._cached = [0] * max_blocks_per_layer  # holders that are prefix-cache entries
        self._evictable = 0  # blocks held by prefix-cache entries only
        self._free = list(range(max_blocks_per_layer - 1, -1, -1))

    def num_free_blocks(self) -> int:
        return len(self._free)

    def num_evictable_blocks(self) -> int:
        """Return the number of blocks held only by the prefix cache."""
        return self._evictable

    def is_evictable(self, block_id: int) -> bool:
        """Return whether a block is held only by the prefix cache."""
        return 0 < self._refs[block_id] == self._cached[block_id]

    def length(self, block_id: int) -> int:
        """Return the number of tokens that have slots in a block; raise ``KeyError`` if the block is free."""
        if self._refs[block_id] == 0:
            raise KeyError(f"block {block_id} is free")
        return self._lengths[block_id]

    def ref_count(self, block_id: int) -> int:
        return self._refs[block_id]

    def incref_blocks(self, block_ids: SequenceOf[int]) -> None:
        """Add a holder to each block; raise ``KeyError``, changing nothing, if any block is free."""
        for block_id in block_ids:
            if self._refs[block_id] == 0:
                raise KeyError(f"block {block_id} is free and cannot be shared")
        for block_id in block_ids:
            self._evictable -= self._refs[block_id] == self._cached[block_id]
            self._refs[block_id] += 1

    def cache_blocks(self, block_ids: SequenceOf[int]) -> None:
        """Add a prefix-cache entry, which can be evicted, to the holders of each block."""
        self.incref_blocks(block_ids)
        for block_id in block_ids:
            self._cached[block_id] += 1
            self._evictable += self._refs[block_id] == self._cached[block_id]

    def evict_blocks(self, block_ids: SequenceOf[int]) -> None:
        """Remove a prefix-cache entry from the holders of each block."""
        for block_id in block_ids:
            self._evictable -= self._refs[block_id] == self._cached[block_id]
            self._cached[block_id] -= 1
        self.free_blocks(block_ids)

    def free_blocks(self, block_ids: SequenceOf[int]) -> None:
        """Remove a holder from each block; a block without holders becomes free.

        Raises ``KeyError``, changing nothing, if a block is listed more often than it has holders;
        prefix-cache entries do not count as holders here.
        """
        for block_id, times in Counter(block_ids).items():
            holders = self._refs[block_id] - self._cached[block_id]
            if holders < times:
                raise KeyError(f"block {block_id} has {holders} holders; {times} cannot be removed")
        for block_id in block_ids:
            self._refs[block_id] -= 1
            if self._refs[block_id] == 0:
                self._free.append(block_id)
                self._lengths[block_id] = 0
            else:
                self._evictable += self._refs[block_id] == self._cached[block_id]

    def reserve_prompt(self, block_ids: list[int], n_tokens: int) -> None:
        """Reserve slots for ``n_tokens`` more tokens of one sequence, and extend ``block_ids`` in place.

        Raises ``KVCacheExhausted``, changing nothing, if too few blocks are free.
        """
        length = self._lengths[block_ids[-1]] if block_ids else self.block_size
        room = self.block_size - length
        clone = bool(room) and n_tokens > 0 and self._refs[block_ids[-1]] > 1
        self._check_room(blocks_for(max(n_tokens - room, 0), self.block_size) + clone)
        if clone:
            block_ids[-1] = self.clone_block(block_ids[-1], length)
        if room and n_tokens:
            self._lengths[block_ids[-1]] = length + min(room, n_tokens)
        for first in range(room, n_tokens, self.block_size):
            block_ids.append(self._allocate(min(self.block_size, n_tokens - first)))

    def tokens_reserved(self, block_ids: list[int]) -> int:
        """Return the number of a sequence's tokens for which slots are reserved."""
        if not block_ids:
            return 0
        return (len(block_ids) - 1) * self.block_size + self._lengths[block_ids[-1]]

    def clone_block(self, block_id: int, length: int) -> int:
        """Return the id of a new block that holds a block's first ``length`` tokens.

        The original block loses a holder. Raises ``KVCacheExhausted`` if no block is free.
        """
        self._check_room(1)
        clone = self._allocate(length)
        (self.copy_everywhere or self.copy_block)(block_id, clone)
        self.free_blocks([block_id])
        return clone

    def copy_block(self, source: int, target: int) -> None:
        """Copy the keys and values of block ``source`` to block ``target``, in every layer."""
        for cache in (self.k_cache, self.v_cache):
            for held in (cache,) if isinstance(cache, Tensor) else (cache.codes, cache.scales):
                held[:, target].copy_(held[:, source])

    def append_token(self, layer_idx: int, block_ids: list[int], key_new: Tensor, value_new: Tensor) -> None:
        """Append a token to one sequence in one layer, given its key and value ``[H_kv, D]``."""
        self.append_token_batch(layer_idx, [block_ids], key_new[None], value_new[None])

    def append_token_batch(
        self, layer_idx: int, block_ids_list: list[list[int]], key_new: Tensor, value_new: Tensor
    ) -> None:
        """Append a token to each sequence in one layer, given their keys and values ``[B, H_kv, D]``."""
        self._check_room(sum(self._needs_block(block_ids) for block_ids in block_ids_list))
        for block_ids in block_ids_list:
            self.reserve_prompt(block_ids, 1)
        block, slot = torch.tensor(
            [[ids[-1] for ids in block_ids_list], [self._lengths[ids[-1]] - 1 for ids in block_ids_list]],
            device=self.k_cache.device,
        )
        self.k_cache[layer_idx][block, :, slot] = key_new
        self.v_cache[layer_idx][block, :, slot] = value_new

    def check_integrity(self, held: Mapping[int, int] | None = None) -> None:
        """Assert that each block is either free (listed once, no holders, no tokens) or held.

        held: maps each block in use to its expected number of holders; None skips this check.
        """
        ids = range(self.max_blocks_per_layer)
        unheld = {b for b in ids if self._refs[b] == 0}
        assert len(self._free) == len(set(self._free)), "a free block is listed twice"
        for b in ids:
            assert (b in unheld) == (self._lengths[b] == 0), f"block {b}: length and holders disagree"
        assert set(self._free) == unheld, "the free list is wrong"
        evictable = sum(0 < self._refs[b] == self._cached[b] for b in ids)
        assert self._evictable == evictable, "the count of evictable blocks is wrong"
        if held is not None:
            counted = {block_id: n for block_id, n in enumerate(self._refs) if n}
            wrong = {b for b in counted.keys() | held.keys() if counted.get(b, 0) != held.get(b, 0)}
            assert not wrong, "; ".join(
                f"block {b} counts {counted.get(b, 0)} holders and has {held.get(b, 0)}"
                for b in sorted(wrong)
            )

    def _allocate(self, length: int) -> int:
        block_id = self._free.pop()
        self._refs[block_id], self._lengths[block_id] = 1, length
        return block_id

    def _needs_block(self, block_ids: list[int]) -> bool:
        """Return whether one more token needs another block: a new one, or the clone of a shared one."""
        if not block_ids or self._lengths[block_ids[-1]] == self.block_size:
            return True
        return self._refs[block_ids[-1]] > 1

    def _check_room(self, needed: int) -> None:
        if needed > len(self._free):
            raise KVCacheExhausted(
                f"the KV cache needs {needed} more blocks and {len(self._free)} of "
                f"{self.max_blocks_per_layer} are free"
            )


def _heads_on(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, form: str | None) -> AnyHeads:
    """Return keys or values of zeros, quantised unless ``form`` is None."""
    if form is None:
        return zeros_on(device, shape, dtype)
    codes, scales = zeros_on(device, shape, CODES[form]), zeros_on(device, shape[:-1], torch.float32)
    return QuantizedHeads(codes, scales, dtype)


def zeros_on(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros; on a CPU, pages are mapped at their first use, while ``torch.zeros`` would write all."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
