"""Prefill attention for Hopper GPUs, whose warps divide the work: one copies, the others multiply.

A unit of work is a tile of 64 queries, for two heads that share keys. Each program processes many units, one
after another. One of its warps copies boxes of 64 keys and values by TMA into a ring of stages in shared
memory, and two groups of four warps attend, each with one head. A group starts the product of its queries
with a box of keys, and that of the weights of the box before with their values, and computes the softmax of
the first while the tensor cores still run (FlashAttention-3, Shah et al. 2024, arXiv:2407.08608).

A tile attends to whole boxes of cached tokens, to those of earlier new tokens, to the cached tokens that are
left, and to its own; only the scores of the last two are masked. If all starts are multiples of 64, sums have
the same order as in :mod:`prefill`.
"""

from __future__ import annotations

from torch import Tensor

from rosellm.roseinfer.kernels import ring
from rosellm.roseinfer.kernels.dependent_launch import launch_options
from rosellm.roseinfer.kernels.paged_cache import LOG2_E, AttentionShape, NewTokens, PagedCache
from rosellm.roseinfer.kernels.prefill_tiles import Tiles
from rosellm.roseinfer.kernels.ring import NUM_SMS, async_load, descriptor, griddepcontrol, mbarrier
from rosellm.roseinfer.kernels.ring_attention import BOX, described_boxes
from rosellm.triton_or_none import GluonDescriptor, gl, gluon, hopper

ROLES = {"_prefill_ring_kernel": "attention"}
HEAD_DIM, STAGES = 128, 4
FEW_TOKENS = 4096  # up to which it is not faster; these prefills are captured, with empty tiles


@gluon.jit
def load_work(tiles, work, PAIRS: gl.constexpr):
    """Return a unit's tile (columns 0 to 3 and 5 of ``prefill_tiles.tile_columns``), and its boxes.

    Boxes are returned as: whole cached boxes, cached tokens past them, whole boxes before the tile, all boxes
    (0 for an empty tile).
    """
    columns, stride, _ = tiles
    columns += work // PAIRS
    first, n_rows, position = gl.load(columns), gl.load(columns + stride), gl.load(columns + 2 * stride)
    sequence_first, start = gl.load(columns + 3 * stride), gl.load(columns + 4 * stride)
    table_row = gl.load(columns + 5 * stride).to(gl.int64)
    n_whole = start // 64 + (first - sequence_first) // 64
    n_boxes = gl.where(n_rows > 0, n_whole + 1 + (start % 64 > 0).to(gl.int32), 0)
    return (first, n_rows, position, sequence_first, table_row), (start // 64, start % 64, n_whole, n_boxes)


@gluon.jit
def copy_boxes(tiles, table, firsts_ptr, descs, memory, shape: gl.constexpr, COPIED: gl.constexpr):
    """Copy the boxes of all units of work, each to the next stage as soon as both groups have read it."""
    k_new, v_new, k_cached, v_cached = descs
    keys, values, full, empty = memory
    STAGES: gl.constexpr = keys.shape[0]
    PAIRS: gl.constexpr = shape.H // 2
    stage = 0
    phase = 1
    work = gl.program_id(0)
    while work < tiles[2]:
        tile, boxes = load_work(tiles, work, PAIRS)
        first, _, _, sequence_first, table_row = tile
        n_cached, n_cut, n_whole, n_boxes = boxes
        kv_head = work % PAIRS * 2 // shape.GROUP
        for i in range(n_boxes):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, k_new.block_type.nbytes + v_new.block_type.nbytes)
            is_cut = (i == n_whole) & (n_cut > 0)
            if (i < n_cached) | is_cut:
                token = gl.where(is_cut, n_cached, i) * 64
                if COPIED:
                    place = [gl.load(firsts_ptr + table_row) + token, kv_head * shape.D]
                else:
                    block = gl.load(table[0] + table_row * table[1] + token // shape.BLOCK_SIZE)
                    slot = (block * shape.H_KV + kv_head) * shape.BLOCK_SIZE + token % shape.BLOCK_SIZE
                    place = [slot, 0]
                async_load(k_cached, place, bar, keys.index(stage))
                async_load(v_cached, place, bar, values.index(stage))
            else:
                token = gl.where(i == n_boxes - 1, first, sequence_first + (i - n_cached) * 64)
                async_load(k_new, [token, kv_head * shape.D], bar, keys.index(stage))
                async_load(v_new, [token, kv_head * shape.D], bar, values.index(stage))
            stage += 1
            wraps = stage == STAGES
            stage = gl.where(wraps, 0, stage)
            phase = gl.where(wraps, phase ^ 1, phase)
        work = gl.where(n_boxes > 0, work + gl.num_programs(0), tiles[2])


@gluon.jit
def weigh(scores, m, total, scale, dtype: gl.constexpr, operand: gl.constexpr):
    """Return the new maxima and sums of weights of the online softmax, the weights, and old sums' factors."""
    m_new = gl.maximum(m, gl.max(scores, axis=1) * scale)
    p = gl.exp2(scores * scale - m_new[:, None])
    alpha = gl.exp2(m - m_new)
    return m_new, total * alpha + gl.sum(p, axis=1), gl.convert_layout(p.to(dtype), operand), alpha


@gluon.jit
def mask(scores, values, is_own, held, blocked: gl.constexpr):
    """Mask the scores of a box of ``held`` tokens, and clear its other values: 0 * NaN would be NaN.

    is_own: whether its tokens are the queries', of which each attends to those up to itself.
    """
    if held < 64:
        kept = gl.arange(0, 64, gl.SliceLayout(1, blocked)) < held
        v = values.load(blocked)
        values.store(gl.where(kept[:, None], v, gl.zeros_like(v)))
        hopper.fence_async_shared()
    layout: gl.constexpr = scores.type.layout
    last = gl.where(is_own, gl.arange(0, 64, gl.SliceLayout(1, layout)), held - 1)
    j = gl.arange(0, 64, gl.SliceLayout(0, layout))
    return gl.where(j[None, :] <= last[:, None], scores, float("-inf"))


@gluon.jit
def attend_box(
    i, turn, state, q, memory, held, n_boxes, scale, MASKED: gl.constexpr, blocked: gl.constexpr
):  # fmt: skip
    """Weigh box i while the box before it is multiplied by its weights; return the new state.

    turn: the program's boxes before this unit of work.
    state: maxima ``[64]``, sums of weights ``[64]``, weights of the box before, weighted sums ``[64, D]``.
    """
    m, total, p, acc = state
    keys, values, full, empty = memory
    STAGES: gl.constexpr = keys.shape[0]
    layout: gl.constexpr = m.type.layout.parent
    operand: gl.constexpr = p.type.layout
    stage, before, after = (turn + i) % STAGES, (turn + i - 1) % STAGES, turn + i + 1
    zeros = gl.zeros((64, 64), gl.float32, layout)
    scores = hopper.warpgroup_mma(q, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    product = hopper.warpgroup_mma(p, values.index(before), acc, is_async=True)
    scores = hopper.warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
    if MASKED:
        scores = mask(scores, values.index(stage), i == n_boxes - 1, held, blocked)
    m, total, p, alpha = weigh(scores, m, total, scale, keys.dtype, operand)
    mbarrier.wait(full.index(after % STAGES), after // STAGES & 1, pred=i + 1 < n_boxes)
    acc, p, alpha = hopper.warpgroup_mma_wait(num_outstanding=0, deps=(product, p, alpha))
    mbarrier.arrive(empty.index(before), count=1)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    return m, total, p, acc


@gluon.jit
def attend_tile(
    turn, tile, boxes, head, out_ptr, new, cache, table, queries, memory, scale, shape: gl.constexpr,
    STORES: gl.constexpr,
):  # fmt: skip
    """Attend with one head of a tile.

    turn: the program's boxes before this unit of work.
    STORES: whether to store the tile's keys and values, too, if the head is its group's first.
    """
    keys, values, full, empty = memory
    first, n_rows, position, _, table_row = tile
    _, n_cut, n_whole, n_boxes = boxes
    D: gl.constexpr = shape.D
    STAGES: gl.constexpr = keys.shape[0]
    blocked: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    row = gl.arange(0, 64, gl.SliceLayout(1, blocked))
    d = gl.arange(0, D, gl.SliceLayout(0, blocked))[None, :]
    inside = (row < n_rows)[:, None] & (d < D)
    q_ptr = new.q + first.to(gl.int64) * new.q_stride + head * D
    queries.store(gl.load(q_ptr + (row * new.q_stride)[:, None] + d, mask=inside, other=0.0))
    q = queries.load(gl.DotOperandLayout(0, layout, 2))
    m = gl.full((64,), float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    total = gl.zeros((64,), gl.float32, gl.SliceLayout(1, layout))
    acc = gl.zeros((64, D), gl.float32, acc_layout)
    stage, after, last = turn % STAGES, turn + 1, (turn + n_boxes - 1) % STAGES
    mbarrier.wait(full.index(stage), turn // STAGES & 1)
    zeros = gl.zeros((64, 64), gl.float32, layout)
    scores = hopper.warpgroup_mma(q, keys.index(stage).permute((1, 0)), zeros, use_acc=False)
    if n_whole == 0:
        held = gl.where(n_boxes == 1, n_rows, n_cut)
        scores = mask(scores, values.index(stage), n_boxes == 1, held, blocked)
    m, total, p, _ = weigh(scores, m, total, scale, keys.dtype, operand)
    mbarrier.wait(full.index(after % STAGES), after // STAGES & 1, pred=n_boxes > 1)
    state = m, total, p, acc
    for i in range(1, n_whole):
        state = attend_box(i, turn, state, q, memory, 64, n_boxes, scale, False, blocked)
    for i in range(gl.maximum(n_whole, 1), n_boxes):
        held = gl.where(i == n_boxes - 1, n_rows, n_cut)
        state = attend_box(i, turn, state, q, memory, held, n_boxes, scale, True, blocked)
    m, total, p, acc = state
    acc = hopper.warpgroup_mma(p, values.index(last), acc)
    if STORES:
        slot = position + row
        stored = (row < n_rows) & (head % shape.GROUP == 0)
        table_ptr = table[0] + table_row * table[1]
        block = gl.load(table_ptr + slot // shape.BLOCK_SIZE, mask=stored, other=0).to(gl.int64)
        slot = block * cache.stride + (head // shape.GROUP * shape.BLOCK_SIZE + slot % shape.BLOCK_SIZE) * D
        gl.store(cache.k + slot[:, None] + d, keys.index(last).load(blocked), mask=stored[:, None])
        gl.store(cache.v + slot[:, None] + d, values.index(last).load(blocked), mask=stored[:, None])
    mbarrier.arrive(empty.index(last), count=1)
    acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, acc_layout))[:, None]
    queries.store(acc.to(keys.dtype))
    out_ptr += first.to(gl.int64) * (shape.H * D) + head * D
    gl.store(out_ptr + (row * (shape.H * D))[:, None] + d, queries.load(blocked), mask=inside)


@gluon.jit
def attend(
    tiles, out_ptr, new, cache, table, queries, memory, scale, shape: gl.constexpr, SECOND: gl.constexpr
):  # fmt: skip
    """Attend with the first or the second head of every unit of work."""
    PAIRS: gl.constexpr = shape.H // 2
    STORES: gl.constexpr = shape.DTYPE is None and not SECOND
    turn = 0
    work = gl.program_id(0)
    while work < tiles[2]:
        tile, boxes = load_work(tiles, work, PAIRS)
        n_boxes = boxes[3]
        if n_boxes > 0:
            head = work % PAIRS * 2 + SECOND
            attend_tile(
                turn, tile, boxes, head, out_ptr, new, cache, table, queries, memory, scale, shape, STORES
            )
        turn += n_boxes
        work = gl.where(n_boxes > 0, work + gl.num_programs(0), tiles[2])


@gluon.jit(
    do_not_specialize=["tiles_stride", "table_stride", "n_work"],
    do_not_specialize_on_alignment=["tiles_ptr", "table_ptr", "firsts_ptr"],
)
def _prefill_ring_kernel(
    out_ptr, new, k_new, v_new, cache, k_cached, v_cached, firsts_ptr, table_ptr, table_stride,
    tiles_ptr, tiles_stride, n_work, scale_log2, shape: gl.constexpr, COPIED: gl.constexpr,
    STAGES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Attend with two heads of a tile per unit of work: program p processes units p, p + programs, ...

    An empty tile ends the work. COPIED: whether k_cached and v_cached are copies of prefixes in the model's
    dtype, which begin at ``firsts_ptr``; the new tokens of the quantised cache are then stored already.
    """
    dtype: gl.constexpr = k_new.dtype
    held: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, shape.D], dtype)
    keys = gl.allocate_shared_memory(dtype, [STAGES, 64, shape.D], k_new.layout)
    values = gl.allocate_shared_memory(dtype, [STAGES, 64, shape.D], v_new.layout)
    queries = gl.allocate_shared_memory(dtype, [2, 64, shape.D], held)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    hopper.fence_async_shared()
    if DEPENDENT:
        griddepcontrol("wait")
    if DEPENDENT == 1:
        griddepcontrol("launch_dependents")
    tiles, table, memory = (
        (tiles_ptr, tiles_stride, n_work),
        (table_ptr, table_stride),
        (keys, values, full, empty),
    )
    descs = k_new, v_new, k_cached, v_cached
    gl.warp_specialize(
        [
            (attend, (tiles, out_ptr, new, cache, table, queries.index(0), memory, scale_log2, shape, 0)),
            (attend, (tiles, out_ptr, new, cache, table, queries.index(1), memory, scale_log2, shape, 1)),
            (copy_boxes, (tiles, table, firsts_ptr, descs, memory, shape, COPIED)),
        ],
        [4, 1],
        [240, 24],
    )


def takes(q: Tensor, shape: AttentionShape, tiles: Tiles, window: int | None) -> bool:
    """Return whether the kernel can run, and is faster than ``prefill.prefill_attention`` on an H200."""
    is_long = len(q) > FEW_TOKENS and window is None
    fits = shape.D == HEAD_DIM and shape.GROUP % 2 == 0 and shape.BLOCK_SIZE % BOX == 0
    whole = tiles.size == BOX and not (tiles.in_pieces or tiles.are_drafts)
    readable = shape.DTYPE is None or tiles.prefixes is not None
    return is_long and fits and whole and readable and ring.runs_on(q.device, q.dtype)


def ring_prefill(
    *, new: NewTokens, cache: PagedCache, copies: tuple[Tensor, Tensor] | None, firsts: Tensor | None,
    block_table: Tensor, tiles: Tiles, scale: float, shape: AttentionShape, dependent: int = False,
) -> Tensor:  # fmt: skip
    """Attend as ``prefill.prefill_attention`` does, if the kernel takes the case; see :func:`takes`.

    new, cache, shape: a layer's, from ``layer_arguments``.
    copies, firsts: for a quantised cache, copies of its prefixes from ``wide_prefixes.widen``, and where they
        begin; its new tokens have been stored. Otherwise None.
    """
    out = new.q.new_empty(new.q.shape)
    cached = described_boxes(cache) if copies is None else _described(*copies)
    n_work = tiles.columns.shape[1] * shape.H // 2
    _prefill_ring_kernel[(min(NUM_SMS, n_work),)](
        out, new, *_described(new.k, new.v), cache, *cached, block_table if firsts is None else firsts,
        block_table, block_table.stride(0), tiles.columns, tiles.columns.stride(0), n_work, scale * LOG2_E,
        shape, copies is not None, STAGES, num_warps=4, **launch_options(dependent),
    )  # fmt: skip
    return out


def _described(*heads: Tensor) -> tuple[GluonDescriptor, ...]:
    """Return TMA descriptors of keys or values ``[N, H_kv, D]``, of boxes of one head."""
    return tuple(descriptor(x, [len(x), x[0].numel()], [x.stride(0), 1], [BOX, x.shape[2]]) for x in heads)
