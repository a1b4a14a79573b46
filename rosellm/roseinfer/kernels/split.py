"""Attention that appends, with each context split into ranges for separate programs (flash-decoding).

For few sequences with long contexts: one program per (sequence, head) leaves most of a GPU idle. Each range
gives a partial result; a second kernel combines them (Dao, Haziza, Massa & Sizov 2023). The length of a range
follows from the context length, which is read on the device, so one captured launch serves all lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rosellm.roseinfer.kernels.attention import attend_range
from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.roseinfer.kernels.paged_cache import (
    append_token,
    layer_arguments,
    load_new,
    load_query,
    load_tile,
    rows_of,
)
from rosellm.triton_or_none import tl, triton

ROLES = {"_split_attend_kernel": "attention", "_combine_kernel": "attention"}
SPLIT_ROWS = 8
SPLIT_CONTEXT = 512
SPLIT_TILE = 128
WARPS = 4


def is_worth_splitting(rows: int, longest: int) -> bool:
    """Whether splitting pays, ``longest`` being the longest context in tokens: as measured on an H200."""
    return rows <= SPLIT_ROWS and longest >= SPLIT_CONTEXT


def num_splits_for(rows: int) -> int:
    """Ranges per context, a power of two: the fastest measured on an H200."""
    return 8 if rows <= 2 else 4


@triton.jit
def range_of(split, context_len, NUM_SPLITS: tl.constexpr, TILE: tl.constexpr):
    """First and last token (exclusive) of a range: equal numbers of tiles, fewer or none in the last."""
    size = tl.cdiv(tl.cdiv(context_len, NUM_SPLITS), TILE) * TILE
    first = split * size
    return first, tl.minimum(first + size, context_len)


@triton.jit
def _split_attend_kernel(
    partial, new, cache, rows, scale,
    shape: tl.constexpr, TILE: tl.constexpr, NUM_SPLITS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per (sequence, query head, range); an empty range's partial result is neutral.

    The first range starts with the new token; there, the first head of each group writes its key and value.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    kv_head = head // shape.GROUP
    d = tl.arange(0, shape.D_PADDED)
    context_len = tl.load(rows.positions + row * rows.position_stride)
    table_ptr = rows.table + row * rows.table_stride
    first, stop = range_of(split, tl.maximum(context_len, 0), NUM_SPLITS, TILE)
    k, v = load_tile(cache, table_ptr, first, stop, kv_head, shape, TILE)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    q = load_query(new, row, head, scale, shape)
    m_i = float("-inf")
    l_i = 0.0
    acc = tl.zeros_like(q)
    if split == 0:
        k_new, v_new = load_new(new, row, kv_head, shape)
        m_i = tl.sum(q * k_new.to(tl.float32), axis=0)
        l_i = 1.0
        acc = v_new.to(tl.float32)
        if (context_len >= 0) & (head % shape.GROUP == 0):
            append_token(cache, table_ptr, context_len, kv_head, k_new, v_new, shape)
    m_i, l_i, acc = attend_range(q, k, v, m_i, l_i, acc, first, stop, cache, table_ptr, kv_head, shape, TILE)
    part = (row * shape.H + head) * NUM_SPLITS + split
    tl.store(partial.m_i + part, m_i)
    tl.store(partial.l_i + part, l_i)
    tl.store(partial.acc + part * shape.D + d, acc, mask=d < shape.D)


@triton.jit
def _combine_kernel(
    out_ptr, partial, rows, shape: tl.constexpr, NUM_SPLITS: tl.constexpr, DEPENDENT: tl.constexpr
):
    """One program per (sequence, query head): the weighted mean of its ranges' partial results."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, shape.D_PADDED)
    in_head = d < shape.D
    part = (row * shape.H + head) * NUM_SPLITS + tl.arange(0, NUM_SPLITS)
    context_len = tl.load(rows.positions + row * rows.position_stride)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    m_i = tl.load(partial.m_i + part)
    l_i = tl.load(partial.l_i + part)
    place = partial.acc + part[:, None] * shape.D + d[None, :]
    acc = tl.load(place, mask=in_head[None, :], other=0.0)
    weights = tl.exp2(m_i - tl.max(m_i, axis=0))
    out = tl.sum(acc * weights[:, None], axis=0) / tl.sum(l_i * weights, axis=0)
    out = tl.where(context_len >= 0, out, 0.0)
    place = out_ptr + (row * shape.H + head) * shape.D + d
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=in_head)


class PartialSoftmax(NamedTuple):
    """Partial results of the ranges, fp32: maximum and sum ``[B, H, NUM_SPLITS]``, accumulator ``[…, D]``."""

    m_i: Tensor
    l_i: Tensor
    acc: Tensor


def make_split_append_and_attend(
    num_splits_for: Callable[[int], int] = num_splits_for, dependent: int = False
) -> Callable[..., Tensor]:
    """Two Triton kernels, called like ``attention.append_and_attend_ref``, with the same contract.

    num_splits_for: rows → ranges per context, a power of two.
    """
    launch = launch_options(dependent)

    def split_append_and_attend(
        *, q, k_new, v_new, k_cache_layer, v_cache_layer, block_table, positions, scale, tile
    ) -> Tensor:
        batch, n_heads, head_dim = q.shape
        num_splits = num_splits_for(batch)
        parts = batch, n_heads, num_splits
        out = q.new_empty(q.shape)
        sizes = parts, parts, (*parts, head_dim)
        partial = PartialSoftmax(*(q.new_empty(size, dtype=torch.float32) for size in sizes))
        new, cache, shape = layer_arguments(q, k_new, v_new, k_cache_layer, v_cache_layer)
        rows, options = rows_of(block_table, positions), {"NUM_SPLITS": num_splits, "DEPENDENT": dependent}
        options |= launch
        _split_attend_kernel[parts](
            partial, new, cache, rows, scale, shape, TILE=tile, num_warps=WARPS, **options
        )
        _combine_kernel[(batch, n_heads)](out, partial, rows, shape, num_warps=1, **options)
        return out

    return split_append_and_attend
