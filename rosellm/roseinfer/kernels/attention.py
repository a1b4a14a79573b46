"""Decode attention that also writes the new token's key and value into the paged cache.

Shapes as in ``rosetrainer.paged_attention`` (PagedAttention, arXiv:2309.06180). A row with a negative
position is inert: its output is zero and nothing of it is written.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.roseinfer.kernels.paged_cache import (
    append_token,
    layer_arguments,
    load_new,
    load_query,
    load_tile,
    rows_of,
)
from rosellm.rosetrainer.paged_attention import attend, held_slots
from rosellm.triton_or_none import tl, triton

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
    window: int | None = None,
) -> Tensor:
    """The specification: append the token of every row that is not inert, then attend to the cache.

    positions ``[B]`` int32: number of cached tokens, and so the new token's position; negative for an inert
    row. block_table ``[B, MAX_BLOCKS]`` int32 also names the new token's block. tile: tokens that a kernel
    reads at a time, a power of two; ignored here. window: the tokens that each attends to, the new one
    included; None: all.
    """
    rows = AttendedRows(block_table, positions, k_cache_layer, window)
    return rows(q, k_new, v_new, k_cache_layer, v_cache_layer, scale)


class AttendedRows:
    """The specification for one step: what all layers share is computed once."""

    def __init__(
        self, block_table: Tensor, positions: Tensor, cache_layer: Tensor, window: int | None = None
    ) -> None:
        self.inert = (positions < 0)[:, None, None]
        self.rows = (positions >= 0).nonzero()[:, 0]
        place, block_size = positions[self.rows].long(), cache_layer.shape[2]
        self.block = block_table[self.rows, place // block_size].long()
        self.slot = place % block_size
        self.held = held_slots(block_table, positions + 1, cache_layer, window)

    def __call__(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        k_cache_layer: Tensor,
        v_cache_layer: Tensor,
        scale: float,
    ) -> Tensor:
        k_cache_layer[self.block, :, self.slot] = k_new[self.rows]
        v_cache_layer[self.block, :, self.slot] = v_new[self.rows]
        k, v = self.held.gather(k_cache_layer), self.held.gather(v_cache_layer)
        return attend(q, k, v, self.held.seen, scale).masked_fill_(self.inert, 0)


@triton.jit
def attend_tile(q, k, v, held, m_i, l_i, acc):
    """One more tile of the online softmax (Milakov & Gimelshein 2018), in base 2: q is scaled by log2(e)."""
    scores = tl.where(held, tl.sum(k.to(tl.float32) * q[None, :], axis=1), float("-inf"))
    m_new = tl.maximum(m_i, tl.max(scores, axis=0))
    p = tl.exp2(scores - m_new)
    alpha = tl.exp2(m_i - m_new)
    acc = acc * alpha + tl.sum(v.to(tl.float32) * p[:, None], axis=0)
    return m_new, l_i * alpha + tl.sum(p, axis=0), acc


@triton.jit
def attend_range(
    q, k, v, m_i, l_i, acc, first, stop, cache, table_ptr, kv_head, shape: tl.constexpr, TILE: tl.constexpr
):
    """The online softmax over cached tokens ``first`` to ``stop``; k and v are the first of their tiles.

    The next tile is loaded before the current one is processed.
    """
    for start in range(first, stop, TILE):
        k_next, v_next = load_tile(cache, table_ptr, start + TILE, stop, kv_head, shape, TILE)
        held = start + tl.arange(0, TILE) < stop
        m_i, l_i, acc = attend_tile(q, k, v, held, m_i, l_i, acc)
        k, v = k_next, v_next
    return m_i, l_i, acc


@triton.jit
def _append_and_attend_kernel(
    out_ptr, new, cache, rows, scale, shape: tl.constexpr, TILE: tl.constexpr, DEPENDENT: tl.constexpr
):
    """One program per (sequence, query head); the first head of each group writes the new key and value.

    The first tile is loaded before the kernel waits for its predecessor, which computes the new token.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    kv_head = head // shape.GROUP
    context_len = tl.load(rows.positions + row * rows.position_stride)
    table_ptr = rows.table + row * rows.table_stride
    k, v = load_tile(cache, table_ptr, 0, context_len, kv_head, shape, TILE)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    q = load_query(new, row, head, scale, shape)
    k_new, v_new = load_new(new, row, kv_head, shape)
    if (context_len >= 0) & (head % shape.GROUP == 0):
        append_token(cache, table_ptr, context_len, kv_head, k_new, v_new, shape)
    m_i = tl.sum(q * k_new.to(tl.float32), axis=0)
    l_i = tl.full((), 1.0, tl.float32)
    acc = v_new.to(tl.float32)
    m_i, l_i, acc = attend_range(
        q, k, v, m_i, l_i, acc, 0, context_len, cache, table_ptr, kv_head, shape, TILE
    )
    out = tl.where(context_len >= 0, acc / l_i, 0.0)
    d = tl.arange(0, shape.D_PADDED)
    place = out_ptr + (row * shape.H + head) * shape.D + d
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=d < shape.D)


def _warps(batch: int, tile: int) -> int:
    return 1 if batch > 16 else max(1, min(8, max(4, tile // 32)))


def make_append_and_attend(
    dependent: int = False, warps: Callable[[int, int], int] = _warps
) -> Callable[..., Tensor]:
    """The Triton kernel, called like :func:`append_and_attend_ref`. warps: (batch, tile) → warps.

    Caches are contiguous, and so is a row of the table; rows of table and positions may be strided. q, k_new
    and v_new are slices of one fused projection: their rows share a stride, ``[H, D]`` is contiguous.
    """
    launch = launch_options(dependent)

    def append_and_attend(
        *, q, k_new, v_new, k_cache_layer, v_cache_layer, block_table, positions, scale, tile
    ) -> Tensor:
        out = q.new_empty(q.shape)
        batch, n_heads, _ = q.shape
        new, cache, shape = layer_arguments(q, k_new, v_new, k_cache_layer, v_cache_layer)
        rows = rows_of(block_table, positions)
        options = {"TILE": tile, "DEPENDENT": dependent, "num_warps": warps(batch, tile), **launch}
        _append_and_attend_kernel[(batch, n_heads)](out, new, cache, rows, scale, shape, **options)
        return out

    return append_and_attend


def tile_for(batch: int, longest: int) -> int:
    """Cached tokens that a program reads at a time: the fastest measured on an H200.

    A small batch has few programs, so each reads all it needs at once, up to 512 tokens (128 from 9 sequences
    on); a large batch has many, and small tiles keep them balanced.
    """
    if batch > 128:
        return 16
    if batch > 16:
        return 32
    return min(max(64, triton.next_power_of_2(longest)), 512 if batch <= 8 else 128)
