"""Partial results of rows that are split into pieces, and the kernel that combines them.

(Dao, Haziza, Massa & Sizov 2023, Flash-Decoding.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rosellm.roseinfer.kernels.attention_plan import Plan
from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.triton_or_none import tl, triton

ROLES = {"_combine_pieces_kernel": "attention"}
COMBINED_AT_ONCE = 64  # partial results at once, at most
ONE_WARP_COMBINES = 1024  # elements at once, at most


class PartialRows(NamedTuple):
    """Partial results, fp32: maximum and sum ``[PIECES + B, H]``, accumulator ``[PIECES + B, H, D]``.

    The result of a piece and a row is at the sum of their indices: no two share an index, and a row's results
    are adjacent.
    """

    m_i: Tensor
    l_i: Tensor
    acc: Tensor


def new_partial(q: Tensor, parts: int) -> PartialRows:
    """Allocate ``parts`` partial results of q's heads ``[B, H, D]``."""
    sizes = (parts, q.shape[1]), (parts, q.shape[1]), (parts, *q.shape[1:])
    return PartialRows(*(q.new_empty(size, dtype=torch.float32) for size in sizes))


@triton.jit
def store_heads(out_ptr, row, kv_head, x, shape: tl.constexpr, M: tl.constexpr):
    """Store a group's outputs ``[M, D]`` into ``[…, H, D]``."""
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
def _cut_row(starts_ptr, covers_ptr, BY_CUT: tl.constexpr):
    """Return a program's row and its first and last piece, which are equal if there is nothing to combine."""
    if BY_CUT:
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
    PARTS: tl.constexpr, BY_CUT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per query head and row, or per cut between pieces if there are fewer cuts than rows.

    Stores the weighted mean of a split row's partial results; the program of the row's first cut does this.
    """
    head = tl.program_id(1)
    d = tl.arange(0, D)
    row, first, last = _cut_row(starts_ptr, covers_ptr, BY_CUT)
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
    """Write the results of split rows to out ``[B, H, D]``; other rows are unchanged."""
    batch, n_heads, head_dim = out.shape
    padded = triton.next_power_of_2(head_dim)
    parts = min(COMBINED_AT_ONCE, triton.next_power_of_2(plan.variant.pieces // batch + 2))
    warps, by_cut = 1 if parts * padded <= ONE_WARP_COMBINES else 4, plan.variant.pieces <= batch
    _combine_pieces_kernel[(plan.variant.pieces - 1 if by_cut else batch, n_heads)](
        out, partial, plan.starts, plan.covers, n_heads, head_dim, padded, parts, by_cut,
        num_warps=warps, **launch_options(dependent),
    )  # fmt: skip
