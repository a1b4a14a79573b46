"""Attention that appends, each context cut into ranges that programs of their own attend to.

For few sequences with long contexts: one program a (sequence, head) leaves most of a GPU idle. Each range
gives a partial result; a second kernel combines them (flash-decoding: Dao, Haziza, Massa & Sizov 2023). The
length of a range follows from the context, which the device reads, so one captured launch serves all lengths.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosellm.roseinfer.kernels.attention import _attend_tile, _tile
from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor

ROLES = {"_split_attend_kernel": "attention", "_combine_kernel": "attention"}
SPLIT_ROWS = 8
SPLIT_CONTEXT = 512
SPLIT_TILE = 128
WARPS = 4


def is_worth_splitting(rows: int, longest: int) -> bool:
    """Whether ranges pay, ``longest`` being the longest context in tokens: as measured on an H200."""
    return rows <= SPLIT_ROWS and longest >= SPLIT_CONTEXT


def num_splits_for(rows: int) -> int:
    """Ranges of each context, a power of two: as measured fastest on an H200."""
    return 8 if rows <= 2 else 4


@triton.jit
def _range_of(split, context_len, NUM_SPLITS: tl.constexpr, TILE: tl.constexpr):
    """First and last token (exclusive) of a range: as many tiles each, fewer or none in the last ones."""
    size = tl.cdiv(tl.cdiv(context_len, NUM_SPLITS), TILE) * TILE
    first = split * size
    return first, tl.minimum(first + size, context_len)


@triton.jit
def _attend_range(
    q,
    k,
    v,
    m_i,
    l_i,
    acc,
    first,
    stop,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    kv_head,
    block_stride,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """The online softmax over tokens ``first`` to ``stop``; k and v are the first tile of them."""
    for start in range(first, stop, TILE):
        k_next, v_next = _tile(
            k_cache_ptr,
            v_cache_ptr,
            table_ptr,
            start + TILE,
            stop,
            kv_head,
            block_stride,
            D,
            D_PADDED,
            BLOCK_SIZE,
            TILE,
        )
        held = start + tl.arange(0, TILE) < stop
        m_i, l_i, acc = _attend_tile(q, k, v, held, m_i, l_i, acc)
        k, v = k_next, v_next
    return m_i, l_i, acc


@triton.jit
def _split_attend_kernel(
    m_ptr,
    l_ptr,
    acc_ptr,
    q_ptr,
    k_new_ptr,
    v_new_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_table_ptr,
    positions_ptr,
    scale,
    new_stride,
    block_stride,
    table_stride,
    position_stride,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a (sequence, query head, range); an empty range's partial result is neutral.

    The first range begins with the new token; there, the first head of each group writes its key and value.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    kv_head = head // (H // H_KV)
    d = tl.arange(0, D_PADDED)
    in_head = d < D
    context_len = tl.load(positions_ptr + row * position_stride)
    table_ptr = block_table_ptr + row * table_stride
    first, stop = _range_of(split, tl.maximum(context_len, 0), NUM_SPLITS, TILE)
    k, v = _tile(
        k_cache_ptr,
        v_cache_ptr,
        table_ptr,
        first,
        stop,
        kv_head,
        block_stride,
        D,
        D_PADDED,
        BLOCK_SIZE,
        TILE,
    )
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    q = tl.load(q_ptr + row * new_stride + head * D + d, mask=in_head, other=0.0).to(tl.float32)
    q = q * (scale * 1.4426950408889634)
    m_i = float("-inf")
    l_i = 0.0
    acc = tl.zeros((D_PADDED,), tl.float32)
    if split == 0:
        new = row * new_stride + kv_head * D + d
        k_new = tl.load(k_new_ptr + new, mask=in_head, other=0.0)
        v_new = tl.load(v_new_ptr + new, mask=in_head, other=0.0)
        m_i = tl.sum(q * k_new.to(tl.float32), axis=0)
        l_i = 1.0
        acc = v_new.to(tl.float32)
        if (context_len >= 0) & (head % (H // H_KV) == 0):
            block = tl.load(table_ptr + context_len // BLOCK_SIZE).to(tl.int64)
            slot = block * block_stride + kv_head * BLOCK_SIZE * D + (context_len % BLOCK_SIZE) * D + d
            tl.store(k_cache_ptr + slot, k_new, mask=in_head)
            tl.store(v_cache_ptr + slot, v_new, mask=in_head)
    m_i, l_i, acc = _attend_range(
        q,
        k,
        v,
        m_i,
        l_i,
        acc,
        first,
        stop,
        k_cache_ptr,
        v_cache_ptr,
        table_ptr,
        kv_head,
        block_stride,
        D,
        D_PADDED,
        BLOCK_SIZE,
        TILE,
    )
    part = (row * H + head) * NUM_SPLITS + split
    tl.store(m_ptr + part, m_i)
    tl.store(l_ptr + part, l_i)
    tl.store(acc_ptr + part * D + d, acc, mask=in_head)


@triton.jit
def _combine_kernel(
    out_ptr,
    m_ptr,
    l_ptr,
    acc_ptr,
    positions_ptr,
    position_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a (sequence, query head): the weighted mean of its ranges' partial results."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, D_PADDED)
    in_head = d < D
    part = (row * H + head) * NUM_SPLITS + tl.arange(0, NUM_SPLITS)
    context_len = tl.load(positions_ptr + row * position_stride)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    m_i = tl.load(m_ptr + part)
    l_i = tl.load(l_ptr + part)
    acc = tl.load(acc_ptr + part[:, None] * D + d[None, :], mask=in_head[None, :], other=0.0)
    weights = tl.exp2(m_i - tl.max(m_i, axis=0))
    out = tl.sum(acc * weights[:, None], axis=0) / tl.sum(l_i * weights, axis=0)
    out = tl.where(context_len >= 0, out, 0.0)
    tl.store(out_ptr + (row * H + head) * D + d, out.to(out_ptr.dtype.element_ty), mask=in_head)


def make_split_append_and_attend(
    num_splits_for: Callable[[int], int] = num_splits_for, dependent: bool = False
):
    """Two Triton kernels, to be called as ``attention.append_and_attend_ref``, with its contract.

    num_splits_for: rows → ranges of each context, a power of two.
    """
    launch = launch_options(dependent)

    def split_append_and_attend(
        *, q, k_new, v_new, k_cache_layer, v_cache_layer, block_table, positions, scale, tile
    ) -> Tensor:
        batch, n_heads, head_dim = q.shape
        _, n_kv_heads, block_size, _ = k_cache_layer.shape
        out = q.new_empty(q.shape)
        num_splits = num_splits_for(batch)
        parts = batch, n_heads, num_splits
        m_i, l_i = (q.new_empty(parts, dtype=torch.float32) for _ in range(2))
        acc = q.new_empty((*parts, head_dim), dtype=torch.float32)
        heads = {"H": n_heads, "D": head_dim, "D_PADDED": triton.next_power_of_2(head_dim)}
        _split_attend_kernel[parts](
            m_i,
            l_i,
            acc,
            q,
            k_new,
            v_new,
            k_cache_layer,
            v_cache_layer,
            block_table,
            positions,
            scale,
            q.stride(0),
            k_cache_layer.stride(0),
            block_table.stride(0),
            positions.stride(0),
            **heads,
            H_KV=n_kv_heads,
            BLOCK_SIZE=block_size,
            TILE=tile,
            NUM_SPLITS=num_splits,
            DEPENDENT=dependent,
            num_warps=WARPS,
            **launch,
        )
        _combine_kernel[(batch, n_heads)](
            out,
            m_i,
            l_i,
            acc,
            positions,
            positions.stride(0),
            **heads,
            NUM_SPLITS=num_splits,
            DEPENDENT=dependent,
            num_warps=1,
            **launch,
        )
        return out

    return split_append_and_attend
