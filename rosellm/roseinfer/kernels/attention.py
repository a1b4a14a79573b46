"""Attention of one new token a sequence that also writes the token's key and value into the paged cache.

Shapes as in ``rosetrainer.paged_attention``. A row whose position is negative is inert: its output is zero
and nothing of it is written.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.rosetrainer.paged_attention import paged_attention_decode_ref

ROLES = {"_append_and_attend_kernel": "attention"}


def append_and_attend_ref(
    *,
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache_layer: Tensor,
    v_cache_layer: Tensor,
    block_table: Tensor,
    positions: Tensor,
    scale: float,
    tile: int,
) -> Tensor:
    """The specification: the appends of all rows that are not inert, and ``paged_attention_decode_ref``.

    positions ``[B]`` int32: tokens of the row cached before, which is where the new one goes; negative for an
    inert row. block_table ``[B, MAX_BLOCKS]`` int32 names a block for the new token, too. tile: how many
    tokens a kernel reads at a time, a power of two; it changes no result.
    """
    block_size = k_cache_layer.shape[2]
    live = positions >= 0
    held = positions.clamp_min(0)
    block = block_table.gather(1, (held // block_size)[:, None].long())[:, 0]
    k_cache_layer[block[live].long(), :, (held % block_size)[live].long()] = k_new[live]
    v_cache_layer[block[live].long(), :, (held % block_size)[live].long()] = v_new[live]
    out = paged_attention_decode_ref(
        q=q,
        k_new=k_new,
        v_new=v_new,
        k_cache_layer=k_cache_layer,
        v_cache_layer=v_cache_layer,
        block_table=block_table,
        context_lens=held,
        scale=scale,
    )
    return torch.where(live[:, None, None], out, 0)


@triton.jit
def _tile(
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    start,
    context_len,
    kv_head,
    block_stride,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Keys and values of TILE cached tokens from ``start`` on, ``[TILE, D]`` each; zero past the context."""
    position = start + tl.arange(0, TILE)
    d = tl.arange(0, D_PADDED)
    held = position < context_len
    if BLOCK_SIZE % TILE == 0:
        block = tl.load(table_ptr + start // BLOCK_SIZE, mask=start < context_len, other=0).to(tl.int64)
        first = block * block_stride + kv_head * BLOCK_SIZE * D + (start % BLOCK_SIZE) * D
        place = first + tl.arange(0, TILE)[:, None] * D + d[None, :]
    else:
        block = tl.load(table_ptr + position // BLOCK_SIZE, mask=held, other=0).to(tl.int64)
        first = block * block_stride + kv_head * BLOCK_SIZE * D + (position % BLOCK_SIZE) * D
        place = first[:, None] + d[None, :]
    mask = held[:, None] & (d < D)[None, :]
    return tl.load(k_cache_ptr + place, mask=mask, other=0.0), tl.load(
        v_cache_ptr + place, mask=mask, other=0.0
    )


@triton.jit
def _attend_tile(q, k, v, held, m_i, l_i, acc):
    """One tile more in the online softmax (Milakov & Gimelshein 2018), in base 2: q holds log2(e)."""
    scores = tl.where(held, tl.sum(k.to(tl.float32) * q[None, :], axis=1), float("-inf"))
    m_new = tl.maximum(m_i, tl.max(scores, axis=0))
    p = tl.exp2(scores - m_new)
    alpha = tl.exp2(m_i - m_new)
    acc = acc * alpha + tl.sum(v.to(tl.float32) * p[:, None], axis=0)
    return m_new, l_i * alpha + tl.sum(p, axis=0), acc


@triton.jit
def _append_and_attend_kernel(
    out_ptr,
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
    DEPENDENT: tl.constexpr,
):
    """One program a (sequence, query head); the first head of each group writes the new key and value.

    The next tile is asked for before the present one is worked on; the first, before the token is awaited.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    kv_head = head // (H // H_KV)
    d = tl.arange(0, D_PADDED)
    in_head = d < D
    context_len = tl.load(positions_ptr + row * position_stride)
    table_ptr = block_table_ptr + row * table_stride
    k, v = _tile(
        k_cache_ptr,
        v_cache_ptr,
        table_ptr,
        0,
        context_len,
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
    new = row * new_stride + kv_head * D + d
    k_new = tl.load(k_new_ptr + new, mask=in_head, other=0.0)
    v_new = tl.load(v_new_ptr + new, mask=in_head, other=0.0)
    if (context_len >= 0) & (head % (H // H_KV) == 0):
        block = tl.load(table_ptr + context_len // BLOCK_SIZE).to(tl.int64)
        slot = block * block_stride + kv_head * BLOCK_SIZE * D + (context_len % BLOCK_SIZE) * D + d
        tl.store(k_cache_ptr + slot, k_new, mask=in_head)
        tl.store(v_cache_ptr + slot, v_new, mask=in_head)
    m_i = tl.sum(q * k_new.to(tl.float32), axis=0)
    l_i = 1.0
    acc = v_new.to(tl.float32)
    slots = tl.arange(0, TILE)
    for start in range(0, context_len, TILE):
        k_next, v_next = _tile(
            k_cache_ptr,
            v_cache_ptr,
            table_ptr,
            start + TILE,
            context_len,
            kv_head,
            block_stride,
            D,
            D_PADDED,
            BLOCK_SIZE,
            TILE,
        )
        held = start + slots < context_len
        m_i, l_i, acc = _attend_tile(q, k, v, held, m_i, l_i, acc)
        k, v = k_next, v_next
    out = tl.where(context_len >= 0, acc / l_i, 0.0)
    tl.store(out_ptr + (row * H + head) * D + d, out.to(out_ptr.dtype.element_ty), mask=in_head)


def _warps(batch: int, tile: int) -> int:
    return 1 if batch > 16 else max(1, min(8, max(4, tile // 32)))


def make_append_and_attend(dependent: bool = False, warps: Callable[[int, int], int] = _warps):
    """The Triton kernel, to be called as :func:`append_and_attend_ref`. warps: of a batch and a tile.

    Caches are contiguous, and so is a row of the table; rows of table and positions may be strided. q, k_new
    and v_new are slices of one fused projection: their rows have one stride, ``[H, D]`` is contiguous.
    """
    launch = launch_options(dependent)

    def append_and_attend(
        *, q, k_new, v_new, k_cache_layer, v_cache_layer, block_table, positions, scale, tile
    ) -> Tensor:
        batch, n_heads, head_dim = q.shape
        _, n_kv_heads, block_size, _ = k_cache_layer.shape
        out = q.new_empty(q.shape)
        _append_and_attend_kernel[(batch, n_heads)](
            out,
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
            H=n_heads,
            H_KV=n_kv_heads,
            D=head_dim,
            D_PADDED=triton.next_power_of_2(head_dim),
            BLOCK_SIZE=block_size,
            TILE=tile,
            DEPENDENT=dependent,
            num_warps=warps(batch, tile),
            **launch,
        )
        return out

    return append_and_attend


def tile_for(batch: int, longest: int) -> int:
    """Cached tokens that a program reads at a time: as measured fastest on an H200.

    A small batch has few programs, so each reads all it needs at once, if that is up to 256 tokens (512 for a
    single sequence); a large one has many, and small tiles keep them balanced.
    """
    if batch > 128:
        return 16
    if batch > 16:
        return 32
    return min(max(64, triton.next_power_of_2(longest)), 512 if batch == 1 else 256)
