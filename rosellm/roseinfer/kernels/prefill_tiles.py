"""How a prefill is cut: tiles of consecutive new tokens of one sequence, for one program each.

N new tokens of several sequences are packed back to back. A sequence has ``start`` cached tokens and
``count`` new ones: a chunk of its prompt, or all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SECTION_TOKENS = 4096  # 16 MiB of keys and values of 8 heads of 128


@dataclass(frozen=True, slots=True)
class Tiles:
    """The programs of one prefill: ``columns`` is :func:`tile_columns` on the device, ``size`` its tile size.

    The rows of ``columns`` may be strided; an empty tile does nothing.
    """

    columns: Tensor
    size: int


def tile_columns(starts, counts, rows, tile_size: int) -> np.ndarray:
    """Cut sequences into tiles of at most ``tile_size`` new tokens → ``[6, n_tiles]`` int32, on the host.

    starts and counts: cached and new tokens, one integer per sequence, in packed order; rows: their rows of
    the block table, None for 0, 1, 2 … A tile's six numbers: its first packed row, its number of rows, the
    position of its first token in the sequence, the sequence's first packed row, its start, its table row.
    Longer sequences come first, in sections of few enough tokens for their keys and values to stay in the L2
    cache; of a section, tiles that attend to more tokens, so that no long tile is left running at the end.
    """
    starts, counts = np.asarray(starts, np.int64), np.asarray(counts, np.int64)
    rows = np.arange(len(counts)) if rows is None else np.asarray(rows, np.int64)
    n_tiles = -(-counts // tile_size)  # [B]
    sequence = np.repeat(np.arange(len(counts)), n_tiles)  # [n_tiles]
    first_tile, first_row = np.cumsum(n_tiles) - n_tiles, np.cumsum(counts) - counts  # [B]
    before = (np.arange(len(sequence)) - first_tile[sequence]) * tile_size  # new tokens of earlier tiles
    size = np.minimum(tile_size, counts[sequence] - before)
    position = starts[sequence] + before
    columns = np.stack(
        (first_row[sequence] + before, size, position, first_row[sequence], starts[sequence], rows[sequence])
    )
    order = np.lexsort((-(position + size), _sections(starts + counts)[sequence]))
    return columns[:, order].astype(np.int32, order="C")


def _sections(lengths: np.ndarray) -> np.ndarray:
    """Sequences in sections of about SECTION_TOKENS tokens, the longest first: the section of each."""
    order = np.argsort(-lengths, kind="stable")
    sections = np.empty_like(lengths)
    sections[order] = (np.cumsum(lengths[order]) - lengths[order]) // SECTION_TOKENS
    return sections


def make_tiles(starts, counts, rows, tile_size: int, device: torch.device | str) -> Tiles:
    """The tiles of :func:`tile_columns`, sent to ``device`` in one copy."""
    return Tiles(torch.from_numpy(tile_columns(starts, counts, rows, tile_size)).to(device), tile_size)
