"""The split of a prefill into tiles of consecutive new tokens of one sequence, one program each.

N new tokens of several sequences are packed back to back. A sequence has ``start`` cached tokens and
``count`` new ones: a chunk of its prompt, or all of it. A few tiles after a long prefix would leave most of a
GPU idle, so the keys of such a tile may be split, too, into pieces: separate programs compute one piece each,
and their partial results are combined (:mod:`prefill_pieces`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from rosellm.roseinfer.kernels.wide_prefixes import Prefixes

SECTION_TOKENS = 4096  # 16 MiB of 16-bit keys and values for 8 heads of size 128
COLUMNS = 8  # integers that describe one program
LONG_PREFIX = 1024  # cached tokens; below it, combining pieces costs more than it saves
PIECE_KEYS = 16  # keys to which a head attends while one piece is combined, on an H200


@dataclass(frozen=True, slots=True)
class Tiles:
    """The programs of one prefill.

    columns: the result of :func:`tile_columns`, on the device; its rows may be strided. Empty tiles, which
        do nothing, come last.
    size: maximum number of queries per tile.
    in_pieces: whether a program may compute only one piece of its tile; False if every tile is a single
        piece.
    are_drafts: whether every sequence is a single tile, of its last token and drafts.
    prefixes: the cached prefixes, which are all copied in the model's dtype first if the cache is quantised;
        without blocks if there are none. None reads the codes in each program.
    """

    columns: Tensor
    size: int
    in_pieces: bool = False
    are_drafts: bool = False
    prefixes: Prefixes | None = None


def pieces_for(
    starts: Sequence[int],
    counts: Sequence[int],
    tile_size: int,
    room: int,
    heads: int,
    window: int | None = None,
) -> list[int] | None:
    """Return how many pieces each sequence's tiles are split into, or None if none is split.

    starts, counts: cached and new tokens per sequence.
    tile_size: queries per tile.
    room: programs per query head that can run at once; what one program per tile leaves free is shared out in
        proportion to prefix length.
    heads: number of query heads.
    window: number of tokens that each query attends to; None for all.

    Prefixes below ``LONG_PREFIX`` are not split. With n keys in p pieces, the cost, in the time of one key,
    is n / p, plus ``PIECE_KEYS * p * tiles * heads`` to combine the pieces, since all programs share the
    memory bandwidth. The optimum is p = sqrt(n / (PIECE_KEYS * tiles * heads)).
    """
    if max(starts, default=0) < LONG_PREFIX:
        return None
    seen = [min(start, window or start) for start in starts]
    keys = [n if n >= LONG_PREFIX else 0 for n in seen]
    n_tiles = [-(-count // tile_size) for count in counts]
    spare, work = room - sum(n_tiles), sum(n * k for n, k in zip(n_tiles, keys, strict=True))
    if spare <= 0 or not work:
        return None
    apiece = PIECE_KEYS * sum(n_tiles) * heads
    pieces = [min(1 + k * spare // work, max(round(math.sqrt(k / apiece)), 1)) for k in keys]
    return pieces if max(pieces) > 1 else None


def tile_columns(starts, counts, rows, tile_size: int, pieces=None) -> np.ndarray:
    """Split sequences into tiles of at most ``tile_size`` new tokens → ``[COLUMNS, n]`` int32, on the host.

    starts, counts: cached and new tokens per sequence, in packed order.
    rows: the sequences' rows of the block table; None for 0, 1, 2 …
    tile_size: maximum number of new tokens per tile.
    pieces: number of pieces of each sequence's tiles; None for 1.

    A column describes one piece of a tile, in eight integers:

    0: the tile's first packed row.
    1: its number of rows.
    2: the position of its first token in the sequence.
    3: the sequence's first packed row.
    4: the sequence's start.
    5: the sequence's row of the block table.
    6: the index of the piece.
    7: the tile's number of pieces, whose columns are adjacent.

    Longer sequences come first, in sections small enough for their keys and values to stay in the L2 cache;
    within a section, tiles that attend to more tokens come first, so that no long tile is the last to start.
    """
    if len(counts) == 1 and pieces is None:
        return _columns_of_one(starts[0], counts[0], 0 if rows is None else rows[0], tile_size)
    starts, counts = np.asarray(starts, np.int64), np.asarray(counts, np.int64)
    rows = np.arange(len(counts)) if rows is None else np.asarray(rows, np.int64)
    n_tiles = -(-counts // tile_size)  # [B]
    sequence = np.arange(len(counts)).repeat(n_tiles)  # [n_tiles], as all below
    before = (np.arange(len(sequence)) - _firsts(n_tiles)[sequence]) * tile_size  # tokens of earlier tiles
    after = np.minimum(before + tile_size, counts[sequence])
    order = np.lexsort((-(starts[sequence] + after), _sections(starts + counts)[sequence]))
    times = np.ones(len(order), np.int64) if pieces is None else np.asarray(pieces, np.int64)[sequence[order]]
    order = order.repeat(times)
    sequence, before, after = sequence[order], before[order], after[order]
    start, first_row = starts[sequence], _firsts(counts)[sequence]
    columns = np.empty((COLUMNS, len(order)), np.int32)
    columns[:3] = first_row + before, after - before, start + before
    columns[3:6] = first_row, start, rows[sequence]
    columns[6:] = np.arange(len(order)) - _firsts(times).repeat(times), times.repeat(times)
    return columns


@lru_cache(1024)
def _columns_of_one(start: int, count: int, row: int, tile_size: int) -> np.ndarray:
    """Return :func:`tile_columns` of one sequence, in less time.

    A lone prompt's launch waits for this, while the GPU is idle.
    """
    before = np.arange(0, count, tile_size, dtype=np.int32)[::-1]
    columns = np.empty((COLUMNS, len(before)), np.int32)
    columns[0] = before
    np.minimum(count - before, tile_size, out=columns[1])
    np.add(before, start, out=columns[2])
    columns[3:] = np.array(((0,), (start,), (row,), (0,), (1,)), np.int32)
    columns.flags.writeable = False
    return columns


def _firsts(sizes: np.ndarray) -> np.ndarray:
    """Return the index at which each of several consecutive spans of the given sizes starts."""
    return sizes.cumsum() - sizes


def _sections(lengths: np.ndarray) -> np.ndarray:
    """Return the index of each sequence's section.

    Sections of about ``SECTION_TOKENS`` tokens are filled in order, longest sequences first.
    """
    order = (-lengths).argsort(kind="stable")
    sections = np.empty_like(lengths)
    sections[order] = _firsts(lengths[order]) // SECTION_TOKENS
    return sections


def make_tiles(starts, counts, rows, tile_size: int, device: torch.device | str, pieces=None) -> Tiles:
    """Build the tiles of :func:`tile_columns`, and send them to ``device`` in one copy."""
    columns = torch.tensor(tile_columns(starts, counts, rows, tile_size, pieces), device=device)
    return Tiles(columns, tile_size, pieces is not None)
