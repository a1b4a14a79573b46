"""Bundled arguments of attention kernels: one layer's cache, new tokens, rows, and all sizes.

A kernel gets the fields of :class:`NewTokens`, :class:`PagedCache` and :class:`Rows` as pointers and
integers, and those of :class:`AttentionShape` as compile-time constants.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rosellm.triton_or_none import TensorDescriptor, next_power_of_2, tl, triton

SMALLEST_DOT = 16  # minimum of each dimension in tl.dot
LOG2_E = math.log2(math.e)
TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class PagedCache(NamedTuple):
    """The paged cache of one layer.

    k, v: keys and values, ``[N_BLOCKS, H_KV, BLOCK_SIZE, D]``.
    stride: elements from one block to the next.
    """

    k: Tensor
    v: Tensor
    stride: int


class NewTokens(NamedTuple):
    """The new tokens of a step, for one layer.

    q: ``[N, H, D]``, or partial sums ``[PARTS, N, H, D]``.
    k, v: ``[N, H_KV, D]``, or ``[PARTS, N, H_KV, D]``.
    q_stride: elements from one row of q to the next.
    kv_stride: elements from one row of k, or of v, to the next.
    part_stride: elements from one partial sum of q, k or v to the next.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_stride: int
    kv_stride: int
    part_stride: int


class AttentionShape(NamedTuple):
    """The sizes of one layer's attention.

    H: number of query heads.
    H_KV: number of KV heads.
    GROUP: query heads per KV head.
    D: head size.
    D_PADDED: head size, rounded up to a power of two.
    BLOCK_SIZE: slots per block.
    PARTS: number of partial sums that q, k and v are given as.
    """

    H: int
    H_KV: int
    GROUP: int
    D: int
    D_PADDED: int
    BLOCK_SIZE: int
    PARTS: int = 1


class Rows(NamedTuple):
    """The rows of a decode step.

    table: ``[N, MAX_BLOCKS]``, the block table.
    table_stride: elements from one row of the table to the next.
    positions: ``[N]``, the number of cached tokens per row.
    position_stride: elements from one position to the next.
    """

    table: Tensor
    table_stride: int
    positions: Tensor
    position_stride: int


def layer_arguments(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, smallest: int = 1
) -> tuple[NewTokens, PagedCache, AttentionShape]:
    """Bundle a layer's tensors into the arguments of an attention kernel.

    smallest: lower bound on ``D_PADDED``, the padded head size (``tl.dot`` needs at least 16).
    """
    n_heads, head_dim = q.shape[-2:]
    _, n_kv_heads, block_size, _ = k_cache.shape
    padded = max(smallest, next_power_of_2(head_dim))
    parts, part_stride = (len(q), q.stride(0)) if q.dim() == 4 else (1, 0)
    new = NewTokens(q, k_new, v_new, q.stride(-3), k_new.stride(-3), part_stride)
    shape = AttentionShape(n_heads, n_kv_heads, n_heads // n_kv_heads, head_dim, padded, block_size, parts)
    return new, PagedCache(k_cache, v_cache, k_cache.stride(0)), shape


def dot_dtype(x: Tensor):
    """Return the operand dtype of GEMMs: x's on a GPU, and fp32 in Triton's interpreter.

    The interpreter computes wrong results for bf16 GEMMs.
    """
    return TRITON_DTYPES[x.dtype] if x.is_cuda else tl.float32


def described_rows(cache: PagedCache, rows: int):
    """Return TMA descriptors of keys and values that copy ``rows`` consecutive slots of a head at a time.

    Slot s of a block, for a head, is row ``(block * H_KV + head) * BLOCK_SIZE + s`` of the descriptors.
    """
    head_dim = cache.k.shape[3]
    return tuple(
        TensorDescriptor(x, [x.numel() // head_dim, head_dim], [head_dim, 1], [rows, head_dim])
        for x in (cache.k, cache.v)
    )


def rows_of(block_table: Tensor, positions: Tensor) -> Rows:
    return Rows(block_table, block_table.stride(0), positions, positions.stride(0))


@triton.jit
def slot_offset(cache, block, slot, kv_head, shape: tl.constexpr):
    """Return the offset of a slot's key and value for one head, in elements."""
    return block.to(tl.int64) * cache.stride + kv_head * shape.BLOCK_SIZE * shape.D + slot * shape.D


@triton.jit
def are_seen(start, first, stop, tiling: tl.constexpr):
    """Return which tokens ``[TILE]`` of the tile at ``start`` are attended to: ``first`` to ``stop`` - 1."""
    token = start + tl.arange(0, tiling.TILE)
    return (token >= first) & (token < stop) if tiling.WINDOW else token < stop


@triton.jit
def blocks_of(table_ptr, start, stop, shape: tl.constexpr, tiling: tl.constexpr):
    """Return the block of a tile, or the blocks ``[TILE]`` of its tokens if tiles may cross blocks.

    table_ptr: the sequence's row of the block table. Blocks of tokens from ``stop`` on are 0.
    """
    token = start
    if shape.BLOCK_SIZE % tiling.TILE != 0:
        token = start + tl.arange(0, tiling.TILE)
    return tl.load(table_ptr + token // shape.BLOCK_SIZE, mask=token < stop, other=0)


@triton.jit
def tile_places(cache, blocks, start, kv_head, shape: tl.constexpr, tiling: tl.constexpr):
    """Return the offsets ``[TILE, D]`` of a tile's keys and values; blocks as from :func:`blocks_of`."""
    i = tl.arange(0, tiling.TILE)
    d = tl.arange(0, shape.D_PADDED)[None, :]
    if shape.BLOCK_SIZE % tiling.TILE == 0:
        base = slot_offset(cache, blocks, start % shape.BLOCK_SIZE, kv_head, shape)
        places = base + i[:, None] * shape.D + d
    else:
        places = slot_offset(cache, blocks, (start + i) % shape.BLOCK_SIZE, kv_head, shape)[:, None] + d
    return places


@triton.jit
def load_seen(cache, blocks, start, first, stop, kv_head, shape: tl.constexpr, tiling: tl.constexpr):
    """Load keys and values ``[TILE, D]`` of the tile at token ``start``; 0 outside the attended tokens.

    Those are tokens ``first`` to ``stop`` - 1.
    """
    place = tile_places(cache, blocks, start, kv_head, shape, tiling)
    loaded = (tl.arange(0, shape.D_PADDED) < shape.D)[None, :]
    mask = are_seen(start, first, stop, tiling)[:, None] & loaded
    return tl.load(cache.k + place, mask=mask, other=0.0), tl.load(cache.v + place, mask=mask, other=0.0)


@triton.jit
def load_tile(cache, blocks, start, kv_head, shape: tl.constexpr, tiling: tl.constexpr):
    """Load keys and values ``[TILE, D]`` of a tile of tokens that are all cached."""
    place = tile_places(cache, blocks, start, kv_head, shape, tiling)
    d = tl.arange(0, shape.D_PADDED)[None, :]
    if shape.D == shape.D_PADDED:
        return tl.load(cache.k + place), tl.load(cache.v + place)
    return tl.load(cache.k + place, mask=d < shape.D, other=0.0), tl.load(
        cache.v + place, mask=d < shape.D, other=0.0
    )


@triton.jit
def store_token(cache, block, position, kv_head, k_new, v_new, shape: tl.constexpr):
    """Store one token's key and value ``[D]`` for one head in the token's slot of ``block``."""
    d = tl.arange(0, shape.D_PADDED)
    place = slot_offset(cache, block, position % shape.BLOCK_SIZE, kv_head, shape) + d
    tl.store(cache.k + place, k_new, mask=d < shape.D)
    tl.store(cache.v + place, v_new, mask=d < shape.D)


@triton.jit
def append_token(cache, table_ptr, position, kv_head, k_new, v_new, shape: tl.constexpr):
    """Store one token's key and value ``[D]`` for one head, in the block that the sequence's table gives.

    table_ptr: the sequence's row of the block table.
    """
    block = tl.load(table_ptr + position // shape.BLOCK_SIZE)
    store_token(cache, block, position, kv_head, k_new, v_new, shape)
