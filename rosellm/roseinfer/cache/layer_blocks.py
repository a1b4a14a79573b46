"""KV blocks for callers without an engine: every layer has its own pool of blocks."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from rosellm.roseinfer.cache.kv_blocks import KVBlocks


class KVBlockInfo(NamedTuple):
    """A block in use.

    layer, block_index: its layer and its index in that layer's pool.
    start: the position of its first token in the sequence.
    length: number of tokens in it.
    """

    layer: int
    block_index: int
    start: int
    length: int


class KVBlockManager:
    """A KV cache in which each layer allocates its own blocks, with ids ``layer * N_BLOCKS + block_index``.

    Layout, sharing and copy on write are as in ``KVBlocks``, the cache of engines, where one block id stands
    for the same block in every layer. ``KVCacheExhausted`` is raised before anything changes.
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        block_size: int,
        max_blocks_per_layer: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        sizes = num_heads, head_dim, block_size, max_blocks_per_layer, device, dtype
        whole = KVBlocks(num_layers, *sizes)
        self.k_cache, self.v_cache = whole.k_cache, whole.v_cache
        layers = zip(self.k_cache.split(1), self.v_cache.split(1), strict=True)
        self._pools = [KVBlocks(1, *sizes, caches=caches) for caches in layers]
        self.num_layers, self.block_size = num_layers, block_size
        self.max_blocks_per_layer = max_blocks_per_layer
        self._starts: dict[int, int] = {}

    def append_token(self, layer_idx: int, block_ids: list[int], key_new: Tensor, value_new: Tensor) -> None:
        """Append a token to one sequence, given its key and value ``[H_kv, D]``; extend ``block_ids``."""
        self.append_token_batch(layer_idx, [block_ids], key_new[None], value_new[None])

    def append_token_batch(
        self, layer_idx: int, block_ids_list: list[list[int]], key_new: Tensor, value_new: Tensor
    ) -> None:
        """Append a token to each sequence, given keys and values ``[B, H_kv, D]``; extend lists in place."""
        first = layer_idx * self.max_blocks_per_layer
        own = [[block_id - first for block_id in block_ids] for block_ids in block_ids_list]
        self._pools[layer_idx].append_token_batch(0, own, key_new, value_new)
        for block_ids, indices in zip(block_ids_list, own, strict=True):
            block_ids[:] = [first + index for index in indices]
            self._starts[block_ids[-1]] = (len(block_ids) - 1) * self.block_size

    def incref_blocks(self, block_ids: SequenceOf[int]) -> None:
        """Add a holder to each block; raise ``KeyError`` if any block is free."""
        for layer, indices in self._by_layer(block_ids):
            self._pools[layer].incref_blocks(indices)

    def free_blocks(self, block_ids: SequenceOf[int]) -> None:
        """Remove a holder from each block; raise ``KeyError`` if a block has too few holders."""
        for layer, indices in self._by_layer(block_ids):
            self._pools[layer].free_blocks(indices)

    def ref_count(self, block_id: int) -> int:
        layer, index = divmod(block_id, self.max_blocks_per_layer)
        return self._pools[layer].ref_count(index)

    def num_free_blocks(self, layer_idx: int = 0) -> int:
        return self._pools[layer_idx].num_free_blocks()

    def info(self, block_id: int) -> KVBlockInfo:
        """Return the metadata of a block in use; raise ``KeyError`` if the block is free."""
        layer, index = divmod(block_id, self.max_blocks_per_layer)
        return KVBlockInfo(layer, index, self._starts[block_id], self._pools[layer].length(index))

    def _by_layer(self, block_ids: SequenceOf[int]) -> list[tuple[int, list[int]]]:
        places = sorted(divmod(block_id, self.max_blocks_per_layer) for block_id in block_ids)
        return [(layer, [i for _, i in own]) for layer, own in groupby(places, key=lambda place: place[0])]
