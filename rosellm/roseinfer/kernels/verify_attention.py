"""Decode attention of several consecutive new tokens per row, which reads the row's cache only once.

The verify rows of a state row (:mod:`speculation`) attend to its cached keys and, causally, to each other's;
their live keys and values are appended to the cache. It is the kernel of :mod:`attention` with the queries of
all verify rows in one tile, and the new keys in another.
"""

from __future__ import annotations

from torch import Tensor

from rosellm.models.rope import Rotary
from rosellm.roseinfer.kernels.attention import (
    append_and_attend_ref,
    attend_range,
    described,
    load_ahead,
    load_norms,
    pointers,
)
from rosellm.roseinfer.kernels.attention_plan import MIDDLE, SHORT, Plan, Variant, span_of
from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.roseinfer.kernels.online_softmax import Tiling, combine, gathered, new_partial, no_keys
from rosellm.roseinfer.kernels.paged_cache import (
    LOG2_E,
    SMALLEST_DOT,
    dot_dtype,
    layer_arguments,
    rows_of,
    slot_offset,
)
from rosellm.roseinfer.kernels.rotary import load_angles, positioned
from rosellm.triton_or_none import next_power_of_2, tl, triton

ROLES = {"_verify_attention_kernel": "attention"}
FILLED = 0.75  # of the shared memory, by two stages of keys and values, queries and weights


def fastest_variant(
    rows: int,
    kv_heads: int,
    longest: int,
    num_sms: int,
    queries: int,
    head_dim: int,
    itemsize: int,
    shared_bytes: int,
) -> Variant:
    """Return a variant that is fastest on an H200 with 8 verify rows per state row, or nearly so.

    rows, kv_heads, longest, num_sms: as in ``attention_plan.variant_for``.
    queries: query heads of a KV head, of all verify rows of a state row.
    itemsize: bytes of a number in the cache.
    shared_bytes: shared memory of a program.

    Short rows stay whole; others are split into pieces, two programs per SM. Tiles become smaller until they
    fit into shared memory.
    """
    reach = next_power_of_2(max(longest, 1))
    is_whole = reach <= SHORT or (rows > 2 and reach <= MIDDLE)
    tile = 64 if reach <= SHORT else 128 if is_whole else 64 if rows > 2 else 32 if reach > MIDDLE else 16
    d, m = next_power_of_2(head_dim), max(SMALLEST_DOT, next_power_of_2(queries))
    while tile > SMALLEST_DOT and itemsize * (4 * tile * d + m * d + m * tile) > FILLED * shared_bytes:
        tile //= 2
    if is_whole:
        return Variant(tile, warps=8, stages=2)
    pieces = min(max(1, 2 * num_sms // kv_heads), rows * reach // tile)
    return Variant(tile, pieces, 4, 2 if rows > 2 else 1)


def verify_attention_ref(
    *, q, k_new, v_new, k_cache_layer, v_cache_layer, block_table, positions, verified_positions, scale,
    rotary: Rotary | None = None, plan: Plan | None = None,
) -> Tensor:  # fmt: skip
    """Rotate, append and attend, one verify row of each state row after another (torch reference).

    q: ``[R * P, H, D]``, or partial sums as in ``append_and_attend_ref``; the P verify rows of a state row
        are adjacent.
    k_new, v_new: ``[R * P, H_kv, D]``, or partial sums.
    block_table, positions: of the R state rows, as in ``append_and_attend_ref``.
    verified_positions: ``[R * P]``, negative for inert verify rows, which come last; their outputs are
        undefined.
    plan: ignored.

    Returns ``[R * P, H, D]``.
    """
    n_places = len(verified_positions) // len(positions)
    out = k_cache_layer.new_zeros(q.shape[-3:])
    for place in range(n_places):
        own = slice(place, None, n_places)
        new = (x[..., own, :, :] for x in (q, k_new, v_new))
        named = dict(zip(("q", "k_new", "v_new"), new, strict=True))
        caches = {"k_cache_layer": k_cache_layer, "v_cache_layer": v_cache_layer}
        rows = {"block_table": block_table, "positions": verified_positions[own]}
        out[own] = append_and_attend_ref(**named, **caches, **rows, scale=scale, rotary=rotary)
    return out


@triton.jit
def _load_rows(
    ptr, place, inside, positions, norm, new, cache, rotary, shape: tl.constexpr, tiling: tl.constexpr
):  # fmt: skip
    """Load heads at offsets ``place [R]``, where ``inside``; add up partial sums, normalise and rotate."""
    PARTS: tl.constexpr = shape.PARTS
    d = tl.arange(0, shape.D_PADDED)[None, :]
    mask = inside[:, None] & (d < shape.D)
    at = ptr + place[:, None] + d
    across = ptr + place[:, None] + (d + shape.D // 2) % shape.D
    heads = tl.load(at, mask=mask, other=0.0)
    swapped = heads
    if rotary is not None:
        swapped = tl.load(across, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        heads += tl.load(at + part * new.part_stride, mask=mask, other=0.0)
        if rotary is not None:
            swapped += tl.load(across + part * new.part_stride, mask=mask, other=0.0)
    dtype: tl.constexpr = cache.k.dtype.element_ty
    cos, sin = load_angles(rotary, positions[:, None], shape)
    pair = heads.to(dtype), swapped.to(dtype)
    return positioned(pair, norm, rotary, cos, sin, tiling.NORMS, shape)


@triton.jit
def _append_rows(
    new, norms, cache, table_ptr, verified, rotary, row, kv_head, tile,
    PLACES: tl.constexpr, NEW: tl.constexpr, shape: tl.constexpr, tiling: tl.constexpr,
):  # fmt: skip
    """Append the live verify rows' keys and values, if ``tile`` is 0.

    Returns keys and values ``[NEW, D]``, and which are live: none in other pieces.
    """
    i = tl.arange(0, NEW)
    first = row * PLACES
    placed = verified.positions + (first + i) * verified.position_stride
    places = tl.load(placed, mask=i < tl.where(tile == 0, PLACES, 0), other=-1)
    live = places >= 0
    offset = (first + i) * new.kv_stride + kv_head * shape.D
    k = _load_rows(new.k, offset, live, places, norms[1], new, cache, rotary, shape, tiling)
    d = tl.arange(0, shape.D_PADDED)[None, :]
    mask = live[:, None] & (d < shape.D)
    v = tl.load(new.v + offset[:, None] + d, mask=mask, other=0.0)
    PARTS: tl.constexpr = shape.PARTS
    for part in tl.static_range(1, PARTS):
        v += tl.load(new.v + part * new.part_stride + offset[:, None] + d, mask=mask, other=0.0)
    v = v.to(cache.v.dtype.element_ty)
    block = tl.load(table_ptr + places // shape.BLOCK_SIZE, mask=live, other=0)
    slot = slot_offset(cache, block, places % shape.BLOCK_SIZE, kv_head, shape)[:, None] + d
    tl.store(cache.k + slot, k, mask=mask)
    tl.store(cache.v + slot, v, mask=mask)
    return k, v, live


@triton.jit
def _finite(x):
    """Return x with 0 for infinities and NaN: a refused draft's value, times a weight of 0, must be 0."""
    return tl.where(x - x == 0, x, 0.0)


@triton.jit
def _verify_part(
    ahead, norms, new, copied, cache, rows, verified, rotary, row, tile, n_tiles, kv_head, scale,
    PLACES: tl.constexpr, NEW: tl.constexpr, shape: tl.constexpr, tiling: tl.constexpr,
):  # fmt: skip
    """Attend to ``n_tiles`` tiles of a row, starting with ``tile``, and to the new tokens if ``tile`` is 0.

    Returns the softmax state: maxima ``[M]``, sums of weights ``[M]`` and weighted sums of values ``[M, D]``.
    """
    DOT: tl.constexpr = tiling.DOT
    position, _, _, _, k, v = ahead
    table_ptr = rows.table + row * rows.table_stride
    m = tl.arange(0, tiling.M)
    place = m // shape.GROUP
    offset = (row * PLACES + place) * new.q_stride + (kv_head * shape.GROUP + m % shape.GROUP) * shape.D
    inside = m < shape.GROUP * PLACES
    placed = verified.positions + (row * PLACES + place) * verified.position_stride
    places = tl.load(placed, mask=inside, other=-1)
    q = _load_rows(new.q, offset, inside, places, norms[0], new, cache, rotary, shape, tiling).to(DOT)
    k_new, v_new, live = _append_rows(
        new, norms, cache, table_ptr, verified, rotary, row, kv_head, tile, PLACES, NEW, shape, tiling
    )  # fmt: skip
    m_i, l_i, acc = no_keys(shape, tiling)
    begin = tile * tiling.TILE
    end = begin + n_tiles * tiling.TILE
    m_i, l_i, acc = attend_range(
        q, k, v, m_i, l_i, acc, begin, end, 0, position, copied, cache, table_ptr, kv_head, scale,
        shape, tiling,
    )  # fmt: skip
    m_i, l_i, acc = gathered(m_i, l_i, acc, tiling)
    if tile == 0:
        seen = live[None, :] & (tl.arange(0, NEW)[None, :] <= place[:, None])
        scores = tl.dot(q, tl.trans(k_new.to(DOT)), input_precision="ieee") * scale  # [M, NEW]
        scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(m_i, tl.max(scores, axis=1))
        p = tl.exp2(scores - highest[:, None])
        alpha = tl.exp2(m_i - highest)
        acc = tl.dot(p.to(DOT), _finite(v_new).to(DOT), acc * alpha[:, None], input_precision="ieee")
        spoilt = seen & (tl.sum(v_new.to(tl.float32) * 0, axis=1) != 0)[None, :]
        acc += tl.where(tl.max(spoilt.to(tl.int32), axis=1) > 0, float("nan"), 0.0)[:, None]
        l_i = l_i * alpha + tl.sum(p, axis=1)
        m_i = highest
    return m_i, l_i, acc


@triton.jit
def _verify_attention_kernel(
    out_ptr, partial, new, k_copied, v_copied, cache, rows, verified, rotary, starts_ptr, scale,
    PLACES: tl.constexpr, NEW: tl.constexpr, shape: tl.constexpr, tiling: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attend with the queries of one KV head of all verify rows, to one piece of the state rows per program.

    The first tile is loaded before the kernel waits for q, k and v.

    starts_ptr: ``Plan.starts``; None if each row is one piece.
    """
    copied = None if k_copied is None else (k_copied, v_copied)
    piece = tl.program_id(0)
    kv_head = tl.program_id(1)
    row, tile = piece.to(tl.int64), piece * 0
    last_row, last_tile, stop_row = row + 1, piece * 0, row + 1
    if starts_ptr is not None:
        row = tl.load(starts_ptr + 2 * piece).to(tl.int64)
        tile = tl.load(starts_ptr + 2 * piece + 1)
        last_row = tl.load(starts_ptr + 2 * piece + 2).to(tl.int64)
        last_tile = tl.load(starts_ptr + 2 * piece + 3)
        is_empty = (row == last_row) & (tile == last_tile)
        stop_row = tl.where(is_empty | (last_tile == 0), last_row, last_row + 1)
    ahead = load_ahead(cache, rows, rotary, row, tile, row < stop_row, kv_head, shape, tiling)
    norms = load_norms(rotary, shape, tiling)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    m = tl.arange(0, tiling.M)
    d = tl.arange(0, shape.D_PADDED)[None, :]
    inside = m < shape.GROUP * PLACES
    head = m // shape.GROUP * shape.H + kv_head * shape.GROUP + m % shape.GROUP  # of PLACES * H
    for _ in range(row.to(tl.int32), stop_row.to(tl.int32)):
        position = ahead[0]
        _, _, in_row = span_of(position, tiling.TILE, 0)
        stop_tile = tl.where(row == last_row, last_tile, in_row)
        m_i, l_i, acc = _verify_part(
            ahead, norms, new, copied, cache, rows, verified, rotary, row, tile, stop_tile - tile,
            kv_head, scale, PLACES, NEW, shape, tiling,
        )  # fmt: skip
        if (tile == 0) & (stop_tile == in_row):
            out = tl.where(position >= 0, acc / l_i[:, None], 0.0)
            target = out_ptr + (row * PLACES * shape.H + head)[:, None] * shape.D + d
            tl.store(target, out.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (d < shape.D))
        elif partial is not None:
            part = (piece + row) * PLACES * shape.H + head
            tl.store(partial.m_i + part, m_i, mask=inside)
            tl.store(partial.l_i + part, l_i, mask=inside)
            tl.store(partial.acc + part[:, None] * shape.D + d, acc, mask=inside[:, None] & (d < shape.D))
        row += 1
        tile = 0
        ahead = load_ahead(cache, rows, rotary, row, tile, row < stop_row, kv_head, shape, tiling)


def verify_attention(
    *, q, k_new, v_new, k_cache_layer, v_cache_layer, block_table, positions, verified_positions, scale,
    rotary=None, plan: Plan, dependent: int = False,
) -> Tensor:  # fmt: skip
    """Rotate, append and attend as :func:`verify_attention_ref` does, in one Triton kernel or two.

    Arguments as in ``attention.append_and_attend``; the plan is that of the state rows, without a window, and
    with ``dot`` for KV heads with a single query head. GEMMs run on tensor cores in fp16 and bf16.
    """
    variant, out = plan.variant, k_cache_layer.new_empty(q.shape[-3:])
    rows, n_heads = len(positions), out.shape[1]
    n_places = len(out) // rows
    new, cache, shape = layer_arguments(q, k_new, v_new, k_cache_layer, v_cache_layer, SMALLEST_DOT)
    queries = max(SMALLEST_DOT, next_power_of_2(shape.GROUP * n_places))
    norms = rotary is not None and rotary.q_norm is not None
    dot = dot_dtype(k_cache_layer)
    tiling = Tiling(variant.tile, 0, queries, queries, variant.stages, dot, norms, False)
    by_row = out.view(rows, n_places * n_heads, -1)
    partial = new_partial(by_row, variant.pieces + rows) if variant.combine else None
    _verify_attention_kernel[(variant.pieces or rows, shape.H_KV)](
        out, partial, new, *described(cache, shape, tiling), cache, rows_of(block_table, positions),
        rows_of(block_table, verified_positions), pointers(rotary), plan.starts, scale * LOG2_E, n_places,
        max(SMALLEST_DOT, next_power_of_2(n_places)), shape, tiling,
        num_warps=max(variant.warps, 4), num_stages=variant.stages, **launch_options(dependent),
    )  # fmt: skip
    if partial is not None:
        combine(by_row, partial, plan, dependent=dependent)
    return out
