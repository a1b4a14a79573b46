"""Send block tables to the device: which blocks hold each sequence's tokens, for every pool.

All variants take ``block_ids[pool][row]`` (lists of global block ids) and return one table per pool, int32
``[B, MAX_BLOCKS]``, of block indices within the pool. Entries past a sequence's blocks are padding that no
kernel reads. blocks_per_pool: ``KVBlockManager.max_blocks_per_layer``.
"""

from __future__ import annotations

from itertools import compress, zip_longest
from operator import ne

import numpy as np
import torch
from torch import Tensor

from rosellm.roseinfer.cache.staging import StagingBuffer
from rosellm.roseinfer.profile_range import profile_range

BUILD_RANGE = "roseinfer.decode_step_sessions.build_block_tables"
H2D_RANGE = "roseinfer.decode_step_sessions.h2d_block_tables"
_INT32S_PER_ROW_NUMBER = 2  # ``index_copy_`` wants int64


def _padded(rows: list[list[int]]) -> np.ndarray:
    """Pad short rows with 0; int64 ``[B, longest]``."""
    return np.array(list(zip_longest(*rows, fillvalue=0)), dtype=np.int64).reshape(-1, len(rows)).T


def fill_tables(tables: np.ndarray, block_ids: list[list[list[int]]], blocks_per_pool: int) -> None:
    """Write all of ``block_ids[pool][row]`` into ``tables [POOLS, B, MAX_BLOCKS]``, padded with 0."""
    for pool, rows in enumerate(block_ids):
        ids = _padded(rows)
        np.maximum(ids - pool * blocks_per_pool, 0, out=tables[pool, :, : ids.shape[1]], casting="unsafe")
        tables[pool, :, ids.shape[1] :] = 0


class PerLayerTables:
    """Builds tables as Python lists, with one pageable host-to-device copy per pool."""

    def __init__(self, device: torch.device, max_blocks: int, blocks_per_pool: int) -> None:
        self.device, self.max_blocks, self.blocks_per_pool = device, max_blocks, blocks_per_pool

    def stage(self, block_ids: list[list[list[int]]]) -> list[Tensor]:
        """``block_ids[pool][row]`` → a tensor ``[B, MAX_BLOCKS]`` for each pool."""
        with profile_range(BUILD_RANGE):
            tables = [self._build(pool * self.blocks_per_pool, rows) for pool, rows in enumerate(block_ids)]
        with profile_range(H2D_RANGE):
            return [torch.tensor(table, dtype=torch.int32).to(self.device) for table in tables]

    def _build(self, first_id: int, rows: list[list[int]]) -> list[list[int]]:
        width = self.max_blocks
        return [[block_id - first_id for block_id in row] + [0] * (width - len(row)) for row in rows]


class PinnedTables:
    """Builds all pools' tables in one reused, growing pinned buffer, sent in one non-blocking copy."""

    def __init__(self, device: torch.device, max_blocks: int, blocks_per_pool: int) -> None:
        self.max_blocks, self.blocks_per_pool = max_blocks, blocks_per_pool
        self._staging = StagingBuffer(device, torch.int32)

    def stage(self, block_ids: list[list[list[int]]]) -> Tensor:
        """``block_ids[pool][row]`` → one tensor ``[POOLS, B, MAX_BLOCKS]``."""
        with profile_range(BUILD_RANGE):
            tables = self._staging.host(len(block_ids), len(block_ids[0]), self.max_blocks)
            fill_tables(tables, block_ids, self.blocks_per_pool)
        with profile_range(H2D_RANGE):
            return self._staging.send()


class ResidentTables:
    """Keeps the tables on the device; sends changed rows in one non-blocking copy and one scatter.

    A row has changed if its list in any pool differs from what was last sent. Comparing whole lists is exact
    whatever happened to a row (growth, copy on write, another sequence, a list emptied and refilled), and
    cheap: unchanged lists hold the same integer objects, which Python compares by identity first.
    """

    def __init__(self, device: torch.device, max_blocks: int, blocks_per_pool: int) -> None:
        self.max_blocks, self.blocks_per_pool = max_blocks, blocks_per_pool
        self._staging = StagingBuffer(device, torch.int32)
        self._tables = torch.empty(0, 0, max_blocks, dtype=torch.int32, device=device)
        self._sent: list[list[list[int]]] = []  # copies of the lists that the buffer's rows hold

    def stage(self, block_ids: list[list[list[int]]]) -> Tensor:
        """``block_ids[pool][row]`` → ``[POOLS, B, MAX_BLOCKS]``, rows 0..B-1 of the resident buffer.

        The next call overwrites it. If no row has changed, nothing is sent and nothing runs on the device.
        """
        batch = len(block_ids[0])
        with profile_range(BUILD_RANGE):
            if batch > self._tables.shape[1]:
                self._grow(len(block_ids), batch)
            changed = self._changed(block_ids)
            if changed:
                self._build(changed, [[rows[row] for row in changed] for rows in block_ids])
        with profile_range(H2D_RANGE):
            if changed:
                self._send(len(block_ids), len(changed))
        for rows, sent in zip(block_ids, self._sent, strict=True):
            for row in changed:
                sent[row] = list(rows[row])
        return self._tables[:, :batch]

    def _grow(self, pools: int, batch: int) -> None:
        """Allocate a larger, zero-filled buffer; every row counts as changed."""
        capacity = max(batch, 2 * self._tables.shape[1])
        self._tables = self._tables.new_zeros(pools, capacity, self.max_blocks)
        self._sent = [[[]] * capacity for _ in range(pools)]

    def _changed(self, block_ids: list[list[list[int]]]) -> list[int]:
        changed: set[int] = set()
        for rows, sent in zip(block_ids, self._sent, strict=True):
            changed.update(compress(range(len(rows)), map(ne, rows, sent)))
        return sorted(changed)

    def _build(self, changed: list[int], block_ids: list[list[list[int]]]) -> None:
        """Stage the row numbers (int64), then those rows of all pools, in one buffer."""
        pools, n = len(block_ids), len(changed)
        host = self._staging.host(n * (_INT32S_PER_ROW_NUMBER + pools * self.max_blocks))
        numbers, tables = np.split(host, [n * _INT32S_PER_ROW_NUMBER])
        numbers.view(np.int64)[:] = changed
        fill_tables(tables.reshape(pools, n, self.max_blocks), block_ids, self.blocks_per_pool)

    def _send(self, pools: int, n: int) -> None:
        sent = self._staging.send()
        numbers, tables = sent.tensor_split([n * _INT32S_PER_ROW_NUMBER])
        self._tables.index_copy_(1, numbers.view(torch.int64), tables.view(pools, n, self.max_blocks))


Tables = PerLayerTables | PinnedTables | ResidentTables
TABLES: dict[str, type[Tables]] = {
    "per_layer": PerLayerTables,
    "pinned": PinnedTables,
    "resident": ResidentTables,
}
