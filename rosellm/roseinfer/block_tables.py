"""Block tables on their way to the device: which blocks hold each sequence's tokens, for every layer.

Both variants take ``block_ids[layer][row]`` (lists of global block ids) and give one table a layer, int32
``[B, MAX_BLOCKS]``, of block indices within the layer's pool. Entries past a sequence's blocks are
padding that no kernel reads.
"""

from __future__ import annotations

from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from rosellm.roseinfer.staging import StagingBuffer

BUILD_RANGE = "roseinfer.decode_step_sessions.build_block_tables"
H2D_RANGE = "roseinfer.decode_step_sessions.h2d_block_tables"


def _padded(rows: list[list[int]]) -> np.ndarray:
    """``[B, longest]`` of int64, short rows padded with 0."""
    return np.array(list(zip_longest(*rows, fillvalue=0)), dtype=np.int64).reshape(-1, len(rows)).T


class PerLayerTables:
    """A Python list of lists and one pageable host-to-device copy for every layer."""

    def __init__(self, device: torch.device, max_blocks: int, blocks_per_layer: int) -> None:
        self.device, self.max_blocks, self.blocks_per_layer = device, max_blocks, blocks_per_layer

    def stage(self, block_ids: list[list[list[int]]]) -> list[Tensor]:
        """``block_ids[layer][row]`` → L tensors ``[B, MAX_BLOCKS]``."""
        with record_function(BUILD_RANGE):
            tables = [
                self._build(layer * self.blocks_per_layer, rows) for layer, rows in enumerate(block_ids)
            ]
        with record_function(H2D_RANGE):
            return [torch.tensor(table, dtype=torch.int32).to(self.device) for table in tables]

    def _build(self, first_id: int, rows: list[list[int]]) -> list[list[int]]:
        width = self.max_blocks
        return [[block_id - first_id for block_id in row] + [0] * (width - len(row)) for row in rows]


class PinnedTables:
    """All layers' tables in one reused, growing pinned buffer, sent in one non-blocking copy."""

    def __init__(self, device: torch.device, max_blocks: int, blocks_per_layer: int) -> None:
        self.max_blocks, self.blocks_per_layer = max_blocks, blocks_per_layer
        self._staging = StagingBuffer(device, torch.int32)

    def stage(self, block_ids: list[list[list[int]]]) -> Tensor:
        """``block_ids[layer][row]`` → one tensor ``[L, B, MAX_BLOCKS]``."""
        with record_function(BUILD_RANGE):
            tables = self._staging.host(len(block_ids), len(block_ids[0]), self.max_blocks)
            for layer, rows in enumerate(block_ids):
                ids = _padded(rows)
                np.maximum(
                    ids - layer * self.blocks_per_layer,
                    0,
                    out=tables[layer, :, : ids.shape[1]],
                    casting="unsafe",
                )
                tables[layer, :, ids.shape[1] :] = 0
        with record_function(H2D_RANGE):
            return self._staging.send()


TABLES = {"per_layer": PerLayerTables, "pinned": PinnedTables}
