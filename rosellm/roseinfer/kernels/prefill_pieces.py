"""Partial results of prefill tiles whose keys are split into pieces, and the kernel that combines them.

(Dao, Haziza, Massa & Sizov 2023, Flash-Decoding; "split-KV" of FlashAttention-2.)
"""

from __future__ import annotations

from torch import Tensor

from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.roseinfer.kernels.online_softmax import PartialRows
from rosellm.roseinfer.kernels.prefill_tiles import Tiles
from rosellm.triton_or_none import cdiv, next_power_of_2, tl, triton

ROLES = {"_combine_tiles_kernel": "attention"}
ROWS, PARTS = 4, 4  # queries per program, and partial results of each that are loaded at once


@triton.jit
def store_piece(partial, row, stored, m_i, l_i, acc, shape: tl.constexpr):
    """Store a piece's partial results at the indices ``row [ROWS]``, where ``stored`` is true.

    m_i, l_i: ``[ROWS]``, maxima and sums of weights. acc: ``[ROWS, D]``, weighted sums of values.
    """
    d = tl.arange(0, shape.D_PADDED)[None, :]
    tl.store(partial.m_i + row, m_i, mask=stored)
    tl.store(partial.l_i + row, l_i, mask=stored)
    tl.store(partial.acc + row[:, None] * shape.D + d, acc, mask=stored[:, None] & (d < shape.D))


@triton.jit(do_not_specialize=["tiles_stride"], do_not_specialize_on_alignment=["tiles_ptr"])
def _combine_tiles_kernel(
    out_ptr, partial, tiles_ptr, tiles_stride, H: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of one query head and ROWS queries of a tile per program.

    Of a tile's programs, only those of its first piece do the work. A piece with no key in a query's window
    has a maximum of -inf.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(tiles_ptr + tile).to(tl.int64)
    n_rows = tl.load(tiles_ptr + tiles_stride + tile)
    this = tl.load(tiles_ptr + 6 * tiles_stride + tile)
    pieces = tl.load(tiles_ptr + 7 * tiles_stride + tile)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    if pieces < 2 or this > 0:
        return
    i = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D)
    m_i = tl.full((ROWS,), float("-inf"), tl.float32)
    l_i = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    for begin in range(0, pieces, PARTS):
        piece = begin + tl.arange(0, PARTS)
        exists = (piece < pieces)[:, None] & (i < n_rows)[None, :]
        row = ((tile + piece).to(tl.int64)[:, None] * BLOCK_M + i[None, :]) * H + head  # [PARTS, ROWS]
        m = tl.load(partial.m_i + row, mask=exists, other=float("-inf"))
        sums = tl.load(partial.l_i + row, mask=exists, other=0.0)
        place = partial.acc + row[:, :, None] * HEAD_DIM + d[None, None, :]
        values = tl.load(place, mask=exists[:, :, None] & (d < HEAD_DIM)[None, None, :], other=0.0)
        m_new = tl.maximum(m_i, tl.max(m, axis=0))
        finite = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - finite)
        weights = tl.exp2(m - finite[None, :])
        acc = acc * alpha[:, None] + tl.sum(values * weights[:, :, None], axis=0)
        l_i = l_i * alpha + tl.sum(sums * weights, axis=0)
        m_i = m_new
    mine = (i < n_rows)[:, None] & (d < HEAD_DIM)[None, :]
    l_i = tl.where(i < n_rows, l_i, 1.0)
    place = out_ptr + ((first + i) * H + head)[:, None] * HEAD_DIM + d[None, :]
    tl.store(place, (acc / l_i[:, None]).to(out_ptr.dtype.element_ty), mask=mine)


def combine_tiles(out: Tensor, partial: PartialRows, tiles: Tiles, dependent: int = False) -> None:
    """Combine the partial results of split tiles into out ``[N, H, D]``; rows of other tiles are unchanged.

    The partial result of row i of a tile, for the piece in column p, is at index ``p * size + i``. dependent:
    the launch mode, as in ``launch_options``.
    """
    (_, n_heads, head_dim), n_pieces = out.shape, tiles.columns.shape[1]
    _combine_tiles_kernel[(n_pieces, n_heads, cdiv(tiles.size, ROWS))](
        out, partial, tiles.columns, tiles.columns.stride(0), n_heads, head_dim,
        next_power_of_2(head_dim), tiles.size, ROWS, PARTS,
        **launch_options(dependent),
    )  # fmt: skip
