"""Pools of KV blocks: the bookkeeping that host-driven rungs keep in Python.

A pool allocates the blocks of one layer, or of all layers that share the pool. A table lists the blocks of
one sequence in one pool; reserving slots extends it in place. Sequences share no blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rosellm.errors import KVCacheExhausted
from rosellm.roseinfer.cache.kv_blocks import blocks_for, zeros_on

Table = list[int]
Advanced = tuple[list[int], list[int], list[int]]  # block indices, positions, rows that need a new block


class Slots(NamedTuple):
    """The slots of each row's new token in one pool.

    block_idx: the blocks' indices. pos: the positions within the blocks.
    """

    block_idx: list[int]
    pos: list[int]


class KVBlockInfo(NamedTuple):
    """A block in use.

    pool: index of its pool.
    block_index: its index in the pool.
    start: the position of its first token in the sequence.
    length: its number of tokens.
    """

    pool: int
    block_index: int
    start: int
    length: int


@dataclass(slots=True)
class MutableKVBlockInfo:
    """A :class:`KVBlockInfo` whose ``length`` is incremented in place."""

    pool: int
    block_index: int
    start: int
    length: int


class TuplePool:
    """A pool of ``n_blocks`` blocks that keeps an immutable tuple for each block in use.

    number: the index of the pool.
    """

    new_info: type[KVBlockInfo] | type[MutableKVBlockInfo] = KVBlockInfo

    def __init__(self, number: int, n_blocks: int, block_size: int) -> None:
        self.number, self.block_size = number, block_size
        self.infos: list = [None] * n_blocks
        self.free = list(range(n_blocks - 1, -1, -1))

    def reserve_tokens(self, tables: list[Table]) -> Slots:
        """Reserve a slot for one more token of every row.

        Raises ``KVCacheExhausted``, and changes nothing, if there are too few free blocks.
        """
        if len(tables) > len(self.free):
            self._check_room(sum(self.tokens_in(table) % self.block_size == 0 for table in tables))
        block_idx, pos, full = self.advance(tables)
        for row in full:
            block_idx[row] = self._open_block(tables[row], 1)
        return Slots(block_idx, pos)

    def advance(self, tables: list[Table]) -> Advanced:
        """Add a token to the last block of each row, unless that block is full.

        Returns block indices, positions in the blocks, and the rows that need a new block; for the rows that
        need a new block, index and position are 0.
        """
        infos, block_idx, pos, full = self.infos, [0] * len(tables), [0] * len(tables), []
        for row, table in enumerate(tables):
            info = infos[table[-1]] if table else None
            if info and info.length < self.block_size:
                block_idx[row], pos[row] = info.block_index, info.length
                infos[table[-1]] = KVBlockInfo(info.pool, info.block_index, info.start, info.length + 1)
            else:
                full.append(row)
        return block_idx, pos, full

    def reserve_prompt(self, table: Table, n_tokens: int) -> None:
        """Reserve slots for ``n_tokens`` more tokens of one sequence.

        Raises ``KVCacheExhausted``, and changes nothing, if there are too few free blocks.
        """
        room = -self.tokens_in(table) % self.block_size
        self._check_room(blocks_for(max(n_tokens - room, 0), self.block_size))
        if room and n_tokens:
            info = self.infos[table[-1]]
            length = info.length + min(room, n_tokens)
            self.infos[table[-1]] = self.new_info(info.pool, info.block_index, info.start, length)
        for first in range(room, n_tokens, self.block_size):
            self._open_block(table, min(self.block_size, n_tokens - first))

    def tokens_in(self, table: Table) -> int:
        """Return the number of tokens that have slots in the blocks of a table."""
        return (len(table) - 1) * self.block_size + self.infos[table[-1]].length if table else 0

    def release(self, table: Table) -> None:
        """Free the blocks of a table, and clear the table."""
        for block in table:
            self.infos[block] = None
        self.free += table
        table.clear()

    def _open_block(self, table: Table, length: int) -> int:
        block = self.free.pop()
        self.infos[block] = self.new_info(self.number, block, len(table) * self.block_size, length)
        table.append(block)
        return block

    def _check_room(self, needed: int) -> None:
        if needed > len(self.free):
            raise KVCacheExhausted(
                f"pool {self.number} needs {needed} more KV blocks and {len(self.free)} of "
                f"{len(self.infos)} are free"
            )


class SlotPool(TuplePool):
    """A pool that keeps a mutable entry for each block in use, and increments its length in place."""

    new_info = MutableKVBlockInfo

    def advance(self, tables: list[Table]) -> Advanced:
        """Do the same as :meth:`TuplePool.advance`, but increment lengths in place."""
        infos, block_idx, pos, full = self.infos, [0] * len(tables), [0] * len(tables), []
        for row, table in enumerate(tables):
            info = infos[table[-1]] if table else None
            if info and info.length < self.block_size:
                block_idx[row], pos[row] = info.block_index, info.length
                info.length += 1
            else:
                full.append(row)
        return block_idx, pos, full


class PooledBlocks:
    """The paged caches of all layers, and the pools that allocate their blocks.

    Every pool holds the same tokens, so the engine counts only the blocks of the first pool; the
    ``block_ids`` of a sequence are its table in that pool.

    sizes: the shape of each cache, ``[L, N_BLOCKS, H_kv, BLOCK_SIZE, D]``.
    kind: the class of the pools.
    pool_of: the index of each layer's pool.
    """

    def __init__(
        self, sizes: tuple[int, ...], device: torch.device, dtype: torch.dtype, kind: type[TuplePool],
        pool_of: list[int],
    ) -> None:  # fmt: skip
        _, self.max_blocks_per_layer, _, self.block_size, _ = sizes
        self.k_cache, self.v_cache = (zeros_on(device, sizes, dtype) for _ in range(2))
        self.pool_of = pool_of
        numbers = range(max(pool_of) + 1)
        self.pools = [kind(number, self.max_blocks_per_layer, self.block_size) for number in numbers]

    def num_free_blocks(self, pool: int = 0) -> int:
        return len(self.pools[pool].free)

    def ref_count(self, block: int) -> int:
        return int(self.pools[0].infos[block] is not None)

    def tokens_reserved(self, table: Table) -> int:
        """Return the number of tokens that have slots in the blocks of a table of the first pool."""
        return self.pools[0].tokens_in(table)

    def free_blocks(self, table: Table) -> None:
        """Free the blocks of a table of the first pool, and clear the table.

        The step frees the sequence's blocks in the other pools.
        """
        self.pools[0].release(table)

    def check_integrity(self, held: Mapping[int, int]) -> None:
        """Assert that the free lists are correct, and that the first pool's blocks in use match ``held``.

        A free list must hold each unused block once, and all pools must have the same number of free blocks.

        held: maps each block of the first pool that is in use to its number of holders, which must be 1.
        """
        for pool in self.pools:
            unused = {block for block, info in enumerate(pool.infos) if info is None}
            assert set(pool.free) == unused and len(pool.free) == len(unused), (
                f"pool {pool.number}: free list"
            )
            assert len(unused) == self.num_free_blocks(), f"pool {pool.number}: not used like the first"
        counts = {b: self.ref_count(b) for b in range(self.max_blocks_per_layer) if self.ref_count(b)}
        assert counts == dict(held), f"blocks in use: {sorted(counts)}; held: {dict(held)}"

    def operands(self, layer: int, key: Tensor, value: Tensor) -> dict[str, Tensor]:
        """Return the arguments that every append kernel takes: a layer's caches, new keys and new values."""
        caches = {"k_cache_layer": self.k_cache[layer], "v_cache_layer": self.v_cache[layer]}
        return {**caches, "key_new": key, "value_new": value}
