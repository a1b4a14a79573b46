"""Decode attention for Hopper GPUs that starts to copy keys and values before its queries are ready.

A program attends with the query heads of one KV head to one row. Before it waits for the kernel before it, it
starts TMA copies of the row's keys and values, in boxes of 64 tokens, into a ring of tiles in shared memory.
The last box, whose unused slots must be cleared, is copied first, so that it is cleared while the program
waits for its queries. GEMMs are transposed, ``keys @ q.T`` and ``values.T @ weights.T``: the wide operand of
``wgmma`` is the box, few query heads need little padding, and keys and values never pass through registers.
"""

from __future__ import annotations

from torch import Tensor

from rosellm.errors import OptionError
from rosellm.models.rope import Rotary
from rosellm.roseinfer.kernels.dependent_launch import launch_options
from rosellm.roseinfer.kernels.paged_cache import LOG2_E, PagedCache, layer_arguments, rows_of
from rosellm.roseinfer.kernels.ring import async_load, described, griddepcontrol, mbarrier
from rosellm.triton_or_none import gl, gluon, hopper, next_power_of_2

ROLES = {"_ring_attention_kernel": "attention"}
BOX = 64  # tokens per TMA copy
WARPS = 4


@gluon.jit
def box_start(i, n_boxes, first_box):
    """Return the first token of the i-th box: of the last box for 0, and then of the first and so on."""
    BOX: gl.constexpr = 64
    return (first_box + gl.where(i == 0, n_boxes - 1, i - 1)) * BOX


@gluon.jit
def blocks_of(table_ptr, tile, n_boxes, first_box, BOXES: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Load the blocks of a tile's boxes, as a tuple; 0 for boxes that do not exist."""
    blocks = ()  # type: tuple
    for box in gl.static_range(BOXES):
        i = tile * BOXES + box
        place = table_ptr + box_start(i, n_boxes, first_box) // BLOCK_SIZE
        blocks = blocks + (gl.load(place, mask=i < n_boxes, other=0),)
    return blocks


@gluon.jit
def start_tile(
    stage, tile, blocks, n_boxes, first_box, k_desc, v_desc, keys, values, bars, kv_head,
    H_KV: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Start to copy the keys and values of a tile to a stage, box by box."""
    BOXES: gl.constexpr = len(blocks)
    bar = bars.index(stage)
    for box in gl.static_range(BOXES):
        i = tile * BOXES + box
        row = (blocks[box] * H_KV + kv_head) * BLOCK_SIZE + box_start(i, n_boxes, first_box) % BLOCK_SIZE
        exists = i < n_boxes
        mbarrier.expect(bar, k_desc.block_type.nbytes + v_desc.block_type.nbytes, pred=exists)
        async_load(k_desc, [row, 0], bar, keys.index(stage * BOXES + box), pred=exists)
        async_load(v_desc, [row, 0], bar, values.index(stage * BOXES + box), pred=exists)
        mbarrier.arrive(bar, count=1, pred=i >= n_boxes)


@gluon.jit
def start_row(
    table_ptr, n_boxes, first_box, k_desc, v_desc, keys, values, bars, kv_head, BOXES: gl.constexpr,
    STAGES: gl.constexpr, H_KV: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Start to copy the first tiles, one per stage, and return the blocks of the tile after them."""
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=BOXES)
    hopper.fence_async_shared()
    blocks = blocks_of(table_ptr, 0, n_boxes, first_box, STAGES * BOXES, BLOCK_SIZE)
    for s in gl.static_range(STAGES):
        start_tile(
            s, s, blocks[s * BOXES : (s + 1) * BOXES], n_boxes, first_box, k_desc, v_desc, keys, values, bars,
            kv_head, H_KV, BLOCK_SIZE,
        )  # fmt: skip
    return blocks_of(table_ptr, STAGES, n_boxes, first_box, BOXES, BLOCK_SIZE)


@gluon.jit
def clear(box, start, first, stop, layout: gl.constexpr):
    """Clear a box's values outside tokens ``first`` to ``stop`` - 1: they may be NaN, and 0 * NaN is NaN."""
    token = start + gl.arange(0, box.shape[0], layout=gl.SliceLayout(1, layout))
    held = box.load(layout)
    seen = ((token >= first) & (token < stop))[:, None]
    box.store(gl.where(seen, held, gl.zeros_like(held)))
    hopper.fence_async_shared()


@gluon.jit
def _clear_unused(
    values, bars, position, first, first_box, n_boxes, BOXES: gl.constexpr, WINDOW: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Wait for the last box and clear its unused values; do likewise with the window's first box.

    The window's first box is the second that is copied, unless it is the last, too.
    """
    BOX: gl.constexpr = 64
    if n_boxes > 0:
        mbarrier.wait(bars.index(0), 0)
        if (position % BOX != 0) | ((n_boxes == 1) & (first % BOX != 0)):
            clear(values.index(0), (first_box + n_boxes - 1) * BOX, first, position, layout)
    if WINDOW:
        is_cut = (n_boxes > 1) & (first % BOX != 0)
        if is_cut:
            mbarrier.wait(bars.index(1 // BOXES), 0)
            clear(values.index(1), first_box * BOX, first, position, layout)


@gluon.jit
def load_parts(ptr, mask, part_stride, PARTS: gl.constexpr):
    """Load the partial sums of new heads as a tuple."""
    parts = ()  # type: tuple
    for part in gl.static_range(PARTS):
        parts = parts + (gl.load(ptr + part * part_stride, mask=mask, other=0.0),)
    return parts


@gluon.jit
def added(parts, dtype: gl.constexpr):
    """Add up partial sums, and round the result to the cache's dtype."""
    PARTS: gl.constexpr = len(parts)
    x = parts[0]
    for part in gl.static_range(1, PARTS):
        x += parts[part]
    return x.to(dtype)


@gluon.jit
def all_of(products):
    """Wait for all products, and return them as a tuple."""
    COUNT: gl.constexpr = len(products)
    done = hopper.warpgroup_mma_wait(num_outstanding=0, deps=products)
    return (done,) if COUNT == 1 else done


@gluon.jit
def _load_angles(rotary, position, d, inside, D: gl.constexpr):
    """Return cosines and signed sines ``[1, D_PADDED]`` of a position, as ``rotary.load_angles`` does."""
    HALF: gl.constexpr = D // 2
    angle = rotary.cos_sin + gl.maximum(position, 0).to(gl.int64) * D + d % HALF
    cos = gl.load(angle, mask=inside, other=0.0)
    sin = gl.load(angle + HALF, mask=inside, other=0.0)
    return cos, gl.where(d < HALF, -sin, sin)


@gluon.jit
def _load_norm(ptr, d, across, inside):
    """Return a norm's weights ``[1, D_PADDED]``, and those with its halves swapped."""
    norm = gl.load(ptr + d, mask=inside, other=0.0).to(gl.float32)
    return norm, gl.load(ptr + across, mask=inside, other=0.0).to(gl.float32)


@gluon.jit
def _load_new(
    new, row, kv_head, m, d, across, i, GROUP: gl.constexpr, D: gl.constexpr, PARTS: gl.constexpr,
    ROTARY: gl.constexpr,
):  # fmt: skip
    """Load q and k, both also with their halves swapped, and v: the partial sums of each, as tuples."""
    inside = d < D
    seen = (m < GROUP) & inside
    q_ptr = new.q + row * new.q_stride + kv_head * GROUP * D + m * D
    k_ptr = new.k + row * new.kv_stride + kv_head * D + m * 0
    q = load_parts(q_ptr + d, seen, new.part_stride, PARTS)
    k = load_parts(k_ptr + d, inside, new.part_stride, PARTS)
    q_across, k_across = q, k
    if ROTARY:
        q_across = load_parts(q_ptr + across, seen, new.part_stride, PARTS)
        k_across = load_parts(k_ptr + across, inside, new.part_stride, PARTS)
    v = load_parts(new.v + row * new.kv_stride + kv_head * D + i, i < D, new.part_stride, PARTS)
    return q, q_across, k, k_across, v


@gluon.jit
def _positioned(x, swapped, norm, angles, eps, D: gl.constexpr, ROTARY: gl.constexpr, NORMS: gl.constexpr):
    """Return heads after norm and rotation, in their dtype, as ``rotary.positioned`` does."""
    dtype: gl.constexpr = x.dtype
    if ROTARY:
        x, swapped = x.to(gl.float32), swapped.to(gl.float32)
        if NORMS:
            unit = gl.rsqrt(gl.sum(x * x, axis=1) / D + eps)[:, None]
            x = x * unit * norm[0]
            swapped = swapped * unit * norm[1]
        x = (x * angles[0] + swapped * angles[1]).to(dtype)
    return x


@gluon.jit
def _start_softmax(
    q, k, v, scale, BOX: gl.constexpr, HEADS: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr
):
    """Return the state of the online softmax, as in :func:`weigh_boxes`, after the new token alone."""
    score = gl.sum(q.to(gl.float32) * k.to(gl.float32), axis=1) * scale
    most = gl.convert_layout(score, gl.SliceLayout(0, layout))
    weight_of_new = gl.full([HEADS], 1.0, gl.float32, gl.SliceLayout(0, layout))
    acc = v.to(gl.float32)[:, None] + gl.zeros((WIDTH, HEADS), gl.float32, layout)
    return most, gl.zeros((BOX, HEADS), gl.float32, layout), weight_of_new, acc


@gluon.jit
def start_scores(keys, queries, at, layout: gl.constexpr):
    """Start the products of the queries with the boxes in places ``at``: a tuple of ``[BOX, HEADS]``."""
    BOX: gl.constexpr = keys.shape[1]
    HEADS: gl.constexpr = queries.shape[0]
    BOXES: gl.constexpr = len(at)
    zeros = gl.zeros((BOX, HEADS), gl.float32, layout)
    scores = ()  # type: tuple
    for box in gl.static_range(BOXES):
        product = hopper.warpgroup_mma(keys.index(at[box]), queries.permute((1, 0)), zeros, is_async=True)
        scores = scores + (product,)
    return scores


@gluon.jit
def mask_boxes(
    scores, tile, n_boxes, first_box, first, position, scale, WINDOW: gl.constexpr, layout: gl.constexpr
):
    """Return the scaled scores of a tile's boxes, -inf for tokens outside ``first`` to ``position`` - 1."""
    BOXES: gl.constexpr = len(scores)
    BOX: gl.constexpr = scores[0].shape[0]
    token = gl.arange(0, BOX, layout=gl.SliceLayout(1, layout))
    masked = ()  # type: tuple
    for box in gl.static_range(BOXES):
        i = tile * BOXES + box
        here = box_start(i, n_boxes, first_box) + token
        attended = (here < position) & (i < n_boxes)
        if WINDOW:
            attended &= here >= first
        masked = masked + (gl.where(attended[:, None], scores[box] * scale, float("-inf")),)
    return masked


@gluon.jit
def weigh_boxes(state, masked, values, weights, at):
    """Add boxes to the state of the online softmax, and return its new state.

    state: maxima ``[HEADS]``, sums of weights ``[BOX, HEADS]``, the new token's weight ``[HEADS]``, and
        weighted sums of values ``[D_PADDED, HEADS]``.
    masked: scores of each box, -inf for tokens that a query does not attend to.
    at: the boxes' places.
    """
    BOXES: gl.constexpr = len(at)
    most, sums, weight_of_new, acc = state
    highest = masked[0]
    for box in gl.static_range(1, BOXES):
        highest = gl.maximum(highest, masked[box])
    highest = gl.maximum(most, gl.max(highest, axis=0))
    rescale = gl.exp2(most - highest)
    sums *= rescale[None, :]
    for box in gl.static_range(BOXES):
        p = gl.exp2(masked[box] - highest[None, :])
        sums += p
        weights.index(box).permute((1, 0)).store(p.to(weights.dtype))
    hopper.fence_async_shared()
    product = hopper.warpgroup_mma_init(acc * rescale[None, :])
    for box in gl.static_range(BOXES):
        v, p_held = values.index(at[box]).permute((1, 0)), weights.index(box).permute((1, 0))
        product = hopper.warpgroup_mma(v, p_held, product, is_async=True)
    acc = hopper.warpgroup_mma_wait(num_outstanding=0, deps=(product,))
    return highest, sums, weight_of_new * rescale, acc


@gluon.jit
def attend_tiles(
    state, blocks, table_ptr, n_boxes, first_box, first, position, k_desc, v_desc, keys, values, bars,
    queries, weights, kv_head, scale, DONE: gl.constexpr, WINDOW: gl.constexpr, BOXES: gl.constexpr,
    STAGES: gl.constexpr, H_KV: gl.constexpr, BLOCK_SIZE: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Run the online softmax over all tiles but the first ``DONE``; fill each stage again once it is read.

    blocks: those of the tile that will be copied next.
    """
    stage = DONE % STAGES
    phase = DONE // STAGES
    for tile in range(DONE, (n_boxes + BOXES - 1) // BOXES):
        mbarrier.wait(bars.index(stage), phase)
        at = places_of(stage, tile, n_boxes, BOXES)
        scores = all_of(start_scores(keys, queries, at, layout))
        masked = mask_boxes(scores, tile, n_boxes, first_box, first, position, scale, WINDOW, layout)
        state = weigh_boxes(state, masked, values, weights, at)
        start_tile(
            stage, tile + STAGES, blocks, n_boxes, first_box, k_desc, v_desc, keys, values, bars, kv_head,
            H_KV, BLOCK_SIZE,
        )  # fmt: skip
        blocks = blocks_of(table_ptr, tile + STAGES + 1, n_boxes, first_box, BOXES, BLOCK_SIZE)
        stage += 1
        wraps = stage == STAGES
        stage = gl.where(wraps, 0, stage)
        phase = gl.where(wraps, phase ^ 1, phase)
    return state


@gluon.jit
def places_of(stage, tile, n_boxes, BOXES: gl.constexpr):
    """Return where the boxes of a stage's tile are; a box that does not exist repeats the tile's first."""
    at = ()  # type: tuple
    for box in gl.static_range(BOXES):
        at = at + (stage * BOXES + gl.where(tile * BOXES + box < n_boxes, box, 0),)
    return at


@gluon.jit
def _store_heads(
    out_ptr, state, position, i, HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Store the attention of one KV head's queries; 0 for an inert row."""
    _, sums, weight_of_new, acc = state
    out = acc / (gl.sum(sums, axis=0) + weight_of_new)[None, :]
    out = gl.where(position >= 0, out, 0.0).to(out_ptr.dtype.element_ty)
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(0, layout))[None, :]
    gl.store(out_ptr + head * D + i[:, None], out, mask=(head < GROUP) & (i < D)[:, None])


@gluon.jit
def _ring_attention_kernel(
    out_ptr, new, k_desc, v_desc, cache, rows, rotary, scale, shape: gl.constexpr, HEADS: gl.constexpr,
    WINDOW: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr, ROTARY: gl.constexpr,
    NORMS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Attend with one KV head's queries to a whole row per program, and append the row's new token.

    A tile is BOXES boxes. The output of an inert row is 0.
    """
    BOX: gl.constexpr = 64
    H_KV: gl.constexpr = shape.H_KV
    GROUP: gl.constexpr = shape.GROUP
    D: gl.constexpr = shape.D
    WIDTH: gl.constexpr = shape.D_PADDED
    BLOCK_SIZE: gl.constexpr = shape.BLOCK_SIZE
    PARTS: gl.constexpr = shape.PARTS
    warps: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = k_desc.dtype
    heads_layout: gl.constexpr = gl.BlockedLayout([1, WIDTH // 16], [2, 16], [warps, 1], [1, 0])
    box_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [warps, 1], [1, 0])
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, HEADS, 16]
    )
    keys = gl.allocate_shared_memory(dtype, [STAGES * BOXES, BOX, WIDTH], k_desc.layout)
    values = gl.allocate_shared_memory(dtype, [STAGES * BOXES, BOX, WIDTH], v_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    row, kv_head = gl.program_id(0).to(gl.int64), gl.program_id(1)
    position = gl.load(rows.positions + row * rows.position_stride)
    table_ptr = rows.table + row * rows.table_stride
    first = gl.maximum(position - WINDOW + 1, 0) if WINDOW else position * 0
    first_box = first // BOX
    n_boxes = gl.maximum((position + BOX - 1) // BOX - first_box, 0)
    blocks = start_row(
        table_ptr, n_boxes, first_box, k_desc, v_desc, keys, values, bars, kv_head, BOXES, STAGES, H_KV,
        BLOCK_SIZE,
    )  # fmt: skip
    m = gl.arange(0, HEADS, layout=gl.SliceLayout(1, heads_layout))[:, None]
    d = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, heads_layout))
    across = gl.where(d < D // 2, d + D // 2, d - D // 2)
    across = gl.max_contiguous(gl.multiple_of(across, 8), 8)[None, :]
    d = d[None, :]
    inside = d < D
    angles, q_norm, k_norm = (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)
    if ROTARY:
        angles = _load_angles(rotary, position, d, inside, D)
    if NORMS:
        q_norm = _load_norm(rotary.q_norm, d, across, inside)
        k_norm = _load_norm(rotary.k_norm, d, across, inside)
    new_block = gl.load(table_ptr + position // BLOCK_SIZE, mask=position >= 0, other=0)
    if DEPENDENT:
        griddepcontrol("wait")
    if DEPENDENT == 1:
        griddepcontrol("launch_dependents")
    i = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, layout))
    q, q_across, k, k_across, v = _load_new(new, row, kv_head, m, d, across, i, GROUP, D, PARTS, ROTARY)
    _clear_unused(values, bars, position, first, first_box, n_boxes, BOXES, WINDOW, box_layout)
    q, k, v = added(q, dtype), added(k, dtype), added(v, dtype)
    q_across, k_across = added(q_across, dtype), added(k_across, dtype)
    q = _positioned(q, q_across, q_norm, angles, rotary.eps, D, ROTARY, NORMS)
    k = _positioned(k, k_across, k_norm, angles, rotary.eps, D, ROTARY, NORMS)
    operand: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEADS, WIDTH], dtype)
    queries = gl.allocate_shared_memory(dtype, [HEADS, WIDTH], operand)
    queries.store(q)
    hopper.fence_async_shared()
    slot = new_block.to(gl.int64) * cache.stride + (kv_head * BLOCK_SIZE + position % BLOCK_SIZE) * D
    gl.store(cache.k + slot + m * 0 + d, k, mask=(m == 0) & inside & (position >= 0))
    gl.store(cache.v + slot + i, v, mask=(i < D) & (position >= 0))
    state = _start_softmax(q, k, v, scale, BOX, HEADS, WIDTH, layout)
    held: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEADS, BOX], dtype)
    weights = gl.allocate_shared_memory(dtype, [BOXES, HEADS, BOX], held)
    state = attend_tiles(
        state, blocks, table_ptr, n_boxes, first_box, first, position, k_desc, v_desc, keys, values, bars,
        queries, weights, kv_head, scale, 0, WINDOW, BOXES, STAGES, H_KV, BLOCK_SIZE, layout,
    )  # fmt: skip
    out_ptr += (row * H_KV + kv_head) * GROUP * D
    _store_heads(out_ptr, state, position, i, HEADS, GROUP, D, layout)
    for s in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(s))


def takes(group: int, head_dim: int, block_size: int) -> bool:
    """Return whether the kernel can attend with these sizes."""
    return group <= 16 and head_dim in (64, 80, 96, 128) and block_size % BOX == 0


def ring_attend(
    *, out, q, k_new, v_new, k_cache_layer, v_cache_layer, block_table, positions, scale, rotary, window,
    tile: int, stages: int, dependent: int = False,
) -> None:  # fmt: skip
    """Write to ``out`` what ``attention.append_and_attend_ref`` returns for the other arguments.

    tile: tokens attended to at once, a multiple of ``BOX``.
    stages: number of tiles in flight.

    Raises ``OptionError`` if the kernel cannot run with these sizes.
    """
    if tile % BOX or (window and stages * tile < 2 * BOX):
        raise OptionError(f"{stages} tiles of {tile} tokens in flight are not at least two boxes of {BOX}")
    new, cache, shape = layer_arguments(q, k_new, v_new, k_cache_layer, v_cache_layer, 16)
    norms = rotary is not None and rotary.q_norm is not None
    _ring_attention_kernel[(len(out), shape.H_KV)](
        out, new, *described_boxes(cache), cache, rows_of(block_table, positions), pointers(rotary, out),
        scale * LOG2_E, shape,
        HEADS=max(8, next_power_of_2(shape.GROUP)), WINDOW=window or 0, BOXES=tile // BOX, STAGES=stages,
        ROTARY=rotary is not None, NORMS=norms, num_warps=WARPS, **launch_options(dependent),
    )  # fmt: skip


def pointers(rotary: Rotary | None, unused: Tensor) -> Rotary:
    """Return ``rotary`` with a tensor in each field, ``unused`` if there is none."""
    if rotary is None:
        return Rotary(unused, unused, unused, 0.0)
    return rotary if rotary.q_norm is not None else rotary._replace(q_norm=unused, k_norm=unused)


def described_boxes(cache: PagedCache) -> tuple:
    """Return TMA descriptors of keys and values, of boxes ``[BOX, D_PADDED]``: past D, zeros are read."""
    width = next_power_of_2(cache.k.shape[3])
    return tuple(described(x.view(-1, x.shape[3]), BOX, width) for x in (cache.k, cache.v))
