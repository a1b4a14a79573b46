"""Decode attention that rotates queries and keys, appends the new token to the cache, and attends.

Shapes as in ``rosetrainer.paged_attention`` (PagedAttention, arXiv:2309.06180). Each program handles all
query heads of a KV head, so every key and value is read once, and scans the keys with an online softmax (Dao
et al. 2022, FlashAttention, arXiv:2205.14135). An ``attention_plan.Plan`` splits the work into equal pieces;
rows that are split give partial results, which a second kernel combines (Dao, Haziza, Massa & Sizov 2023,
Flash-Decoding). A row with a negative position is inert: its output is zero, and its token is not cached.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rosellm.errors import OptionError
from rosellm.models.quantized import AnyHeads, QuantizedHeads
from rosellm.models.rope import Rotary
from rosellm.roseinfer.kernels.attention_plan import Plan, Variant, span_of
from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.roseinfer.kernels.online_softmax import (
    Tiling,
    attend_tile,
    combine,
    gathered,
    new_partial,
    no_keys,
    operands,
    store_heads,
    store_partial,
    with_new,
)
from rosellm.roseinfer.kernels.paged_cache import (
    LOG2_E,
    SMALLEST_DOT,
    AttentionShape,
    PagedCache,
    are_seen,
    blocks_of,
    described_rows,
    dot_dtype,
    head_slot,
    layer_arguments,
    load_scales,
    load_seen,
    load_tile,
    rows_of,
    store_quantized,
    store_token,
    tile_slots,
)
from rosellm.roseinfer.kernels.repeated import repeated
from rosellm.roseinfer.kernels.ring_attention import ring_attend
from rosellm.roseinfer.kernels.rotary import load_angles, load_heads, positioned, positioned_ref
from rosellm.rosetrainer.paged_attention import attend, held_slots
from rosellm.triton_or_none import next_power_of_2, tl, triton

ROLES = {"_decode_attention_kernel": "attention"}
UP = 2.0**60  # squared: what ``codes.unpacked`` divides FP8 by in bf16


def append_and_attend_ref(
    *,
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache_layer: AnyHeads,
    v_cache_layer: AnyHeads,
    block_table: Tensor,
    positions: Tensor,
    scale: float,
    rotary: Rotary | None = None,
    window: int | None = None,
    plan: Plan | None = None,
) -> Tensor:
    """Rotate q and k_new, append the new tokens to the cache, and attend to the cache (torch reference).

    q: ``[B, H, D]``, or P partial sums ``[P, B, H, D]`` in fp32.
    k_new, v_new: ``[B, H_kv, D]``, or P partial sums ``[P, B, H_kv, D]`` in fp32.
    k_cache_layer, v_cache_layer: the layer's caches, updated in place; a quantised cache quantises new tokens
        before they are attended to.
    block_table: ``[B, MAX_BLOCKS]`` int32, including the new token's block. Entries of blocks entirely before
        the window may hold anything.
    positions: ``[B]`` int32, the number of cached tokens, which is the new token's position; negative for an
        inert row.
    scale: factor on the scores.
    rotary: None to use q and k_new as they are.
    window: number of tokens that each query attends to, including the new one; None for all.
    plan: ignored.

    Partial sums are added up and rounded to the cache's dtype first. Returns ``[B, H, D]`` in that dtype,
    with zeros for inert rows.
    """
    if q.dim() == 4:
        q, k_new, v_new = (sum(x[1:], x[0]).to(k_cache_layer.dtype) for x in (q, k_new, v_new))
    rows = AttendedRows(block_table, positions, k_cache_layer, window)
    if rotary is not None:
        q = positioned_ref(q, rotary.q_norm, positions, rotary)
        k_new = positioned_ref(k_new, rotary.k_norm, positions, rotary)
    return rows(q, k_new, v_new, k_cache_layer, v_cache_layer, scale)


class AttendedRows:
    """Decode attention in plain torch; the cache slots of a step are computed once for all layers.

    Arguments as in :func:`append_and_attend_ref`; cache_layer: any layer's keys or values, of which only the
    shape is read. A call appends one layer's new tokens and attends; q and k_new must be rotated already.
    """

    def __init__(
        self, block_table: Tensor, positions: Tensor, cache_layer: AnyHeads, window: int | None = None
    ) -> None:
        self.inert = (positions < 0)[:, None, None]
        self.rows = (positions >= 0).nonzero()[:, 0]
        place, block_size = positions[self.rows].long(), cache_layer.shape[2]
        self.block = block_table[self.rows, place // block_size].long()
        self.slot = place % block_size
        self.held = held_slots(block_table, positions + 1, cache_layer, window)

    def __call__(
        self, q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: AnyHeads, v_cache: AnyHeads, scale: float
    ) -> Tensor:
        k_cache[self.block, :, self.slot] = k_new[self.rows]
        v_cache[self.block, :, self.slot] = v_new[self.rows]
        k, v = self.held.gather(k_cache), self.held.gather(v_cache)
        return attend(q, k, v, self.held.seen, scale).masked_fill_(self.inert, 0)


@triton.jit
def load_ahead(
    cache, rows, rotary, row, tile, exists, kv_head, shape: tl.constexpr, tiling: tl.constexpr
):  # fmt: skip
    """Load a row's position, its new token's block, cosine and sine, and the keys and values of one tile.

    None of these depends on the preceding kernel, so they can be loaded before the wait for it.

    tile: index of the tile, counted from the first that the row's window touches.
    exists: whether there is such a row; if False, position is -1, and no keys or values are loaded.
    """
    place = rows.positions + row * rows.position_stride
    position = tl.load(place, mask=exists, other=-1)
    first, first_tile, _ = span_of(position, tiling.TILE, tiling.WINDOW)
    start = (first_tile + tile) * tiling.TILE
    table_ptr = rows.table + row * rows.table_stride
    blocks = blocks_of(table_ptr, start, position, shape, tiling)
    loaded = load_seen(cache, blocks, start, first, position, kv_head, shape, tiling)
    cos, sin = load_angles(rotary, position, shape)
    block = tl.load(table_ptr + position // shape.BLOCK_SIZE, mask=position >= 0, other=0)
    return position, block, cos, sin, loaded


@triton.jit
def load_norms(rotary, shape: tl.constexpr, tiling: tl.constexpr):
    """Load the weights of the query and key norms, as pairs from :func:`load_heads`; zeros unless NORMS."""
    q_norm, k_norm = (0.0, 0.0), (0.0, 0.0)
    if tiling.NORMS:
        q_norm = load_heads(rotary.q_norm, rotary, 1, 1, shape)
        k_norm = load_heads(rotary.k_norm, rotary, 1, 1, shape)
    return q_norm, k_norm


@triton.jit
def load_whole(copied, cache, blocks, start, kv_head, shape: tl.constexpr, tiling: tl.constexpr):
    """Load a tile whose tokens are all cached, and return it as :func:`load_seen` does.

    copied: TMA descriptors of keys and values; None to load without TMA.
    """
    if copied is None:
        loaded = load_tile(cache, blocks, start, kv_head, shape, tiling)
    else:
        row = (blocks * shape.H_KV + kv_head) * shape.BLOCK_SIZE + start % shape.BLOCK_SIZE
        loaded = copied[0].load([row, 0]), copied[1].load([row, 0])
        if shape.DTYPE is not None:
            loaded = loaded + load_scales(cache, tile_slots(blocks, start, kv_head, shape, tiling), None)
    return loaded


@triton.jit
def attend_range(
    q, loaded, m_i, l_i, acc, begin, end, first, stop, copied, cache, table_ptr, kv_head, scale,
    shape: tl.constexpr, tiling: tl.constexpr,
):  # fmt: skip
    """Run the online softmax over the tiles from token ``begin`` up to ``end``, and return its new state.

    loaded: the first tile, as from :func:`load_seen`.
    m_i, l_i, acc: the state so far, in the form of :func:`no_keys`.
    begin, end: multiples of TILE; ``end`` is exclusive, and the first tile is always attended to.
    first, stop: tokens outside ``[first, stop)`` are masked; ``first`` must be less than ``begin + TILE``.
    copied: TMA descriptors of keys and values; None to load without TMA.
    """
    TILE: tl.constexpr = tiling.TILE
    limit = tl.minimum(stop, end)
    blocks = blocks_of(table_ptr, begin + TILE, limit, shape, tiling)
    if tiling.STAGES == 1:
        for start in range(begin, end, TILE):
            following = load_seen(cache, blocks, start + TILE, first, limit, kv_head, shape, tiling)
            blocks = blocks_of(table_ptr, start + 2 * TILE, limit, shape, tiling)
            seen = are_seen(start, first, stop, tiling)
            m_i, l_i, acc = attend_tile(q, loaded, seen, scale, m_i, l_i, acc, tiling)
            loaded = following
    else:
        seen = are_seen(begin, first, stop, tiling)
        m_i, l_i, acc = attend_tile(q, loaded, seen, scale, m_i, l_i, acc, tiling)
        whole = limit // TILE * TILE
        for start in tl.range(begin + TILE, whole, TILE, num_stages=tiling.STAGES):
            loaded = load_whole(copied, cache, blocks, start, kv_head, shape, tiling)
            blocks = blocks_of(table_ptr, start + TILE, limit, shape, tiling)
            m_i, l_i, acc = attend_tile(q, loaded, None, scale, m_i, l_i, acc, tiling)
        for start in tl.range(tl.maximum(whole, begin + TILE), end, TILE, num_stages=1):
            loaded = load_seen(cache, blocks, start, first, stop, kv_head, shape, tiling)
            seen = are_seen(start, first, stop, tiling)
            m_i, l_i, acc = attend_tile(q, loaded, seen, scale, m_i, l_i, acc, tiling)
    return m_i, l_i, acc


@triton.jit
def append_new(
    q, keys, v_new, ahead, norm, cache, rotary, kv_head, scale, shape: tl.constexpr, tiling: tl.constexpr
):  # fmt: skip
    """Store the new token's key and value; return the queries' scores with the key, and the value.

    Nothing is stored for an inert row. A quantised cache quantises both. keys and norm: pairs from
    :func:`load_heads`. The scores are ``[HEADS]``, the value ``[1, D]``.
    """
    position, block, cos, sin, _ = ahead
    D: tl.constexpr = shape.D_PADDED
    k_new = positioned(keys, norm, rotary, cos, sin, tiling.NORMS, shape)
    if shape.DTYPE is None:
        if position >= 0:
            k_row, v_row = tl.reshape(k_new, (D,)), tl.reshape(v_new, (D,))
            store_token(cache, block, position, kv_head, k_row, v_row, shape)
    else:
        slots = head_slot(block, position % shape.BLOCK_SIZE, kv_head, shape) + tl.arange(0, 1)
        k_new, v_new = store_quantized(cache, slots, position + tl.arange(0, 1) >= 0, k_new, v_new, shape)
    return tl.sum(q.to(tl.float32) * k_new.to(tl.float32), axis=1) * scale, v_new


@triton.jit
def load_new(ptr, rotary, count, new, cache, ROWS: tl.constexpr, shape: tl.constexpr):
    """Load heads as :func:`load_heads` does; partial sums are added up, and rounded to the model's dtype."""
    PARTS: tl.constexpr = shape.PARTS
    heads, swapped = load_heads(ptr, rotary, count, ROWS, shape)
    for part in tl.static_range(1, PARTS):
        more, more_swapped = load_heads(ptr + part * new.part_stride, rotary, count, ROWS, shape)
        heads += more
        swapped += more_swapped
    dtype: tl.constexpr = cache.k.dtype.element_ty if shape.DTYPE is None else shape.DTYPE
    return heads.to(dtype), swapped.to(dtype)


@triton.jit
def load_and_append(
    ahead, norms, new, cache, rotary, row, tile, kv_head, scale, shape: tl.constexpr, tiling: tl.constexpr
):  # fmt: skip
    """Load and rotate the queries of one KV head; if ``tile`` is 0, also append the new token to the cache.

    Returns the queries ``[M, D]``, as :func:`operands` does, their scores with the new key ``[M]``, and the
    new value ``[1, D]``. If ``tile`` is not 0, the scores are -inf and the value is 0. All loads of q, k and
    v are issued before any is used.
    """
    HEADS: tl.constexpr = tiling.HEADS
    _, _, cos, sin, _ = ahead
    n_new = tl.where(tile == 0, 1, 0)
    kv_place = row * new.kv_stride + kv_head * shape.D
    q_ptr = new.q + row * new.q_stride + kv_head * shape.GROUP * shape.D
    queries = load_new(q_ptr, rotary, shape.GROUP, new, cache, HEADS, shape)
    keys = load_new(new.k + kv_place, rotary, n_new, new, cache, 1, shape)
    v_new, _ = load_new(new.v + kv_place, None, n_new, new, cache, 1, shape)
    v_new = v_new.to(tl.float32)
    q = positioned(queries, norms[0], rotary, cos, sin, tiling.NORMS, shape)  # [HEADS, D]
    score = tl.full((HEADS,), float("-inf"), tl.float32)
    if tile == 0:
        score, v_new = append_new(
            q, keys, v_new, ahead, norms[1], cache, rotary, kv_head, scale, shape, tiling
        )
    if HEADS < tiling.M:
        q = repeated(q, tiling.M)
        score = tl.reshape(repeated(score[:, None], tiling.M), (tiling.M,))
    return operands(q, tiling), score, v_new


@triton.jit
def attend_part(
    ahead, norms, new, copied, cache, rows, rotary, row, tile, n_tiles, kv_head, scale,
    shape: tl.constexpr, tiling: tl.constexpr,
):  # fmt: skip
    """Attend to ``n_tiles`` tiles of a row, starting with ``tile``, and to the new token if ``tile`` is 0.

    ahead and norms: the results of :func:`load_ahead` and :func:`load_norms`. Returns the softmax state:
    maxima ``[M]``, sums of weights ``[M]`` and weighted sums of values ``[M, D]``.
    """
    TILE: tl.constexpr = tiling.TILE
    position, _, _, _, loaded = ahead
    q, score, v_new = load_and_append(
        ahead, norms, new, cache, rotary, row, tile, kv_head, scale, shape, tiling
    )
    table_ptr = rows.table + row * rows.table_stride
    m_i, l_i, acc = no_keys(shape, tiling)
    EARLY: tl.constexpr = tiling.DOT is None and not tiling.LANES  # the new token first saves registers
    if EARLY:
        m_i, l_i, acc = with_new(score, v_new, m_i, l_i, acc)
    first, first_tile, _ = span_of(position, TILE, tiling.WINDOW)
    begin = (first_tile + tile) * TILE
    end = begin + n_tiles * TILE
    m_i, l_i, acc = attend_range(
        q, loaded, m_i, l_i, acc, begin, end, first, position, copied, cache, table_ptr, kv_head, scale,
        shape, tiling,
    )  # fmt: skip
    if not EARLY:
        m_i, l_i, acc = gathered(m_i, l_i, acc, tiling)
        m_i, l_i, acc = with_new(score, v_new, m_i, l_i, acc)
    return m_i, l_i, acc


@triton.jit
def attend_row(
    out_ptr, new, copied, cache, rows, rotary, order_ptr, scale,
    shape: tl.constexpr, tiling: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attend with one KV head's queries to a whole row per program, and store the output.

    order_ptr: ``Plan.order``. The output of an inert row is 0.
    """
    row = tl.program_id(0).to(tl.int64)
    if order_ptr is not None:
        row = tl.load(order_ptr + row).to(tl.int64)
    kv_head = tl.program_id(1)
    ahead = load_ahead(cache, rows, rotary, row, 0, True, kv_head, shape, tiling)
    norms = load_norms(rotary, shape, tiling)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    _, _, n_tiles = span_of(ahead[0], tiling.TILE, tiling.WINDOW)
    m_i, l_i, acc = attend_part(
        ahead, norms, new, copied, cache, rows, rotary, row, 0, n_tiles, kv_head, scale, shape, tiling
    )
    out = tl.where(ahead[0] >= 0, acc / l_i[:, None], 0.0)
    store_heads(out_ptr, row, kv_head, out, shape, tiling.M)


@triton.jit
def attend_piece(
    out_ptr, partial, new, copied, cache, rows, rotary, starts_ptr, scale,
    shape: tl.constexpr, tiling: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attend with one KV head's queries to one piece per program, row by row.

    If the piece contains a whole row, the row's output is stored; otherwise, a partial result is stored.
    starts_ptr: ``Plan.starts``.
    """
    piece = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.load(starts_ptr + 2 * piece).to(tl.int64)
    tile = tl.load(starts_ptr + 2 * piece + 1)
    last_row = tl.load(starts_ptr + 2 * piece + 2)
    last_tile = tl.load(starts_ptr + 2 * piece + 3)
    is_empty = (row == last_row) & (tile == last_tile)
    stop_row = tl.where(is_empty | (last_tile == 0), last_row, last_row + 1)
    ahead = load_ahead(cache, rows, rotary, row, tile, row < stop_row, kv_head, shape, tiling)
    norms = load_norms(rotary, shape, tiling)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    for _ in range(row.to(tl.int32), stop_row):
        position = ahead[0]
        _, _, in_row = span_of(position, tiling.TILE, tiling.WINDOW)
        stop_tile = tl.where(row == last_row, last_tile, in_row)
        m_i, l_i, acc = attend_part(
            ahead, norms, new, copied, cache, rows, rotary, row, tile, stop_tile - tile, kv_head, scale,
            shape, tiling,
        )  # fmt: skip
        if (tile == 0) & (stop_tile == in_row):
            out = tl.where(position >= 0, acc / l_i[:, None], 0.0)
            store_heads(out_ptr, row, kv_head, out, shape, tiling.M)
        else:
            store_partial(partial, piece + row, kv_head, m_i, l_i, acc, shape, tiling.M)
        row += 1
        tile = 0
        ahead = load_ahead(cache, rows, rotary, row, tile, row < stop_row, kv_head, shape, tiling)


@triton.jit
def _decode_attention_kernel(
    out_ptr, partial, new, k_copied, v_copied, cache, rows, rotary, starts_ptr, order_ptr, scale,
    shape: tl.constexpr, tiling: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attend with one KV head's queries to one piece per program.

    The first tile is loaded before the kernel waits for q, k and v.

    k_copied, v_copied: TMA descriptors of keys and values, or None.
    starts_ptr: ``Plan.starts``; None if each row is one piece.
    order_ptr: ``Plan.order``.
    """
    copied = None if k_copied is None else (k_copied, v_copied)
    if starts_ptr is None:
        attend_row(out_ptr, new, copied, cache, rows, rotary, order_ptr, scale, shape, tiling, DEPENDENT)
    else:
        attend_piece(
            out_ptr, partial, new, copied, cache, rows, rotary, starts_ptr, scale, shape, tiling, DEPENDENT
        )  # fmt: skip


def append_and_attend(
    *, q, k_new, v_new, k_cache_layer, v_cache_layer, block_table, positions, scale, rotary=None, window=None,
    plan, dependent: int = False,
) -> Tensor:  # fmt: skip
    """Rotate, append and attend as :func:`append_and_attend_ref` does, in one Triton kernel or two.

    q, k_new, v_new: slices of one fused projection, with a common row stride and contiguous ``[H, D]``.
    k_cache_layer, v_cache_layer: contiguous.
    block_table, positions: rows may be strided; each row of the table is contiguous.
    plan: required; if it splits rows, a second kernel combines their partial results. Raises ``OptionError``
        if its window is not ``window``.
    dependent: the launch mode, as in ``launch_options``.

    plan, positions and block_table must have been written at least two kernels earlier. For KV heads with
    several query heads, GEMMs run on tensor cores in fp16 and bf16, and in full precision in fp32; the
    softmax is always fp32.
    """
    _check(plan, window)
    variant = plan.variant
    out = torch.empty(*q.shape[-3:], dtype=k_cache_layer.dtype, device=k_cache_layer.device)
    if variant.ring:
        ring_attend(
            out=out, q=q, k_new=k_new, v_new=v_new, k_cache_layer=k_cache_layer, v_cache_layer=v_cache_layer,
            block_table=block_table, positions=positions, scale=scale, rotary=rotary, window=window,
            tile=variant.tile, stages=variant.stages, dependent=dependent,
        )  # fmt: skip
        return out
    batch, group = len(out), out.shape[1] // k_new.shape[-2]
    tiling = _tiling(variant, window, group, k_cache_layer, rotary)
    smallest = 1 if tiling.DOT is None else SMALLEST_DOT if tiling.PAIRS is None else 2 * SMALLEST_DOT
    new, cache, shape = layer_arguments(q, k_new, v_new, k_cache_layer, v_cache_layer, smallest)
    rows = rows_of(block_table, positions)
    partial = new_partial(out, variant.pieces + batch) if variant.combine else None
    _decode_attention_kernel[(variant.pieces or batch, shape.H_KV)](
        out, partial, new, *described(cache, shape, tiling), cache, rows, pointers(rotary), plan.starts,
        plan.order, scale * LOG2_E, shape, tiling,
        num_warps=variant.warps, num_stages=variant.stages, **launch_options(dependent),
    )  # fmt: skip
    if partial is not None:
        combine(out, partial, plan, dependent=dependent)
    return out


def _check(plan: Plan, window: int | None) -> None:
    if plan.window != window:
        raise OptionError(f"the plan is for window {plan.window}, but attention has window {window}")


def _tiling(
    variant: Variant, window: int | None, group: int, cache_layer: AnyHeads, rotary: Rotary | None
) -> Tiling:
    window, norms = window or 0, rotary is not None and rotary.q_norm is not None
    scaled = isinstance(cache_layer, QuantizedHeads)
    if group == 1 and not variant.dot:
        return Tiling(variant.tile, window, 1, 1, variant.stages, None, norms, bool(variant.lanes), scaled)
    heads = next_power_of_2(group)
    rows, dot = max(SMALLEST_DOT, heads), dot_dtype(cache_layer)
    tiling = Tiling(variant.tile, window, rows, heads, variant.stages, dot, norms, False, scaled)
    if not isinstance(cache_layer, QuantizedHeads) or tl.float32 == dot:
        return tiling
    if cache_layer.form == "int8":
        return tiling._replace(PAIRS=tl.int8)
    return tiling._replace(PAIRS=tl.float8e4nv, K_UP=UP if tl.bfloat16 == dot else 1.0, V_UP=UP)


def described(cache: PagedCache, shape: AttentionShape, tiling: Tiling):
    """Return TMA descriptors of keys and values, or (None, None) if TMA cannot be used."""
    in_block = tiling.DOT is not None and shape.BLOCK_SIZE % tiling.TILE == 0
    is_wide = cache.k.dtype == torch.float32 or tl.float32 == shape.DTYPE
    if not in_block or tiling.STAGES == 1 or shape.D != shape.D_PADDED or is_wide:
        return None, None
    return described_rows(cache, tiling.TILE, tiling.PAIRS is not None)


def pointers(rotary: Rotary | None) -> Rotary | None:
    """Return ``rotary`` with placeholders for missing norm weights: Triton requires tensors in all fields."""
    if rotary is None or rotary.q_norm is not None:
        return rotary
    return rotary._replace(q_norm=rotary.cos_sin, k_norm=rotary.cos_sin)
