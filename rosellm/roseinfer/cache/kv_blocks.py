"""The paged KV cache (PagedAttention, arXiv:2309.06180) and its block allocator.

A pool is an allocator of ``max_blocks_per_layer`` blocks. With ``pool="per_layer"`` every layer has its own;
with ``"shared"`` there is one, whose block i is block i of every layer, so allocation is tracked once for all
layers. A block id is global: ``pool * max_blocks_per_layer + block_index``. All metadata are Python integers;
the only device work done here is cloning a shared block (copy on write).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence as SequenceOf
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rosellm.errors import KVCacheExhausted, RoseError


class KVBlockInfo(NamedTuple):
    """A block in use: its layer, its index in the pool, the position of its first token, tokens held.

    The layer is 0 in a pool shared by all layers.
    """

    layer: int
    block_index: int
    start: int
    length: int


@dataclass(slots=True)
class MutableKVBlockInfo:
    """The same, incremented in place; read ``length`` before the increment if you need the old value."""

    layer: int
    block_index: int
    start: int
    length: int


Advanced = tuple[list[int], list[int], list[int]]  # block indices, positions, rows not advanced


class Slots(NamedTuple):
    """Where each row's new token goes in the layers of one pool: block index and position in the block."""

    block_idx: list[int]
    pos: list[int]


def blocks_for(n_tokens: int, block_size: int) -> int:
    """Return the number of blocks needed for ``n_tokens`` tokens."""
    return -(-n_tokens // block_size)


class KVBlockManager:
    """K and V of all layers as ``[L, N_BLOCKS, H_kv, BLOCK_SIZE, D]``, with reference-counted blocks.

    num_heads counts key/value heads. Callers own lists of block ids, one per sequence and pool, and pass them
    in; methods that add tokens extend those lists in place. A full shared block is never cloned: a new block
    follows it. A partly filled shared block is cloned before the first write (copy on write), so other
    holders are unaffected. ``KVCacheExhausted`` is raised before anything changes. ``pool_of[layer]`` is a
    layer's pool. ``copy_on_ranks``: runs :meth:`copy_block` on every rank, or None if there is one.
    """

    copy_on_ranks: Callable[[int, int, int], object] | None = None

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        block_size: int,
        max_blocks_per_layer: int,
        device: torch.device | str,
        dtype: torch.dtype,
        block_info: Literal["tuple", "slots"] = "slots",
        pool: Literal["per_layer", "shared"] = "per_layer",
    ) -> None:
        shape = (num_layers, max_blocks_per_layer, num_heads, block_size, head_dim)
        self.k_cache, self.v_cache = (_zeros(shape, torch.device(device), dtype) for _ in range(2))
        self.num_layers, self.block_size = num_layers, block_size
        self.max_blocks_per_layer = max_blocks_per_layer
        self.pool_of = _POOL_OF[pool](num_layers)
        self.num_pools = len(set(self.pool_of))
        self._new_info, self._advance = _BLOCK_INFO[block_info]
        total = self.num_pools * max_blocks_per_layer
        self._infos: list = [None] * total
        self._refs = [0] * total
        self._cached = [0] * total  # holders that are prefix-cache entries
        self._evictable = [0] * self.num_pools  # blocks held by prefix-cache entries only
        self._free = [
            list(range((pool + 1) * max_blocks_per_layer - 1, pool * max_blocks_per_layer - 1, -1))
            for pool in range(self.num_pools)
        ]

    def num_free_blocks(self, pool: int = 0) -> int:
        return len(self._free[pool])

    def num_evictable_blocks(self, pool: int = 0) -> int:
        """Return the number of blocks held only by the prefix cache."""
        return self._evictable[pool]

    def info(self, block_id: int) -> KVBlockInfo | MutableKVBlockInfo:
        """Return the metadata of a block in use; raises ``KeyError`` if it is free."""
        if self._refs[block_id] == 0:
            raise KeyError(f"block {block_id} is free")
        return self._infos[block_id]

    def ref_count(self, block_id: int) -> int:
        return self._refs[block_id]

    def incref_blocks(self, block_ids: SequenceOf[int]) -> None:
        """Add a holder to each block; raises ``KeyError``, changing nothing, if one is free."""
        for block_id in block_ids:
            if self._refs[block_id] == 0:
                raise KeyError(f"block {block_id} is free and cannot be shared")
        for block_id in block_ids:
            if self._refs[block_id] == self._cached[block_id]:
                self._evictable[block_id // self.max_blocks_per_layer] -= 1
            self._refs[block_id] += 1

    def cache_blocks(self, block_ids: SequenceOf[int]) -> None:
        """Add a prefix-cache entry, which can be evicted, as a holder of each block."""
        self.incref_blocks(block_ids)
        for block_id in block_ids:
            self._cached[block_id] += 1
            if self._refs[block_id] == self._cached[block_id]:
                self._evictable[block_id // self.max_blocks_per_layer] += 1

    def evict_blocks(self, block_ids: SequenceOf[int]) -> None:
        """Remove a prefix-cache entry from each block's holders."""
        for block_id in block_ids:
            if self._refs[block_id] == self._cached[block_id]:
                self._evictable[block_id // self.max_blocks_per_layer] -= 1
            self._cached[block_id] -= 1
        self.free_blocks(block_ids)

    def free_blocks(self, block_ids: SequenceOf[int]) -> None:
        """Remove a holder from each block; a block without holders returns to its pool.

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
                self._free[block_id // self.max_blocks_per_layer].append(block_id)
                self._infos[block_id] = None
            elif self._refs[block_id] == self._cached[block_id]:
                self._evictable[block_id // self.max_blocks_per_layer] += 1

    def reserve_tokens(self, pool: int, block_ids_list: list[list[int]]) -> Slots:
        """Reserve a slot for one more token of every row, in the metadata only.

        The caller writes keys and values, in every layer of the pool.
        """
        block_idx, pos, slow = self._advance(self._infos, self._refs, self.block_size, block_ids_list)
        if len(slow) > len(self._free[pool]):
            self._undo_advance(block_ids_list, set(slow))
            self._raise_exhausted(pool, len(slow))
        for row in slow:
            block_idx[row], pos[row] = self._open_slot(pool, block_ids_list[row])
        return Slots(block_idx, pos)

    def reserve_prompt(self, pool: int, block_ids: list[int], n_tokens: int) -> None:
        """Reserve slots for ``n_tokens`` more tokens of one sequence, in the metadata only."""
        tail = self._infos[block_ids[-1]] if block_ids else None
        if tail:
            length, start = tail.length, tail.start + self.block_size
        else:
            length, start = self.block_size, 0
        room = self.block_size - length
        clone = bool(room) and n_tokens > 0 and self._refs[block_ids[-1]] > 1
        needed = blocks_for(max(n_tokens - room, 0), self.block_size) + clone
        if needed > len(self._free[pool]):
            self._raise_exhausted(pool, needed)
        if clone:
            block_ids[-1] = self.clone_block(block_ids[-1], length)
        if room and n_tokens:
            self._set_length(block_ids[-1], length + min(room, n_tokens))
        for first in range(room, n_tokens, self.block_size):
            block_ids.append(self._allocate(pool, start, min(self.block_size, n_tokens - first)))
            start += self.block_size

    def tokens_reserved(self, block_ids: list[int]) -> int:
        """Return the number of a sequence's tokens that have reserved slots."""
        if not block_ids:
            return 0
        return (len(block_ids) - 1) * self.block_size + self._infos[block_ids[-1]].length

    def clone_block(self, block_id: int, length: int) -> int:
        """Return a private copy of a block's first ``length`` tokens, in every layer of its pool.

        The original loses one holder.
        """
        pool = block_id // self.max_blocks_per_layer
        if not self._free[pool]:
            self._raise_exhausted(pool, 1)
        clone = self._allocate(pool, self._infos[block_id].start, length)
        source, target = self._infos[block_id].block_index, self._infos[clone].block_index
        (self.copy_on_ranks or self.copy_block)(pool, source, target)
        self.free_blocks([block_id])
        return clone

    def copy_block(self, pool: int, source: int, target: int) -> None:
        """Copy keys and values of block ``source`` of a pool to ``target``, in every layer of the pool."""
        for cache in (self.k_cache, self.v_cache):
            layers = cache.unflatten(0, (self.num_pools, -1))[pool]  # [layers of the pool, N_BLOCKS, ...]
            layers[:, target].copy_(layers[:, source])

    def append_token(self, layer_idx: int, block_ids: list[int], key_new: Tensor, value_new: Tensor) -> None:
        """Append a token to one sequence: key_new, value_new ``[H, D]``; ``block_ids`` is extended in place.

        Requires one pool per layer, like :meth:`append_token_batch`.
        """
        self.append_token_batch(layer_idx, [block_ids], key_new[None], value_new[None])

    def append_token_batch(
        self, layer_idx: int, block_ids_list: list[list[int]], key_new: Tensor, value_new: Tensor
    ) -> None:
        """Append a token to every sequence: key_new, value_new ``[B, H, D]``; lists are extended in place.

        Metadata and cache advance together, layer by layer. Raises ``RoseError`` for a pool shared by layers,
        whose metadata advance once for all of them: reserve slots, then write every layer.
        """
        if self.num_pools < self.num_layers:
            raise RoseError(
                f"pool='shared' reserves slots once for all {self.num_layers} layers; "
                "call reserve_tokens, then write every layer's keys and values to those slots"
            )
        slots = self.reserve_tokens(layer_idx, block_ids_list)
        block_idx, pos = torch.tensor(slots, device=self.k_cache.device)  # [B]
        self.k_cache[layer_idx][block_idx, :, pos] = key_new
        self.v_cache[layer_idx][block_idx, :, pos] = value_new

    def check_integrity(self, held: Mapping[int, int] | None = None) -> None:
        """Assert that each block is either free (listed once, no holders, no metadata) or held.

        held: the expected number of holders of each block in use; if given, the counts must match.
        """
        for pool, free in enumerate(self._free):
            ids = range(pool * self.max_blocks_per_layer, (pool + 1) * self.max_blocks_per_layer)
            name, unheld = self._name(pool), {b for b in ids if self._refs[b] == 0}
            assert len(free) == len(set(free)), f"{name} lists a free block twice"
            for b in ids:
                assert (b in unheld) == (self._infos[b] is None), f"block {b}: metadata and holders disagree"
            assert set(free) == unheld, f"{name}: the free list is wrong"
            evictable = sum(0 < self._refs[b] == self._cached[b] for b in ids)
            assert self._evictable[pool] == evictable, f"{name}: the count of evictable blocks is wrong"
        if held is not None:
            counted = {block_id: n for block_id, n in enumerate(self._refs) if n}
            wrong = {b for b in counted.keys() | held.keys() if counted.get(b, 0) != held.get(b, 0)}
            assert not wrong, "; ".join(
                f"block {b} counts {counted.get(b, 0)} holders and has {held.get(b, 0)}"
                for b in sorted(wrong)
            )

    def _allocate(self, pool: int, start: int, length: int) -> int:
        block_id = self._free[pool].pop()
        self._refs[block_id] = 1
        block_index = block_id - pool * self.max_blocks_per_layer
        self._infos[block_id] = self._new_info(pool, block_index, start, length)
        return block_id

    def _open_slot(self, pool: int, block_ids: list[int]) -> tuple[int, int]:
        """Roll over into a new block, or copy on write; room has been checked."""
        tail = self._infos[block_ids[-1]] if block_ids else None
        if tail is None or tail.length == self.block_size:
            block_ids.append(self._allocate(pool, tail.start + self.block_size if tail else 0, 1))
            return self._infos[block_ids[-1]].block_index, 0
        pos = tail.length
        block_ids[-1] = self.clone_block(block_ids[-1], pos + 1)
        return self._infos[block_ids[-1]].block_index, pos

    def _set_length(self, block_id: int, length: int) -> None:
        info = self._infos[block_id]
        self._infos[block_id] = self._new_info(info.layer, info.block_index, info.start, length)

    def _undo_advance(self, block_ids_list: list[list[int]], slow: set[int]) -> None:
        for row, block_ids in enumerate(block_ids_list):
            if row not in slow:
                self._set_length(block_ids[-1], self._infos[block_ids[-1]].length - 1)

    def _raise_exhausted(self, pool: int, needed: int) -> None:
        raise KVCacheExhausted(
            f"{self._name(pool)} needs {needed} more KV blocks and {len(self._free[pool])} of "
            f"{self.max_blocks_per_layer} are free"
        )

    def _name(self, pool: int) -> str:
        return f"layer {pool}" if self.num_pools == self.num_layers else "the shared pool"


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return zeros; on a CPU the pages are mapped lazily, while ``torch.zeros`` would write them all."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def _advance_tuples(
    infos: list, refs: list[int], block_size: int, block_ids_list: list[list[int]]
) -> Advanced:
    """Advance every row whose last block has room and one holder by a token; the other rows are returned."""
    block_idx, pos, slow = [0] * len(block_ids_list), [0] * len(block_ids_list), []
    for row, block_ids in enumerate(block_ids_list):
        last = block_ids[-1] if block_ids else -1
        info = infos[last]
        if block_ids and info.length < block_size and refs[last] == 1:
            block_idx[row], pos[row] = info.block_index, info.length
            infos[last] = KVBlockInfo(info.layer, info.block_index, info.start, info.length + 1)
        else:
            slow.append(row)
    return block_idx, pos, slow


def _advance_slots(
    infos: list, refs: list[int], block_size: int, block_ids_list: list[list[int]]
) -> Advanced:
    """Like :func:`_advance_tuples`, in place: the position is read before the increment."""
    block_idx, pos, slow = [0] * len(block_ids_list), [0] * len(block_ids_list), []
    for row, block_ids in enumerate(block_ids_list):
        last = block_ids[-1] if block_ids else -1
        info = infos[last]
        if block_ids and info.length < block_size and refs[last] == 1:
            block_idx[row], pos[row] = info.block_index, info.length
            info.length += 1
        else:
            slow.append(row)
    return block_idx, pos, slow


_POOL_OF = {"per_layer": lambda layers: tuple(range(layers)), "shared": lambda layers: (0,) * layers}
_BLOCK_INFO = {"tuple": (KVBlockInfo, _advance_tuples), "slots": (MutableKVBlockInfo, _advance_slots)}
