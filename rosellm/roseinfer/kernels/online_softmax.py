"""Online softmax in one program (Milakov & Gimelshein 2018), tile by tile, in base 2, for Triton kernels.

Shapes: M rows of queries of one group, TILE tokens, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

from rosellm.triton_or_none import tl, triton


class Tiling(NamedTuple):
    """Compile-time constants: tokens per tile, window, rows of q, distinct rows of q, pipeline stages.

    DOT: operand dtype of GEMMs, or None for sums of vector products. NORMS: whether heads are normalised.
    LANES: as in ``attention_plan.Variant``.
    """

    TILE: int
    WINDOW: int
    M: int
    HEADS: int
    STAGES: int
    DOT: object
    NORMS: bool
    LANES: bool


@triton.jit
def no_keys(shape: tl.constexpr, tiling: tl.constexpr):
    """Return the initial state of the online softmax: maxima, sums of weights, weighted sums of values.

    ``[M]``, ``[M, TILE]`` and ``[M, D]`` with DOT, so that sums across threads are taken once, at the end.
    With LANES, each token of a tile has its own softmax: ``[TILE]``, ``[TILE]`` and ``[TILE, D]``. Otherwise
    ``[1]``, ``[1]`` and ``[1, D]``. The initial maximum is a large negative finite number; -inf - -inf would
    be NaN.
    """
    TILE: tl.constexpr = tiling.TILE
    ROWS: tl.constexpr = tiling.TILE if tiling.LANES else tiling.M
    D: tl.constexpr = shape.D_PADDED
    l_i = tl.zeros((ROWS,) if tiling.DOT is None else (ROWS, TILE), tl.float32)
    return tl.full((ROWS,), -1.0e30, tl.float32), l_i, tl.zeros((ROWS, D), tl.float32)


@triton.jit
def attend_tile(q, k, v, seen, scale, m_i, l_i, acc, tiling: tl.constexpr):
    """Add one tile to the online softmax (Milakov & Gimelshein 2018), in base 2: scale includes log2(e).

    q ``[M, D]``, k and v ``[TILE, D]``, seen ``[TILE]``, or None if all are; the state as in :func:`no_keys`.
    """
    DOT: tl.constexpr = tiling.DOT
    if DOT is None:
        scores = tl.sum(k.to(tl.float32) * q, axis=1) * scale  # [TILE]
        if seen is not None:
            scores = tl.where(seen, scores, float("-inf"))
        m_new = tl.maximum(m_i, scores if tiling.LANES else tl.max(scores, axis=0))
        p = tl.exp2(scores - m_new)
        weighted = v.to(tl.float32) * p[:, None]
        alpha = tl.exp2(m_i - m_new)
        acc = acc * alpha[:, None] + (weighted if tiling.LANES else tl.sum(weighted, axis=0)[None, :])
        l_i = l_i * alpha + (p if tiling.LANES else tl.sum(p, axis=0))
    else:
        scores = tl.dot(q, tl.trans(k.to(DOT)), input_precision="ieee") * scale  # [M, TILE]
        if seen is not None:
            scores = tl.where(seen[None, :], scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, axis=1))
        p = tl.exp2(scores - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        acc = tl.dot(p.to(DOT), v.to(DOT), acc * alpha[:, None], input_precision="ieee")
        l_i = l_i * alpha[:, None] + p
    return m_new, l_i, acc


@triton.jit
def gathered(m_i, l_i, acc, tiling: tl.constexpr):
    """Reduce the softmax state with DOT or LANES to ``[M]``, ``[M]``, ``[M, D]``."""
    if tiling.DOT is not None:
        l_i = tl.sum(l_i, axis=1)
    else:
        highest = tl.max(m_i, axis=0)
        weights = tl.exp2(m_i - highest)
        m_i = tl.full((1,), 0.0, tl.float32) + highest
        l_i = tl.full((1,), 0.0, tl.float32) + tl.sum(l_i * weights, axis=0)
        acc = tl.sum(acc * weights[:, None], axis=0)[None, :]
    return m_i, l_i, acc


@triton.jit
def with_new(score, v_new, m_i, l_i, acc):
    """Add one token to the online softmax: score ``[M]``, v_new ``[1, D]``."""
    m_new = tl.maximum(m_i, score)
    p = tl.exp2(score - m_new)
    alpha = tl.exp2(m_i - m_new)
    return m_new, l_i * alpha + p, acc * alpha[:, None] + v_new * p[:, None]
