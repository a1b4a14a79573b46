"""Online softmax (Milakov & Gimelshein 2018) in base 2: tile by tile in one program, then across programs.

A row's keys may be split into pieces, one per program. Each program stores a partial result, and a second
kernel combines the results of a row (Dao, Haziza, Massa & Sizov 2023, Flash-Decoding). Shapes: M query rows
of one KV head, TILE tokens, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rosellm.roseinfer.kernels.attention_plan import Plan
from rosellm.roseinfer.kernels.codes import unpacked
from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.triton_or_none import next_power_of_2, tl, triton

ROLES = {"_combine_pieces_kernel": "attention"}
COMBINED_AT_ONCE = 64  # maximum number of partial results loaded at once
ONE_WARP_COMBINES = 1024  # maximum number of elements loaded at once for which one warp is used


class Tiling(NamedTuple):
    """Compile-time constants of an attention kernel.

    TILE: tokens per tile.
    WINDOW: number of tokens that each query attends to; 0 for all.
    M: rows of q, including repeated ones.
    HEADS: query heads per KV head, rounded up to a power of two.
    STAGES: pipeline stages.
    DOT: operand dtype of GEMMs; None to sum products of vectors instead.
    NORMS: whether q and k are normalised per head.
    LANES: whether each token of a tile has its own softmax, as in ``attention_plan.Variant``.
    SCALED: whether keys and values are quantised.
    PAIRS: dtype of codes that are loaded in pairs, as int16, and unpacked in registers; None for others.
        Queries and weighted sums of values ``[M, D]`` are then split into even and odd elements.
    K_UP, V_UP: factors on queries and on values' scales, and then on the sums, that undo the small factor
        with which ``codes.unpacked`` returns keys and values.
    """

    TILE: int
    WINDOW: int
    M: int
    HEADS: int
    STAGES: int
    DOT: object
    NORMS: bool
    LANES: bool
    SCALED: bool = False
    PAIRS: object = None
    K_UP: float = 1.0
    V_UP: float = 1.0


@triton.jit
def no_keys(shape: tl.constexpr, tiling: tl.constexpr):
    """Return the initial state of the online softmax: maxima, sums of weights, weighted sums of values.

    with DOT: ``[M]``, ``[M, TILE]`` and ``[M, D]``, so that sums across threads are taken once, at the end.
    with LANES: ``[TILE]``, ``[TILE]`` and ``[TILE, D]``, since each token of a tile has its own softmax.
    otherwise: ``[1]``, ``[1]`` and ``[1, D]``.

    The initial maximum is a large negative number, since -inf - -inf would be NaN.
    """
    TILE: tl.constexpr = tiling.TILE
    ROWS: tl.constexpr = tiling.TILE if tiling.LANES else tiling.M
    D: tl.constexpr = shape.D_PADDED
    l_i = tl.zeros((ROWS,) if tiling.DOT is None else (ROWS, TILE), tl.float32)
    if tiling.PAIRS is None:
        acc = tl.zeros((ROWS, D), tl.float32)
    else:
        acc = tl.zeros((ROWS, D // 2), tl.float32), tl.zeros((ROWS, D // 2), tl.float32)
    return tl.full((ROWS,), -1.0e30, tl.float32), l_i, acc


@triton.jit
def operands(q, tiling: tl.constexpr):
    """Return queries ``[M, D]`` as operands of GEMMs: with PAIRS, their even and odd elements, times K_UP."""
    if tiling.PAIRS is None:
        q = q.to(tl.float32 if tiling.DOT is None else tiling.DOT)
    else:
        q = (q.to(tl.float32) * tiling.K_UP).to(tiling.DOT)
        q = tl.split(tl.reshape(q, (q.shape[0], q.shape[1] // 2, 2)))
    return q


@triton.jit
def key_products(q, k, tiling: tl.constexpr):
    """Return the products ``[M, TILE]`` of queries and a tile's keys, divided by K_UP."""
    if tiling.PAIRS is None:
        products = tl.dot(q, tl.trans(k.to(tiling.DOT)), input_precision="ieee")
    else:
        even, odd = unpacked(k, tiling.PAIRS, tiling.DOT)
        products = tl.dot(q[1], tl.trans(odd), tl.dot(q[0], tl.trans(even)))
    return products


@triton.jit
def add_values(acc, alpha, p, loaded, tiling: tl.constexpr):
    """Return weighted sums of values times ``alpha``, plus those of a tile with weights p ``[M, TILE]``.

    The sums are divided by V_UP. With PAIRS, weights become bf16: in fp16, times the values' scales, they
    could overflow or vanish.
    """
    v = loaded[1]
    if tiling.SCALED:
        p *= (loaded[3] * tiling.V_UP)[None, :]
    if tiling.PAIRS is None:
        acc = tl.dot(p.to(tiling.DOT), v.to(tiling.DOT), acc * alpha[:, None], input_precision="ieee")
    else:
        even, odd = unpacked(v, tiling.PAIRS, tl.bfloat16)
        p = p.to(tl.bfloat16)
        acc = tl.dot(p, even, acc[0] * alpha[:, None]), tl.dot(p, odd, acc[1] * alpha[:, None])
    return acc


@triton.jit
def attend_tile(q, loaded, seen, scale, m_i, l_i, acc, tiling: tl.constexpr):
    """Add one tile to the online softmax (Milakov & Gimelshein 2018), in base 2, and return its new state.

    q: queries, as returned by :func:`operands`.
    loaded: keys and values ``[TILE, D]``, and the scales of quantised ones ``[TILE]``.
    seen: ``[TILE]``, which tokens are attended to; None for all.
    scale: factor on the scores, times log2(e).
    m_i, l_i, acc: the state so far, in the form of :func:`no_keys`.
    """
    DOT: tl.constexpr = tiling.DOT
    k, v = loaded[0], loaded[1]
    if DOT is None:
        scores = tl.sum(k.to(tl.float32) * q, axis=1) * scale  # [TILE]
        if tiling.SCALED:
            scores *= loaded[2]
        if seen is not None:
            scores = tl.where(seen, scores, float("-inf"))
        m_new = tl.maximum(m_i, scores if tiling.LANES else tl.max(scores, axis=0))
        p = tl.exp2(scores - m_new)
        weighted = v.to(tl.float32) * (p * loaded[3] if tiling.SCALED else p)[:, None]
        alpha = tl.exp2(m_i - m_new)
        acc = acc * alpha[:, None] + (weighted if tiling.LANES else tl.sum(weighted, axis=0)[None, :])
        l_i = l_i * alpha + (p if tiling.LANES else tl.sum(p, axis=0))
    else:
        scores = key_products(q, k, tiling)  # [M, TILE]
        scores *= (loaded[2] * (scale * tiling.K_UP))[None, :] if tiling.SCALED else scale
        if seen is not None:
            scores = tl.where(seen[None, :], scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, axis=1))
        p = tl.exp2(scores - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        acc = add_values(acc, alpha, p, loaded, tiling)
        l_i = l_i * alpha[:, None] + p
    return m_new, l_i, acc


@triton.jit
def gathered(m_i, l_i, acc, tiling: tl.constexpr):
    """Reduce the softmax state to maxima ``[M]``, sums of weights ``[M]`` and weighted sums ``[M, D]``.

    Only tilings with DOT or LANES need it, because their states (:func:`no_keys`) are larger.
    """
    if tiling.DOT is not None:
        l_i = tl.sum(l_i, axis=1)
        if tiling.PAIRS is not None:
            acc = tl.reshape(tl.join(acc[0], acc[1]), (acc[0].shape[0], 2 * acc[0].shape[1])) * tiling.V_UP
    else:
        highest = tl.max(m_i, axis=0)
        weights = tl.exp2(m_i - highest)
        m_i = tl.full((1,), 0.0, tl.float32) + highest
        l_i = tl.full((1,), 0.0, tl.float32) + tl.sum(l_i * weights, axis=0)
        acc = tl.sum(acc * weights[:, None], axis=0)[None, :]
    return m_i, l_i, acc


@triton.jit
def with_new(score, v_new, m_i, l_i, acc):
    """Add the new token to a softmax state, and return the new state.

    score ``[M]``: the queries' scores with the new key, -inf to add nothing. v_new: ``[1, D]``.
    """
    m_new = tl.maximum(m_i, score)
    p = tl.exp2(score - m_new)
    alpha = tl.exp2(m_i - m_new)
    return m_new, l_i * alpha + p, acc * alpha[:, None] + v_new * p[:, None]


class PartialRows(NamedTuple):
    """Partial results of attention, in fp32.

    m_i: ``[P, H]``, maxima of the scores.
    l_i: ``[P, H]``, sums of weights.
    acc: ``[P, H, D]``, weighted sums of values.

    In decode, P is ``PIECES + B``: the result of piece p for row b is at index p + b, which is unique, and a
    row's results are adjacent.
    """

    m_i: Tensor
    l_i: Tensor
    acc: Tensor


def new_partial(q: Tensor, parts: int) -> PartialRows:
    """Allocate ``parts`` partial results for queries q ``[B, H, D]``."""
    sizes = (parts, q.shape[1]), (parts, q.shape[1]), (parts, *q.shape[1:])
    return PartialRows(*(q.new_empty(size, dtype=torch.float32) for size in sizes))


@triton.jit
def store_heads(out_ptr, row, kv_head, x, shape: tl.constexpr, M: tl.constexpr):
    """Store the outputs ``[M, D]`` of one KV head's queries in row ``row`` of out ``[..., H, D]``."""
    m = tl.arange(0, M)[:, None]
    d = tl.arange(0, shape.D_PADDED)[None, :]
    place = out_ptr + (row * shape.H + kv_head * shape.GROUP + m) * shape.D + d
    tl.store(place, x.to(out_ptr.dtype.element_ty), mask=(m < shape.GROUP) & (d < shape.D))


@triton.jit
def store_partial(partial, part, kv_head, m_i, l_i, acc, shape: tl.constexpr, M: tl.constexpr):
    m = tl.arange(0, M)
    place = part * shape.H + kv_head * shape.GROUP + m
    tl.store(partial.m_i + place, m_i, mask=m < shape.GROUP)
    tl.store(partial.l_i + place, l_i, mask=m < shape.GROUP)
    store_heads(partial.acc, part, kv_head, acc, shape, M)


@triton.jit
def _cut_row(starts_ptr, covers_ptr, PIECES: tl.constexpr, BY_CUT: tl.constexpr):
    """Return a program's row and its first and last piece, which are equal if there is nothing to combine.

    PIECES: pieces of every row, if there is no plan.
    BY_CUT: programs are numbered by the cuts between pieces, rather than by rows.
    """
    if covers_ptr is None:
        row = tl.program_id(0).to(tl.int64)
        first = row * PIECES
        last = first + PIECES - 1
    elif BY_CUT:
        cut = tl.program_id(0)
        row = tl.load(starts_ptr + 2 * cut + 2).to(tl.int64)
        inside = tl.load(starts_ptr + 2 * cut + 3) > 0
        first = tl.load(covers_ptr + 2 * row, mask=inside, other=-1)
        last = tl.load(covers_ptr + 2 * row + 1, mask=inside, other=-1)
        last = tl.where(first == cut, last, first)
    else:
        row = tl.program_id(0).to(tl.int64)
        first = tl.load(covers_ptr + 2 * row)
        last = tl.load(covers_ptr + 2 * row + 1)
    return row, first, last


@triton.jit
def _combine_pieces_kernel(
    out_ptr, partial, starts_ptr, covers_ptr, H: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr,
    PARTS: tl.constexpr, PIECES: tl.constexpr, BY_CUT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Store the weighted mean of a row's partial results, for one query head per program.

    There is one program per query head and row, or, with BY_CUT, one per query head and cut between pieces;
    of the programs of a row's cuts, only the first does the work. Rows that are not split are left unchanged.
    """
    head = tl.program_id(1)
    d = tl.arange(0, D)
    row, first, last = _cut_row(starts_ptr, covers_ptr, PIECES, BY_CUT)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    if first < last:
        m_i = tl.full((), float("-inf"), tl.float32)
        l_i = tl.full((), 0.0, tl.float32)
        acc = tl.zeros((D,), tl.float32)
        for start in range(first, last + 1, PARTS):
            piece = start + tl.arange(0, PARTS)
            exists = piece <= last
            part = (row + piece) * H + head
            m = tl.load(partial.m_i + part, mask=exists, other=float("-inf"))
            sums = tl.load(partial.l_i + part, mask=exists, other=0.0)
            place = partial.acc + part[:, None] * HEAD_DIM + d[None, :]
            mask = exists[:, None] & (d < HEAD_DIM)[None, :]
            values = tl.load(place, mask=mask, other=0.0)
            m_new = tl.maximum(m_i, tl.max(m, axis=0))
            alpha = tl.exp2(m_i - m_new)
            weights = tl.exp2(m - m_new)
            acc = acc * alpha + tl.sum(values * weights[:, None], axis=0)
            l_i = l_i * alpha + tl.sum(sums * weights, axis=0)
            m_i = m_new
        place = out_ptr + (row * H + head) * HEAD_DIM + d
        tl.store(place, (acc / l_i).to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)


def combine(out: Tensor, partial: PartialRows, plan: Plan, *, dependent: int = False) -> None:
    """Combine the partial results of split rows into out ``[B, H, D]``; whole rows are left unchanged.

    Without ``plan.covers``, every row has the same number of pieces, at least two.

    dependent: the launch mode, as in ``launch_options``.
    """
    batch, n_heads, head_dim = out.shape
    padded = next_power_of_2(head_dim)
    parts = min(COMBINED_AT_ONCE, next_power_of_2(plan.variant.pieces // batch + 2))
    warps, each = 1 if parts * padded <= ONE_WARP_COMBINES else 4, plan.variant.pieces // batch
    by_cut = plan.covers is not None and plan.variant.pieces <= batch
    each = each if plan.covers is None else 0
    _combine_pieces_kernel[(plan.variant.pieces - 1 if by_cut else batch, n_heads)](
        out, partial, plan.starts, plan.covers, n_heads, head_dim, padded, parts, each, by_cut,
        num_warps=warps, **launch_options(dependent),
    )  # fmt: skip
