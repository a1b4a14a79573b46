"""Decode attention in equal pieces: queries and keys are rotated, the new token is appended and attended to.

Shapes as in ``rosetrainer.paged_attention`` (PagedAttention, arXiv:2309.06180). A program takes all query
heads of a KV head, so each key and value is read once, and scans keys with an online softmax (Dao et al.
2022, FlashAttention, arXiv:2205.14135). A row is a sequence; its keys are cut into tiles. The tiles of all
rows, one after the other, are cut into pieces of equal length, one for each program (Stream-K, Osama et al.
2023, arXiv:2301.03598): a piece may end one row, hold several and begin another. Rows cut by pieces give
partial results, which a second kernel combines (Dao, Haziza, Massa & Sizov 2023, Flash-Decoding). Context
lengths are read on the device (:class:`Plan`), so one captured launch serves them all. A row with a negative
position is inert: its output is zero and nothing of it is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from rosellm.errors import OptionError
from rosellm.models.rope import Rotary
from rosellm.roseinfer.kernels.attention import AttendedRows
from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.roseinfer.kernels.paged_cache import append_token, layer_arguments, rows_of, slot_offset
from rosellm.roseinfer.kernels.prefill import LOG2_E, SMALLEST_DOT, TRITON_DTYPES
from rosellm.triton_or_none import tl, triton

ROLES = {
    "_plan_kernel": "attention",
    "_decode_attention_kernel": "attention",
    "_combine_pieces_kernel": "attention",
}
PLANNED_ELEMENTS = 2048  # of the matrix (pieces, rows) that a program of the plan compares
COMBINED_AT_ONCE = 64  # partial results
SHORT, LONG = 128, 1024  # cached tokens
FULL = 8  # programs a processor
ONE_WARP_COMBINES = 1024  # elements of them


class Variant(NamedTuple):
    """One way to launch: tokens of a tile, pieces (0: one for each row), warps, stages of loads.

    stages 1: the next tile is loaded into registers; more: Triton copies tiles into shared memory. lanes, for
    groups of one query head: 1 if each token of a tile has a softmax of its own, combined at the end, so that
    threads work without each other; it takes ``tile * D / warps / 32`` more registers.
    """

    tile: int
    pieces: int = 0
    warps: int = 4
    stages: int = 1
    lanes: int = 0

    @property
    def combine(self) -> bool:
        """Whether rows may be cut."""
        return self.pieces > 0

    def __str__(self) -> str:
        return "/".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> Variant:
        """The variant that ``str`` gives ``text`` for."""
        return cls(*map(int, text.split("/")))


class Plan(NamedTuple):
    """Where the pieces of a step lie, for all layers of one window.

    starts ``[PIECES + 1, 2]`` int32: row and tile at which each piece starts, and the end of the last; a
    row's tiles are counted from the first that its window touches. covers ``[B, 2]`` int32: the first and the
    last piece of each row. Where pieces are more than tiles, the last are empty. Both are None where a piece
    is a row.
    """

    variant: Variant
    window: int = 0
    starts: Tensor | None = None
    covers: Tensor | None = None


def variant_for(
    rows: int, kv_heads: int, longest: int, num_sms: int, group: int = 1, head_dim: int = 64
) -> Variant:
    """The fastest measured on an H200 for ``rows`` of at most ``longest`` cached tokens, cut where that pays.

    Rows that fill the GPU stay whole, unless they may be of very unequal lengths.
    """
    programs, pieces = rows * kv_heads, max(1, 2 * num_sms // kv_heads)  # two programs a processor
    whole = whole_rows(rows, kv_heads, longest, num_sms, group, head_dim)
    if programs >= 2 * num_sms:
        if longest <= LONG or group == 1:
            return whole
        return Variant(32, 2 * pieces, 2, 4) if programs >= FULL * num_sms else Variant(64, pieces, 4, 2)
    if longest <= SHORT or (rows > 2 and longest <= LONG // 2):
        return whole
    tiles = rows * -(-longest // 16)
    if tiles <= 8 * pieces:
        most = min(pieces, tiles)
        return Variant(16, most, 1, 1, 1) if group == 1 else Variant(16, most, 1, 2)
    if group == 1:
        return Variant(16, 4 * pieces, 2, 3, 1)
    return Variant(128 if head_dim <= 64 else 64, pieces, 4, 2)


def whole_rows(
    rows: int, kv_heads: int, longest: int, num_sms: int, group: int = 1, head_dim: int = 64
) -> Variant:
    """The fastest measured with one piece for each row: few programs read much at once, many small tiles."""
    programs, reach = rows * kv_heads, triton.next_power_of_2(max(longest, 1))
    if programs >= FULL * num_sms:
        if group == 1:
            return Variant(32, warps=1) if longest <= LONG // 2 else Variant(64, warps=2)
        return Variant(16, warps=1, stages=4)
    if programs >= 2 * num_sms:
        if group == 1:
            return Variant(64, warps=2)
        return Variant(64 if head_dim <= 64 else 32, warps=4, stages=2)
    if group == 1:
        return Variant(min(max(64, reach), 512), warps=4 if reach <= 128 else 8)
    return Variant(64, warps=8)


# The specification.


def make_plan_ref(positions: Tensor, variant: Variant, window: int = 0) -> Plan:
    """The plan in plain torch; positions as of :func:`append_and_attend_ref`."""
    if not variant.combine:
        return Plan(variant, window)
    tiles = _tiles_of(positions.long().clamp_min(0), variant.tile, window)  # [B]
    ends = tiles.cumsum(0)
    filled = ends[-1].clamp_max(variant.pieces)
    start = (torch.arange(variant.pieces + 1, device=ends.device) * ends[-1] // filled).minimum(ends[-1])
    row = torch.searchsorted(ends, start, right=True)
    tile = start - torch.cat((ends.new_zeros(1), ends))[row]
    touched = torch.stack((ends - tiles, ends - 1), dim=1)  # [B, 2]: the first and the last tile of each row
    covers = torch.searchsorted(start, touched, right=True) - 1
    return Plan(variant, window, torch.stack((row, tile), dim=1).int(), covers.int())


def _tiles_of(positions: Tensor, tile: int, window: int) -> Tensor:
    """Tiles that hold cached keys in the window; 1 where there is none, for the new token."""
    first = (positions - window + 1).clamp_min(0) if window else torch.zeros_like(positions)
    return ((positions + tile - 1) // tile - first // tile).clamp_min(1)


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
    rotary: Rotary | None = None,
    window: int = 0,
    plan: Plan | None = None,
) -> Tensor:
    """The specification: rotate, append the token of every row that is not inert, then attend to the cache.

    q ``[B, H, D]``, k_new and v_new ``[B, H_kv, D]`` → ``[B, H, D]`` of q's dtype. positions ``[B]`` int32:
    number of cached tokens, and so the new token's position; negative for an inert row. block_table
    ``[B, MAX_BLOCKS]`` int32 also names the new token's block; entries of blocks wholly before the window may
    be anything. window: keys that a query sees, its own included; 0 for all. plan is ignored here.
    """
    rows = WindowedRows(block_table, positions, k_cache_layer, window)
    if rotary is not None:
        q = turn(q, rotary.q_norm, rotary, positions)
        k_new = turn(k_new, rotary.k_norm, rotary, positions)
    return rows(q, k_new, v_new, k_cache_layer, v_cache_layer, scale)


def turn(x: Tensor, norm: Tensor | None, rotary: Rotary, positions: Tensor) -> Tensor:
    """Heads ``[B, N, D]``, normalised and rotated in fp32, as x's dtype."""
    heads = x.float()
    if norm is not None:
        mean_square = heads.square().mean(dim=-1, keepdim=True)
        heads = heads * torch.rsqrt(mean_square + rotary.eps) * norm.float()
    cos, sin = rotary.cos_sin[positions.clamp_min(0).long()][:, None].chunk(2, dim=-1)  # [B, 1, D / 2]
    low, high = heads.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


class WindowedRows(AttendedRows):
    """The specification for one step and window: what all layers share is computed once."""

    def __init__(self, block_table: Tensor, positions: Tensor, cache_layer: Tensor, window: int) -> None:
        first = (positions.long() - window + 1).clamp_min(0)[:, None] if window else positions.new_zeros(1, 1)
        blocks = torch.arange(1, block_table.shape[1] + 1, device=positions.device)
        left = blocks * cache_layer.shape[2] <= first  # [B, MAX_BLOCKS]
        super().__init__(block_table.masked_fill(left, 0), positions, cache_layer)
        slots = torch.arange(self.held.seen.shape[-1], device=positions.device)
        seen = self.held.seen & (slots >= first)[:, None, None]
        self.held = replace(self.held, seen=seen)


# The kernels.


class Tiling(NamedTuple):
    """Compile-time constants: tokens of a tile, window, rows of q, stages.

    DOT: operand dtype of matrix products, or None for products and sums of vectors. NORMS: whether heads are
    normalised. LANES: as of :class:`Variant`.
    """

    TILE: int
    WINDOW: int
    M: int
    STAGES: int
    DOT: object
    NORMS: bool
    LANES: bool


class PartialRows(NamedTuple):
    """Partial results, fp32: maximum and sum ``[PIECES + B, H]``, accumulator ``[PIECES + B, H, D]``.

    That of a piece and a row is at the sum of their indices: none share it, a row's are adjacent.
    """

    m_i: Tensor
    l_i: Tensor
    acc: Tensor


@triton.jit
def span_of(position, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """The first key that a row's query sees, its tile, and the number of tiles from there, at least one."""
    position = tl.maximum(position, 0)
    first = tl.maximum(position - WINDOW + 1, 0) if WINDOW else position * 0
    first_tile = first // TILE
    return first, first_tile, tl.maximum(tl.cdiv(position, TILE) - first_tile, 1)


@triton.jit(do_not_specialize=["n_rows", "n_pieces"])
def _plan_kernel(
    starts_ptr, covers_ptr, positions_ptr, position_stride, n_rows, n_pieces, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per CHUNK pieces; each sums up the tiles of all rows, and the first writes ``covers``."""
    row = tl.arange(0, ROWS)
    piece = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    exists = row < n_rows
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    position = tl.load(positions_ptr + row * position_stride, mask=exists, other=0)
    _, _, tiles = span_of(position, TILE, WINDOW)
    tiles = tl.where(exists, tiles, 0)
    ends = tl.cumsum(tiles, axis=0)
    total = tl.sum(tiles, axis=0)
    filled = tl.minimum(total, n_pieces).to(tl.int64)
    start = tl.minimum(piece * total.to(tl.int64) // filled, total).to(tl.int32)
    before = exists[None, :] & (ends[None, :] <= start[:, None])
    passed = tl.max(tl.where(before, ends[None, :], 0), axis=1)
    planned = piece <= n_pieces
    tl.store(starts_ptr + 2 * piece, tl.sum(before.to(tl.int32), axis=1), mask=planned)
    tl.store(starts_ptr + 2 * piece + 1, start - passed, mask=planned)
    if tl.program_id(0) == 0:
        first = tl.cdiv((ends - tiles + 1) * filled, total) - 1
        last = tl.cdiv(ends * filled, total) - 1
        tl.store(covers_ptr + 2 * row, first.to(tl.int32), mask=exists)
        tl.store(covers_ptr + 2 * row + 1, last.to(tl.int32), mask=exists)


@triton.jit
def are_seen(start, first, stop, tiling: tl.constexpr):
    """Which of a tile's tokens are among ``first`` … ``stop``, ``[TILE]``."""
    token = start + tl.arange(0, tiling.TILE)
    return (token >= first) & (token < stop) if tiling.WINDOW else token < stop


@triton.jit
def load_seen(cache, table_ptr, start, first, stop, kv_head, shape: tl.constexpr, tiling: tl.constexpr):
    """Keys and values of a tile of tokens, ``[TILE, D]``; zero but for those in ``first`` … ``stop``."""
    TILE: tl.constexpr = tiling.TILE
    d = tl.arange(0, shape.D_PADDED)
    seen = are_seen(start, first, stop, tiling)
    if shape.BLOCK_SIZE % TILE == 0:
        block = tl.load(table_ptr + start // shape.BLOCK_SIZE, mask=start < stop, other=0)
        base = slot_offset(cache, block, start % shape.BLOCK_SIZE, kv_head, shape)
        place = base + tl.arange(0, TILE)[:, None] * shape.D + d[None, :]
    else:
        token = start + tl.arange(0, TILE)
        block = tl.load(table_ptr + token // shape.BLOCK_SIZE, mask=seen, other=0)
        place = slot_offset(cache, block, token % shape.BLOCK_SIZE, kv_head, shape)[:, None] + d[None, :]
    mask = seen[:, None] & (d < shape.D)[None, :]
    return tl.load(cache.k + place, mask=mask, other=0.0), tl.load(cache.v + place, mask=mask, other=0.0)


@triton.jit
def load_angles(rotary, position, shape: tl.constexpr):
    """Cosine and signed sine ``[1, D]`` of a position: a rotated element is x * cos + its partner * sin."""
    D: tl.constexpr = shape.D_PADDED
    d = tl.arange(0, D)[None, :]
    if rotary is None:
        cos = tl.zeros((1, D), tl.float32)
        sin = cos
    else:
        HALF: tl.constexpr = shape.D // 2
        place = rotary.cos_sin + tl.maximum(position, 0).to(tl.int64) * shape.D + d % HALF
        cos = tl.load(place, mask=d < shape.D, other=0.0)
        sin = tl.load(place + HALF, mask=d < shape.D, other=0.0)
        sin = tl.where(d < HALF, -sin, sin)
    return cos, sin


@triton.jit
def load_ahead(
    cache, rows, row, tile, exists, kv_head, shape: tl.constexpr, tiling: tl.constexpr
):  # fmt: skip
    """A row's position and the keys and values of one of its tiles."""
    place = rows.positions + row * rows.position_stride
    position = tl.load(place, mask=exists, other=-1)
    first, first_tile, _ = span_of(position, tiling.TILE, tiling.WINDOW)
    start = (first_tile + tile) * tiling.TILE
    table_ptr = rows.table + row * rows.table_stride
    k, v = load_seen(cache, table_ptr, start, first, position, kv_head, shape, tiling)
    return position, k, v


@triton.jit
def load_heads(
    ptr, norm_ptr, rotary, cos, sin,
    COUNT: tl.constexpr, M: tl.constexpr, NORMS: tl.constexpr, shape: tl.constexpr,
):  # fmt: skip
    """COUNT adjacent heads, normalised and rotated, ``[M, D]`` of their own dtype; zero from COUNT on."""
    m = tl.arange(0, M)[:, None]
    d = tl.arange(0, shape.D_PADDED)[None, :]
    mask = (m < COUNT) & (d < shape.D)
    x = tl.load(ptr + m * shape.D + d, mask=mask, other=0.0)
    dtype: tl.constexpr = x.dtype
    if rotary is not None:
        partner = (d + shape.D // 2) % shape.D
        y = tl.load(ptr + m * shape.D + partner, mask=mask, other=0.0).to(tl.float32)
        x = x.to(tl.float32)
        if NORMS:
            unit = tl.rsqrt(tl.sum(x * x, axis=1) / shape.D + rotary.eps)[:, None]
            x = x * unit * tl.load(norm_ptr + d, mask=d < shape.D, other=0.0).to(tl.float32)
            y = y * unit * tl.load(norm_ptr + partner, mask=d < shape.D, other=0.0).to(tl.float32)
        x = (x * cos + y * sin).to(dtype)
    return x


@triton.jit
def load_query(new, rotary, row, kv_head, cos, sin, shape: tl.constexpr, tiling: tl.constexpr):
    """The group's queries ``[M, D]``, as operands: of dtype DOT, or fp32."""
    norm_ptr = None if rotary is None else rotary.q_norm
    ptr = new.q + row * new.q_stride + kv_head * shape.GROUP * shape.D
    q = load_heads(ptr, norm_ptr, rotary, cos, sin, shape.GROUP, tiling.M, tiling.NORMS, shape)
    return q.to(tl.float32 if tiling.DOT is None else tiling.DOT)


@triton.jit
def load_new(new, rotary, row, kv_head, cos, sin, NORMS: tl.constexpr, shape: tl.constexpr):
    """The new key, as it is cached, and the new value, ``[1, D]`` each."""
    norm_ptr = None if rotary is None else rotary.k_norm
    place = row * new.kv_stride + kv_head * shape.D
    k_new = load_heads(new.k + place, norm_ptr, rotary, cos, sin, 1, 1, NORMS, shape)
    return k_new, load_heads(new.v + place, None, None, cos, sin, 1, 1, False, shape)


@triton.jit
def no_keys(shape: tl.constexpr, tiling: tl.constexpr):
    """The online softmax over nothing: maxima, sums of weights, weighted sums of values.

    ``[M]``, ``[M, TILE]`` and ``[M, D]`` with DOT, so that sums are taken across threads once, at the end.
    With LANES, each token of a tile has a softmax of its own: ``[TILE]``, ``[TILE]`` and ``[TILE, D]``.
    Otherwise ``[1]``, ``[1]`` and ``[1, D]``. The maximum of nothing is finite, or differences were NaN.
    """
    TILE: tl.constexpr = tiling.TILE
    ROWS: tl.constexpr = tiling.TILE if tiling.LANES else tiling.M
    D: tl.constexpr = shape.D_PADDED
    l_i = tl.zeros((ROWS,) if tiling.DOT is None else (ROWS, TILE), tl.float32)
    return tl.full((ROWS,), -1.0e30, tl.float32), l_i, tl.zeros((ROWS, D), tl.float32)


@triton.jit
def attend_tile(q, k, v, seen, scale, m_i, l_i, acc, tiling: tl.constexpr):
    """One more tile of the online softmax (Milakov & Gimelshein 2018), in base 2: scale holds log2(e).

    q ``[M, D]``, k and v ``[TILE, D]``, seen ``[TILE]``; the others as of :func:`no_keys`.
    """
    DOT: tl.constexpr = tiling.DOT
    if DOT is None:
        scores = tl.where(seen, tl.sum(k.to(tl.float32) * q, axis=1) * scale, float("-inf"))  # [TILE]
        m_new = tl.maximum(m_i, scores if tiling.LANES else tl.max(scores, axis=0))
        p = tl.exp2(scores - m_new)
        weighted = v.to(tl.float32) * p[:, None]
        alpha = tl.exp2(m_i - m_new)
        acc = acc * alpha[:, None] + (weighted if tiling.LANES else tl.sum(weighted, axis=0)[None, :])
        l_i = l_i * alpha + (p if tiling.LANES else tl.sum(p, axis=0))
    else:
        products = tl.dot(q, tl.trans(k.to(DOT)), input_precision="ieee")
        scores = tl.where(seen[None, :], products * scale, float("-inf"))  # [M, TILE]
        m_new = tl.maximum(m_i, tl.max(scores, axis=1))
        p = tl.exp2(scores - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        acc = tl.dot(p.to(DOT), v.to(DOT), acc * alpha[:, None], input_precision="ieee")
        l_i = l_i * alpha[:, None] + p
    return m_new, l_i, acc


@triton.jit
def gathered(m_i, l_i, acc, tiling: tl.constexpr):
    """The softmax, of DOT or LANES, as ``[M]``, ``[M]``, ``[M, D]``."""
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
    """One more token: score ``[M]``, v_new ``[1, D]``."""
    m_new = tl.maximum(m_i, score)
    p = tl.exp2(score - m_new)
    alpha = tl.exp2(m_i - m_new)
    return m_new, l_i * alpha + p, acc * alpha[:, None] + v_new * p[:, None]


@triton.jit
def attend_range(
    q, k, v, m_i, l_i, acc, begin, end, first, stop, cache, table_ptr, kv_head, scale,
    shape: tl.constexpr, tiling: tl.constexpr,
):  # fmt: skip
    """The online softmax over the tiles that lie from token ``begin`` to ``end``; k and v are the first's."""
    TILE: tl.constexpr = tiling.TILE
    if tiling.STAGES == 1:
        for start in range(begin, end, TILE):
            limit = tl.minimum(stop, end)
            k_next, v_next = load_seen(cache, table_ptr, start + TILE, first, limit, kv_head, shape, tiling)
            seen = are_seen(start, first, stop, tiling)
            m_i, l_i, acc = attend_tile(q, k, v, seen, scale, m_i, l_i, acc, tiling)
            k, v = k_next, v_next
    else:
        seen = are_seen(begin, first, stop, tiling)
        m_i, l_i, acc = attend_tile(q, k, v, seen, scale, m_i, l_i, acc, tiling)
        for start in tl.range(begin + TILE, end, TILE, num_stages=tiling.STAGES):
            k, v = load_seen(cache, table_ptr, start, first, stop, kv_head, shape, tiling)
            seen = are_seen(start, first, stop, tiling)
            m_i, l_i, acc = attend_tile(q, k, v, seen, scale, m_i, l_i, acc, tiling)
    return m_i, l_i, acc


@triton.jit
def append_new(
    q, new, cache, rotary, row, position, table_ptr, kv_head, cos, sin, scale,
    shape: tl.constexpr, tiling: tl.constexpr,
):  # fmt: skip
    """Stores the new key and value; its score ``[M]`` and the value ``[1, D]`` in fp32."""
    k_new, v_new = load_new(new, rotary, row, kv_head, cos, sin, tiling.NORMS, shape)
    D: tl.constexpr = shape.D_PADDED
    if position >= 0:
        k_row, v_row = tl.reshape(k_new, (D,)), tl.reshape(v_new, (D,))
        append_token(cache, table_ptr, position, kv_head, k_row, v_row, shape)
    return tl.sum(q.to(tl.float32) * k_new.to(tl.float32), axis=1) * scale, v_new.to(tl.float32)


@triton.jit
def attend_part(
    ahead, cos, sin, new, cache, rows, rotary, row, tile, n_tiles, kv_head, scale,
    shape: tl.constexpr, tiling: tl.constexpr,
):  # fmt: skip
    """The softmax over ``n_tiles`` of a row from ``tile`` on; its first tile also has the new token."""
    TILE: tl.constexpr = tiling.TILE
    M: tl.constexpr = tiling.M
    D: tl.constexpr = shape.D_PADDED
    position, k, v = ahead
    table_ptr = rows.table + row * rows.table_stride
    first, first_tile, _ = span_of(position, TILE, tiling.WINDOW)
    q = load_query(new, rotary, row, kv_head, cos, sin, shape, tiling)
    score = tl.full((M,), float("-inf"), tl.float32)
    v_new = tl.zeros((1, D), tl.float32)
    if tile == 0:
        score, v_new = append_new(
            q, new, cache, rotary, row, position, table_ptr, kv_head, cos, sin, scale, shape, tiling
        )
    m_i, l_i, acc = no_keys(shape, tiling)
    EARLY: tl.constexpr = tiling.DOT is None and not tiling.LANES  # saves registers
    if EARLY:
        m_i, l_i, acc = with_new(score, v_new, m_i, l_i, acc)
    begin = (first_tile + tile) * TILE
    end = begin + n_tiles * TILE
    m_i, l_i, acc = attend_range(
        q, k, v, m_i, l_i, acc, begin, end, first, position, cache, table_ptr, kv_head, scale, shape, tiling
    )
    if not EARLY:
        m_i, l_i, acc = gathered(m_i, l_i, acc, tiling)
        m_i, l_i, acc = with_new(score, v_new, m_i, l_i, acc)
    return m_i, l_i, acc


@triton.jit
def store_heads(out_ptr, row, kv_head, x, shape: tl.constexpr, M: tl.constexpr):
    """A group's outputs ``[M, D]`` into ``[…, H, D]``."""
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
def attend_row(
    out_ptr, new, cache, rows, rotary, scale,
    shape: tl.constexpr, tiling: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A whole row in one program."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    ahead = load_ahead(cache, rows, row, 0, True, kv_head, shape, tiling)
    cos, sin = load_angles(rotary, ahead[0], shape)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    _, _, n_tiles = span_of(ahead[0], tiling.TILE, tiling.WINDOW)
    m_i, l_i, acc = attend_part(
        ahead, cos, sin, new, cache, rows, rotary, row, 0, n_tiles, kv_head, scale, shape, tiling
    )
    out = tl.where(ahead[0] >= 0, acc / l_i[:, None], 0.0)
    store_heads(out_ptr, row, kv_head, out, shape, tiling.M)


@triton.jit
def attend_piece(
    out_ptr, partial, new, cache, rows, rotary, starts_ptr, scale,
    shape: tl.constexpr, tiling: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A piece, row by row."""
    piece = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.load(starts_ptr + 2 * piece).to(tl.int64)
    tile = tl.load(starts_ptr + 2 * piece + 1)
    last_row = tl.load(starts_ptr + 2 * piece + 2)
    last_tile = tl.load(starts_ptr + 2 * piece + 3)
    is_empty = (row == last_row) & (tile == last_tile)
    stop_row = tl.where(is_empty | (last_tile == 0), last_row, last_row + 1)
    ahead = load_ahead(cache, rows, row, tile, row < stop_row, kv_head, shape, tiling)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    for _ in range(row.to(tl.int32), stop_row):
        position = ahead[0]
        _, _, in_row = span_of(position, tiling.TILE, tiling.WINDOW)
        stop_tile = tl.where(row == last_row, last_tile, in_row)
        cos, sin = load_angles(rotary, position, shape)
        m_i, l_i, acc = attend_part(
            ahead,
            cos,
            sin,
            new,
            cache,
            rows,
            rotary,
            row,
            tile,
            stop_tile - tile,
            kv_head,
            scale,
            shape,
            tiling,
        )
        if (tile == 0) & (stop_tile == in_row):
            out = tl.where(position >= 0, acc / l_i[:, None], 0.0)
            store_heads(out_ptr, row, kv_head, out, shape, tiling.M)
        else:
            store_partial(partial, piece + row, kv_head, m_i, l_i, acc, shape, tiling.M)
        row += 1
        tile = 0
        ahead = load_ahead(cache, rows, row, tile, row < stop_row, kv_head, shape, tiling)


@triton.jit
def _decode_attention_kernel(
    out_ptr, partial, new, cache, rows, rotary, starts_ptr, scale,
    shape: tl.constexpr, tiling: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per (piece, KV head); the first tile is loaded before the kernel waits for q, k and v."""
    if starts_ptr is None:
        attend_row(out_ptr, new, cache, rows, rotary, scale, shape, tiling, DEPENDENT)
    else:
        attend_piece(
            out_ptr, partial, new, cache, rows, rotary, starts_ptr, scale, shape, tiling, DEPENDENT
        )  # fmt: skip


@triton.jit
def _combine_pieces_kernel(
    out_ptr, partial, covers_ptr, shape: tl.constexpr, PARTS: tl.constexpr, DEPENDENT: tl.constexpr
):
    """One program per (row, query head): the weighted mean of the partial results of a row that was cut."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    D: tl.constexpr = shape.D_PADDED
    d = tl.arange(0, D)
    first = tl.load(covers_ptr + 2 * row)
    last = tl.load(covers_ptr + 2 * row + 1)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    if first < last:
        m_i = tl.full((), float("-inf"), tl.float32)
        l_i = tl.full((), 0.0, tl.float32)
        acc = tl.zeros((D,), tl.float32)
        for start in range(first, last + 1, PARTS):
            piece = start + tl.arange(0, PARTS)
            exists = piece <= last
            part = (row + piece) * shape.H + head
            m = tl.load(partial.m_i + part, mask=exists, other=float("-inf"))
            sums = tl.load(partial.l_i + part, mask=exists, other=0.0)
            place = partial.acc + part[:, None] * shape.D + d[None, :]
            mask = exists[:, None] & (d < shape.D)[None, :]
            values = tl.load(place, mask=mask, other=0.0)
            m_new = tl.maximum(m_i, tl.max(m, axis=0))
            alpha = tl.exp2(m_i - m_new)
            weights = tl.exp2(m - m_new)
            acc = acc * alpha + tl.sum(values * weights[:, None], axis=0)
            l_i = l_i * alpha + tl.sum(sums * weights, axis=0)
            m_i = m_new
        place = out_ptr + (row * shape.H + head) * shape.D + d
        tl.store(place, (acc / l_i).to(out_ptr.dtype.element_ty), mask=d < shape.D)


# Launches.


def make_planner(dependent: int = False) -> Callable[..., Plan]:
    """The Triton kernel, called like :func:`make_plan_ref`; positions may be strided. Once per step."""
    launch = {"DEPENDENT": dependent, **launch_options(dependent)}

    def make_plan(positions: Tensor, variant: Variant, window: int = 0) -> Plan:
        if not variant.combine:
            return Plan(variant, window)
        n_rows, pieces = len(positions), variant.pieces
        starts = positions.new_empty((pieces + 1, 2), dtype=torch.int32)
        covers = positions.new_empty((n_rows, 2), dtype=torch.int32)
        rows = triton.next_power_of_2(n_rows)
        chunk = min(128, max(1, PLANNED_ELEMENTS // rows))
        arguments = starts, covers, positions, positions.stride(0), n_rows, pieces
        sizes = {"ROWS": rows, "CHUNK": chunk, "TILE": variant.tile, "WINDOW": window}
        _plan_kernel[(-(-(pieces + 1) // chunk),)](*arguments, **sizes, **launch)
        return Plan(variant, window, starts, covers)

    return make_plan


make_plan = make_planner()


def make_append_and_attend(dependent: int = False) -> Callable[..., Tensor]:
    """One or two Triton kernels, called like :func:`append_and_attend_ref`, with a plan of the same window.

    Caches are contiguous, and so is a row of the table; rows of table and positions may be strided. q, k_new
    and v_new are slices of one fused projection: their rows share a stride, ``[H, D]`` is contiguous. The
    plan was written two or more kernels ago. Products of groups of fp16 or bf16 queries run on tensor cores,
    those of fp32 in full fp32; the softmax is always fp32.
    """
    launch = {"DEPENDENT": dependent, **launch_options(dependent)}

    def append_and_attend(
        *,
        q,
        k_new,
        v_new,
        k_cache_layer,
        v_cache_layer,
        block_table,
        positions,
        scale,
        rotary=None,
        window=0,
        plan,
    ) -> Tensor:
        _check(plan, window)
        variant, (batch, n_heads, _), out = plan.variant, q.shape, q.new_empty(q.shape)
        group = n_heads // k_new.shape[1]
        smallest = SMALLEST_DOT if group > 1 else 1
        new, cache, shape = layer_arguments(q, k_new, v_new, k_cache_layer, v_cache_layer, smallest)
        tiling = _tiling(variant, window, group, q, rotary)
        rows, pointers = rows_of(block_table, positions), _pointers(rotary)
        partial = _new_partial(q, variant.pieces + batch) if variant.combine else None
        _decode_attention_kernel[(variant.pieces or batch, shape.H_KV)](
            out, partial, new, cache, rows, pointers, plan.starts, scale * LOG2_E, shape, tiling,
            num_warps=variant.warps, num_stages=variant.stages, **launch,
        )  # fmt: skip
        if variant.combine:
            parts = min(COMBINED_AT_ONCE, triton.next_power_of_2(variant.pieces // batch + 2))
            warps = 1 if parts * shape.D_PADDED <= ONE_WARP_COMBINES else 4
            _combine_pieces_kernel[(batch, n_heads)](
                out, partial, plan.covers, shape, parts, num_warps=warps, **launch
            )
        return out

    return append_and_attend


def _check(plan: Plan, window: int) -> None:
    if plan.window != window:
        raise OptionError(f"a plan for window {plan.window} does not fit attention of window {window}")


def _tiling(variant: Variant, window: int, group: int, q: Tensor, rotary: Rotary | None) -> Tiling:
    norms = rotary is not None and rotary.q_norm is not None
    if group == 1:
        return Tiling(variant.tile, window, 1, variant.stages, None, norms, bool(variant.lanes))
    rows = max(SMALLEST_DOT, triton.next_power_of_2(group))
    return Tiling(variant.tile, window, rows, variant.stages, _dot_dtype(q), norms, False)


def _pointers(rotary: Rotary | None) -> Rotary | None:
    """Tensors for all fields, as Triton wants them: without weights, any."""
    if rotary is None or rotary.q_norm is not None:
        return rotary
    return rotary._replace(q_norm=rotary.cos_sin, k_norm=rotary.cos_sin)


def _dot_dtype(q: Tensor):
    """Operand dtype of matrix products; fp32 in Triton's interpreter, which gets bf16 products wrong."""
    return TRITON_DTYPES[q.dtype] if q.is_cuda else tl.float32


def _new_partial(q: Tensor, parts: int) -> PartialRows:
    sizes = (parts, q.shape[1]), (parts, q.shape[1]), (parts, *q.shape[1:])
    return PartialRows(*(q.new_empty(size, dtype=torch.float32) for size in sizes))
