"""Bundled arguments of attention kernels: one layer's cache, new tokens, rows, and all sizes.

A kernel gets the fields of :class:`NewTokens`, :class:`PagedCache` and :class:`Rows` as pointers and
integers, and those of :class:`AttentionShape` as compile-time constants.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rosellm.models.quantized import AnyHeads, QuantizedHeads
from rosellm.roseinfer.kernels.codes import coded
from rosellm.triton_or_none import TensorDescriptor, next_power_of_2, tl, triton

SMALLEST_DOT = 16  # minimum of each dimension in tl.dot
LOG2_E = math.log2(math.e)
TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class PagedCache(NamedTuple):
    """The paged cache of one layer.

    k, v: keys and values, ``[N_BLOCKS, H_KV, BLOCK_SIZE, D]``, or their codes.
    k_scales, v_scales: the scales of codes, ``[N_BLOCKS, H_KV, BLOCK_SIZE]``; k and v if there are none.
    stride: elements from one block to the next.
    """

    k: Tensor
    v: Tensor
    k_scales: Tensor
    v_scales: Tensor
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
    DTYPE: dtype of new keys and values, if the cache is quantised, or None.
    """

    H: int
    H_KV: int
    GROUP: int
    D: int
    D_PADDED: int
    BLOCK_SIZE: int
    PARTS: int = 1
    DTYPE: object = None


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
    q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Any, v_cache: Any, smallest: int = 1
) -> tuple[NewTokens, PagedCache, AttentionShape]:
    """Bundle a layer's tensors into the arguments of an attention kernel.

    smallest: lower bound on ``D_PADDED``, the padded head size (``tl.dot`` needs at least 16).
    """
    n_heads, head_dim = q.shape[-2:]
    _, n_kv_heads, block_size, _ = k_cache.shape
    padded = max(smallest, next_power_of_2(head_dim))
    parts, part_stride = (len(q), q.stride(0)) if q.dim() == 4 else (1, 0)
    new = NewTokens(q, k_new, v_new, q.stride(-3), k_new.stride(-3), part_stride)
    sizes = n_heads, n_kv_heads, n_heads // n_kv_heads, head_dim, padded, block_size, parts
    if isinstance(k_cache, QuantizedHeads):
        scales, dtype = (k_cache.scales, v_cache.scales), TRITON_DTYPES[k_cache.dtype]
        cache = PagedCache(k_cache.codes, v_cache.codes, *scales, k_cache.codes.stride(0))
        return new, cache, AttentionShape(*sizes, dtype)
    return new, PagedCache(k_cache, v_cache, k_cache, v_cache, k_cache.stride(0)), AttentionShape(*sizes)


def dot_dtype(x: AnyHeads):
    """Return the operand dtype of GEMMs: x's on a GPU, and fp32 in Triton's interpreter.

    The interpreter computes wrong results for bf16 GEMMs.
    """
    return TRITON_DTYPES[x.dtype] if x.device.type == "cuda" else tl.float32


def described_rows(cache: PagedCache, rows: int, in_pairs: bool = False):
    """Return TMA descriptors of keys and values that copy ``rows`` consecutive slots of a head at a time.

    Slot s of a block, for a head, is row ``(block * H_KV + head) * BLOCK_SIZE + s`` of the descriptors.

    in_pairs: two codes are one int16.
    """
    heads = (x.view(torch.int16) if in_pairs else x for x in (cache.k, cache.v))
    return tuple(
        TensorDescriptor(x, [x.numel() // x.shape[3], x.shape[3]], [x.shape[3], 1], [rows, x.shape[3]])
        for x in heads
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
    """Return the offsets ``[TILE, D]`` of a tile's keys and values, or ``[TILE, D / 2]`` of pairs of codes.

    blocks: as from :func:`blocks_of`.
    """
    PER: tl.constexpr = 1 if tiling.PAIRS is None else 2
    i = tl.arange(0, tiling.TILE)
    d = tl.arange(0, shape.D_PADDED // PER)[None, :]
    if shape.BLOCK_SIZE % tiling.TILE == 0:
        base = slot_offset(cache, blocks, start % shape.BLOCK_SIZE, kv_head, shape)
        places = base // PER + i[:, None] * (shape.D // PER) + d
    else:
        base = slot_offset(cache, blocks, (start + i) % shape.BLOCK_SIZE, kv_head, shape)
        places = base[:, None] // PER + d
    return places


@triton.jit
def tile_slots(blocks, start, kv_head, shape: tl.constexpr, tiling: tl.constexpr):
    """Return the indices ``[TILE]`` of a tile's scales; blocks as from :func:`blocks_of`."""
    token = start + tl.arange(0, tiling.TILE)
    return head_slot(blocks, token % shape.BLOCK_SIZE, kv_head, shape)


@triton.jit
def head_slot(block, slot, kv_head, shape: tl.constexpr):
    """Return the index of the scale of a slot's key or value for one head."""
    return (block.to(tl.int64) * shape.H_KV + kv_head) * shape.BLOCK_SIZE + slot


@triton.jit
def load_scales(cache, slots, held):
    """Load the scales of keys and values at indices ``slots``. held: which of them exist; None for all."""
    if held is None:
        k_scales, v_scales = tl.load(cache.k_scales + slots), tl.load(cache.v_scales + slots)
    else:
        k_scales = tl.load(cache.k_scales + slots, mask=held, other=0.0)
        v_scales = tl.load(cache.v_scales + slots, mask=held, other=0.0)
    return k_scales, v_scales


@triton.jit
def store_quantized(cache, slots, stored, k, v, shape: tl.constexpr):
    """Quantise keys and values ``[N, D]``, store them in ``slots`` where ``stored``, and return what is read.

    slots: indices of scales. The result is fp32.
    """
    k_codes, k_scales = coded(k.to(tl.float32), cache.k.dtype.element_ty)
    v_codes, v_scales = coded(v.to(tl.float32), cache.v.dtype.element_ty)
    d = tl.arange(0, shape.D_PADDED)[None, :]
    place, mask = slots[:, None] * shape.D + d, stored[:, None] & (d < shape.D)
    tl.store(cache.k + place, k_codes, mask=mask)
    tl.store(cache.v + place, v_codes, mask=mask)
    tl.store(cache.k_scales + slots, k_scales, mask=stored)
    tl.store(cache.v_scales + slots, v_scales, mask=stored)
    return k_codes.to(tl.float32) * k_scales[:, None], v_codes.to(tl.float32) * v_scales[:, None]


@triton.jit
def load_heads_at(cache, place, mask, tiling: tl.constexpr):
    """Load keys and values at offsets ``place``: 0 where ``mask``, unless it is None, is false."""
    k_ptr, v_ptr = cache.k, cache.v
    if tiling.PAIRS is not None:
        k_ptr = k_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
        v_ptr = v_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    if mask is None:
        k, v = tl.load(k_ptr + place), tl.load(v_ptr + place)
    else:
        k, v = tl.load(k_ptr + place, mask=mask, other=0.0), tl.load(v_ptr + place, mask=mask, other=0.0)
    return k, v


@triton.jit
def inside_head(shape: tl.constexpr, tiling: tl.constexpr):
    """Return which elements, or pairs, of a padded head exist: ``[1, D]`` or ``[1, D / 2]``."""
    PER: tl.constexpr = 1 if tiling.PAIRS is None else 2
    return (tl.arange(0, shape.D_PADDED // PER) < shape.D // PER)[None, :]


@triton.jit
def load_seen(cache, blocks, start, first, stop, kv_head, shape: tl.constexpr, tiling: tl.constexpr):
    """Load keys and values ``[TILE, D]`` of the tile at token ``start``; 0 outside the attended tokens.

    Those are tokens ``first`` to ``stop`` - 1. Returns keys and values or, of a quantised cache, the codes of
    both, and the scales ``[TILE]`` of both.
    """
    place = tile_places(cache, blocks, start, kv_head, shape, tiling)
    seen = are_seen(start, first, stop, tiling)
    loaded = load_heads_at(cache, place, seen[:, None] & inside_head(shape, tiling), tiling)
    if shape.DTYPE is not None:
        loaded = loaded + load_scales(cache, tile_slots(blocks, start, kv_head, shape, tiling), seen)
    return loaded


@triton.jit
def load_tile(cache, blocks, start, kv_head, shape: tl.constexpr, tiling: tl.constexpr):
    """Load a tile of tokens that are all cached, and return it as :func:`load_seen` does."""
    place = tile_places(cache, blocks, start, kv_head, shape, tiling)
    mask = None if shape.D == shape.D_PADDED else inside_head(shape, tiling)
    loaded = load_heads_at(cache, place, mask, tiling)
    if shape.DTYPE is not None:
        loaded = loaded + load_scales(cache, tile_slots(blocks, start, kv_head, shape, tiling), None)
    return loaded


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
