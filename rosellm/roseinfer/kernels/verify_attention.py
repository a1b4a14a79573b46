"""Decode attention of several consecutive new tokens per row, for Hopper GPUs: a row's cache is read once.

The verify rows of a state row (:mod:`speculation`) attend to its cached keys and, causally, to each other;
their live keys and values are appended to the cache. As in :mod:`ring_attention`, copies of keys and values
start before the queries are ready. The queries of all verify rows form one tile; the new keys and values take
one more box in shared memory. A row may be split into pieces, one per program; the last has the new tokens.
"""

from __future__ import annotations

from torch import Tensor

from rosellm.models.rope import Rotary
from rosellm.roseinfer.kernels.attention import append_and_attend_ref
from rosellm.roseinfer.kernels.attention_plan import MIDDLE, Plan, Variant
from rosellm.roseinfer.kernels.dependent_launch import launch_options
from rosellm.roseinfer.kernels.online_softmax import combine, new_partial
from rosellm.roseinfer.kernels.paged_cache import LOG2_E, layer_arguments, rows_of
from rosellm.roseinfer.kernels.ring import griddepcontrol, mbarrier
from rosellm.roseinfer.kernels.ring_attention import (
    BOX,
    added,
    all_of,
    attend_tiles,
    blocks_of,
    clear,
    described_boxes,
    load_parts,
    mask_boxes,
    places_of,
    pointers,
    start_row,
    start_scores,
    start_tile,
    weigh_boxes,
)
from rosellm.triton_or_none import gl, gluon, hopper, next_power_of_2

ROLES = {"_verify_attention_kernel": "attention"}
MOST_QUERIES = 64  # of a program


def takes(queries: int, head_dim: int, block_size: int) -> bool:
    """Return whether the kernel can attend with these sizes.

    queries: query heads of a KV head, of all verify rows of a state row.
    """
    return queries <= MOST_QUERIES and head_dim in (64, 128) and block_size % BOX == 0


def fastest_variant(
    rows: int, kv_heads: int, longest: int, num_sms: int, queries: int, head_dim: int
) -> Variant:
    """Return the variant that is fastest on an H200, or nearly so.

    rows, kv_heads, longest, num_sms: as in ``attention_plan.variant_for``.
    queries: as in :func:`takes`.

    Long rows are split so that there is about one program per SM.
    """
    pieces = num_sms // (rows * kv_heads)
    is_split = longest > MIDDLE and pieces > 1
    tile, stages = (2 * BOX, 2) if head_dim <= 64 else (BOX, 3 if rows * kv_heads <= num_sms else 2)
    warps = 4 if queries <= 32 else 8
    return Variant(tile, rows * pieces if is_split else 0, warps, stages)


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


@gluon.jit
def _load_positions(verified, row, place, count, PLACES: gl.constexpr):
    """Load the positions of a row's verify rows ``place``; -1 from the ``count``-th on."""
    at = verified.positions + (row * PLACES + place) * verified.position_stride
    return gl.load(at, mask=place < count, other=-1)


@gluon.jit
def _load_angles(rotary, position, d, D: gl.constexpr):
    """Return cosines and sines ``[R, D / 2]`` of positions ``[R]``."""
    place = rotary.cos_sin + gl.maximum(position, 0).to(gl.int64)[:, None] * D + d
    return gl.load(place), gl.load(place + D // 2)


@gluon.jit
def _load_norm(ptr, d, D: gl.constexpr):
    """Return both halves of a norm's weights."""
    return gl.load(ptr + d).to(gl.float32), gl.load(ptr + D // 2 + d).to(gl.float32)


@gluon.jit
def _load_halves(ptr, d, mask, new, D: gl.constexpr, PARTS: gl.constexpr):
    """Load both halves of heads: the partial sums of each, as tuples."""
    first = load_parts(ptr + d, mask, new.part_stride, PARTS)
    return first, load_parts(ptr + D // 2 + d, mask, new.part_stride, PARTS)


@gluon.jit
def _positioned(halves, norm, angles, eps, dtype: gl.constexpr, ROTARY: gl.constexpr, NORMS: gl.constexpr):
    """Return both halves ``[R, D / 2]`` of heads after norm and rotation, as ``rotary.positioned`` does."""
    x, y = added(halves[0], dtype), added(halves[1], dtype)
    if ROTARY:
        x, y = x.to(gl.float32), y.to(gl.float32)
        if NORMS:
            unit = gl.rsqrt(gl.sum(x * x + y * y, axis=1) / (2 * x.shape[1]) + eps)[:, None]
            x = x * unit * norm[0]
            y = y * unit * norm[1]
        x, y = (x * angles[0] - y * angles[1]).to(dtype), (y * angles[0] + x * angles[1]).to(dtype)
    return x, y


@gluon.jit
def _joined(halves):
    """Return heads ``[R, D]`` from their halves."""
    both = gl.permute(gl.join(halves[0], halves[1]), (0, 2, 1))
    return gl.reshape(both, (both.shape[0], 2 * both.shape[2]))


@gluon.jit
def _hold_new(k, v, keys, values, NEW: gl.constexpr):
    """Write new keys and values ``[NEW, D]`` to a box.

    A value that is not finite is 0 in the box, and its token's key NaN. Otherwise a refused draft's value,
    times a weight of 0, would give NaN for the tokens before it.
    """
    zero = v.to(gl.float32) * 0.0
    keys.slice(0, NEW).store(k + gl.sum(zero, axis=1)[:, None].to(k.dtype))
    values.slice(0, NEW).store(gl.where(zero == 0.0, v, gl.zeros_like(v)))


@gluon.jit
def _append(cache, slot, k, v, mask, D: gl.constexpr):
    """Store both halves of new keys and values in the cache."""
    for half in gl.static_range(2):
        gl.store(cache.k + slot + half * (D // 2), k[half], mask=mask)
        gl.store(cache.v + slot + half * (D // 2), v[half], mask=mask)


@gluon.jit
def _attend_first_tile(
    keys, values, queries, weights, live, n_boxes, first_box, position, scale, GROUP: gl.constexpr,
    BOXES: gl.constexpr, OWN: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Return the state of the online softmax, as in ``weigh_boxes``, after the first tile and the new tokens.

    live: which tokens of the box in place ``OWN`` are new, ``[BOX]``.
    """
    BOX: gl.constexpr = keys.shape[1]
    WIDTH: gl.constexpr = keys.shape[2]
    HEADS: gl.constexpr = queries.shape[0]
    at = places_of(0, 0, n_boxes, BOXES)
    at = at + (OWN,)
    scores = all_of(start_scores(keys, queries, at, layout))
    masked = mask_boxes(scores[:BOXES], 0, n_boxes, first_box, 0, position, scale, 0, layout)
    place = gl.arange(0, HEADS, layout=gl.SliceLayout(0, layout)) // GROUP
    token = gl.arange(0, BOX, layout=gl.SliceLayout(1, layout))
    attended = live[:, None] & (token[:, None] <= place[None, :])
    masked = masked + (gl.where(attended, scores[BOXES] * scale, float("-inf")),)
    zeros = gl.zeros([HEADS], gl.float32, gl.SliceLayout(0, layout))
    sums, acc = gl.zeros((BOX, HEADS), gl.float32, layout), gl.zeros((WIDTH, HEADS), gl.float32, layout)
    state = zeros - 1.0e30, sums, zeros, acc  # below every score, but finite: -inf - -inf would be NaN
    return weigh_boxes(state, masked, values, weights, at)


@gluon.jit
def _store(
    out_ptr, partial, state, position, part, kv_head, shape: gl.constexpr, PLACES: gl.constexpr,
    HEADS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Store the attention of one KV head's queries, or a partial result; the attention of an inert row is 0.

    part: the row, or the index of the partial result.
    """
    GROUP: gl.constexpr = shape.GROUP
    D: gl.constexpr = shape.D
    most, sums, _, acc = state
    sums = gl.where(position >= 0, gl.sum(sums, axis=0), 1.0)
    h = gl.arange(0, HEADS, layout=gl.SliceLayout(0, layout))
    i = gl.arange(0, D, layout=gl.SliceLayout(1, layout))
    head = (part * PLACES + h // GROUP) * shape.H + kv_head * GROUP + h % GROUP
    inside = h < GROUP * PLACES
    if partial is None:
        acc = (acc / sums[None, :]).to(out_ptr.dtype.element_ty)
    else:
        gl.store(partial.m_i + head, most, mask=inside)
        gl.store(partial.l_i + head, sums, mask=inside)
        out_ptr = partial.acc
    gl.store(out_ptr + head[None, :] * D + i[:, None], acc, mask=inside[None, :])


@gluon.jit
def _verify_attention_kernel(
    out_ptr, partial, new, k_desc, v_desc, cache, rows, verified, rotary, scale, shape: gl.constexpr,
    PLACES: gl.constexpr, HEADS: gl.constexpr, NEW: gl.constexpr, PIECES: gl.constexpr, BOXES: gl.constexpr,
    STAGES: gl.constexpr, ROTARY: gl.constexpr, NORMS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Attend with one KV head's queries, of all verify rows of a row, to one piece of the row per program.

    A tile is BOXES boxes. The box after those of the stages has the new tokens.
    """
    BOX: gl.constexpr = 64
    H_KV: gl.constexpr = shape.H_KV
    GROUP: gl.constexpr = shape.GROUP
    D: gl.constexpr = shape.D
    BLOCK_SIZE: gl.constexpr = shape.BLOCK_SIZE
    PARTS: gl.constexpr = shape.PARTS
    OWN: gl.constexpr = STAGES * BOXES
    warps: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = k_desc.dtype
    halves: gl.constexpr = gl.BlockedLayout([1, D // 32], [2, 16], [warps, 1], [1, 0])
    box_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [warps, 1], [1, 0])
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, warps // 4], instr_shape=[16, HEADS // (warps // 4), 16]
    )
    keys = gl.allocate_shared_memory(dtype, [OWN + 1, BOX, D], k_desc.layout)
    values = gl.allocate_shared_memory(dtype, [OWN + 1, BOX, D], v_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    row, kv_head = (gl.program_id(0) // PIECES).to(gl.int64), gl.program_id(1)
    piece = gl.program_id(0) % PIECES
    position = gl.load(rows.positions + row * rows.position_stride)
    m = gl.arange(0, HEADS, layout=gl.SliceLayout(1, halves))
    j = gl.arange(0, NEW, layout=gl.SliceLayout(1, halves))
    token = gl.arange(0, BOX, layout=gl.SliceLayout(1, layout))
    n_new = gl.where(piece == PIECES - 1, PLACES, 0)
    asked = _load_positions(verified, row, m // GROUP, PLACES, PLACES)
    appended = _load_positions(verified, row, j, n_new, PLACES)
    live = _load_positions(verified, row, token, n_new, PLACES) >= 0
    table_ptr = rows.table + row * rows.table_stride
    all_boxes = gl.maximum((position + BOX - 1) // BOX, 0)
    most_boxes = (all_boxes + PIECES - 1) // PIECES
    first_box = piece * most_boxes
    n_boxes = gl.maximum(gl.minimum(all_boxes - first_box, most_boxes), 0)
    blocks = start_row(
        table_ptr, n_boxes, first_box, k_desc, v_desc, keys, values, bars, kv_head, BOXES, STAGES, H_KV,
        BLOCK_SIZE,
    )  # fmt: skip
    values.index(OWN).store(gl.zeros((BOX, D), dtype, box_layout))
    d = gl.arange(0, D // 2, layout=gl.SliceLayout(0, halves))[None, :]
    q_angles, k_angles, q_norm, k_norm = (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)
    if ROTARY:
        q_angles, k_angles = _load_angles(rotary, asked, d, D), _load_angles(rotary, appended, d, D)
    if NORMS:
        q_norm, k_norm = _load_norm(rotary.q_norm, d, D), _load_norm(rotary.k_norm, d, D)
    block = gl.load(table_ptr + appended // BLOCK_SIZE, mask=appended >= 0, other=0)
    slot = block.to(gl.int64) * cache.stride + (kv_head * BLOCK_SIZE + appended % BLOCK_SIZE) * D
    slot = slot[:, None] + d
    if DEPENDENT:
        griddepcontrol("wait")
    if DEPENDENT == 1:
        griddepcontrol("launch_dependents")
    q_place = ((row * PLACES + m // GROUP) * new.q_stride + (kv_head * GROUP + m % GROUP) * D)[:, None]
    kv_place = ((row * PLACES + j) * new.kv_stride + kv_head * D)[:, None]
    kept = (appended >= 0)[:, None]
    q = _load_halves(new.q + q_place, d, (m < GROUP * PLACES)[:, None], new, D, PARTS)
    k = _load_halves(new.k + kv_place, d, kept, new, D, PARTS)
    v = _load_halves(new.v + kv_place, d, kept, new, D, PARTS)
    mbarrier.wait(bars.index(0), 0)
    last_box = first_box + gl.maximum(n_boxes - 1, 0)
    if ((last_box + 1) * BOX > position) | (n_boxes == 0):
        clear(values.index(0), last_box * BOX, 0, position, box_layout)
    q = _positioned(q, q_norm, q_angles, rotary.eps, dtype, ROTARY, NORMS)
    k = _positioned(k, k_norm, k_angles, rotary.eps, dtype, ROTARY, NORMS)
    v = added(v[0], dtype), added(v[1], dtype)
    operand: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEADS, D], dtype)
    queries = gl.allocate_shared_memory(dtype, [HEADS, D], operand)
    queries.store(_joined(q))
    _hold_new(_joined(k), _joined(v), keys.index(OWN), values.index(OWN), NEW)
    hopper.fence_async_shared()
    held: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEADS, BOX], dtype)
    weights = gl.allocate_shared_memory(dtype, [BOXES + 1, HEADS, BOX], held)
    state = _attend_first_tile(
        keys, values, queries, weights, live, n_boxes, first_box, position, scale, GROUP, BOXES, OWN, layout
    )
    _append(cache, slot, k, v, kept, D)
    start_tile(
        0, STAGES, blocks, n_boxes, first_box, k_desc, v_desc, keys, values, bars, kv_head, H_KV, BLOCK_SIZE
    )
    blocks = blocks_of(table_ptr, STAGES + 1, n_boxes, first_box, BOXES, BLOCK_SIZE)
    state = attend_tiles(
        state, blocks, table_ptr, n_boxes, first_box, 0, position, k_desc, v_desc, keys, values, bars,
        queries, weights, kv_head, scale, DONE=1, WINDOW=0, BOXES=BOXES, STAGES=STAGES, H_KV=H_KV,
        BLOCK_SIZE=BLOCK_SIZE, layout=layout,
    )  # fmt: skip
    part = row if partial is None else row + gl.program_id(0)
    _store(out_ptr, partial, state, position, part, kv_head, shape, PLACES, HEADS, layout)
    for s in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(s))


def verify_attention(
    *, q, k_new, v_new, k_cache_layer, v_cache_layer, block_table, positions, verified_positions, scale,
    rotary=None, plan: Plan, dependent: int = False,
) -> Tensor:  # fmt: skip
    """Rotate, append and attend as :func:`verify_attention_ref` does, in one kernel or two.

    Arguments as in ``attention.append_and_attend``. Of the plan, only the variant is used; its pieces are 0
    or a multiple of the number of state rows. positions, verified_positions and block_table must have been
    written at least two kernels earlier.
    """
    variant, out = plan.variant, k_cache_layer.new_empty(q.shape[-3:])
    rows, n_heads = len(positions), out.shape[1]
    n_places = len(out) // rows
    new, cache, shape = layer_arguments(q, k_new, v_new, k_cache_layer, v_cache_layer, 16)
    heads = max(16, next_power_of_2(shape.GROUP * n_places))
    by_row = out.view(rows, n_places * n_heads, -1)
    partial = new_partial(by_row, variant.pieces + rows) if variant.pieces > rows else None
    _verify_attention_kernel[(max(variant.pieces, rows), shape.H_KV)](
        out, partial, new, *described_boxes(cache), cache, rows_of(block_table, positions),
        rows_of(block_table, verified_positions), pointers(rotary, out), scale * LOG2_E, shape,
        PLACES=n_places, HEADS=heads, NEW=max(8, next_power_of_2(n_places)),
        PIECES=max(1, variant.pieces // rows), BOXES=variant.tile // BOX, STAGES=variant.stages,
        ROTARY=rotary is not None, NORMS=rotary is not None and rotary.q_norm is not None,
        num_warps=variant.warps, **launch_options(dependent),
    )  # fmt: skip
    if partial is not None:
        combine(by_row, partial, plan, dependent=dependent)
    return out
