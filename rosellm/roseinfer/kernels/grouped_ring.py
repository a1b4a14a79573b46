"""The GEMM of :mod:`ring` for weights of 4 bits, with one scale for each row and ``GROUP`` inputs.

Codes are unpacked in registers, which ``wgmma`` reads as its first operand: each byte holds two codes,
placed so that no value moves between threads (``quantized.packed``). The sums of each group are multiplied by
their scale, which the ring brings with the codes, and added up in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rosellm.models.quantized import GROUP, AnyRows, GroupedWeight, parts_of_rows
from rosellm.roseinfer.kernels.dependent_launch import launch_options
from rosellm.roseinfer.kernels.ring import (
    MOST_COLUMNS,
    MOST_STAGES,
    async_load,
    block_n_of,
    described,
    described_pairs,
    descriptor,
    finish,
    fitting_stages,
    griddepcontrol,
    held_of,
    hold_codes,
    load_of_rows,
    load_weights,
    load_x_scales,
    mbarrier,
    scaled,
    x_tiles,
)
from rosellm.triton_or_none import GluonDescriptor, cdiv, gl, gluon, hopper, next_power_of_2

ROLES = {"_grouped_ring_kernel": "GEMM"}


@gluon.constexpr_function
def _bytes_layout(rows, warps):
    """Return the layout of a group's bytes ``[rows, 64]``: 16 consecutive ones of each row per thread."""
    lanes = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    blocks = [[16 << i, 0] for i in range((rows // 16).bit_length() - 1)]
    split = warps.bit_length() - 1
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0], *blocks[split:]]
    return gl.DistributedLinearLayout(registers, lanes, blocks[:split], [], [rows, 64])


@gluon.constexpr_function
def _scales_layout(rows, warps):
    """Return the layout of a group's scales ``[1, rows]``: per thread those of the rows that it adds up."""
    of_rows = _bytes_layout(rows, warps)
    registers, lanes, blocks = (
        [[0, row] for row, _ in bases]
        for bases in (of_rows.reg_bases, of_rows.lane_bases, of_rows.warp_bases)
    )
    return gl.DistributedLinearLayout([it for it in registers if it[1]], lanes, blocks, [], [1, rows])


@gluon.jit
def _unpacked(bytes, layout: gl.constexpr):
    """Return 16 times the codes, ``[BLOCK_N, 128]`` int8, of bytes ``[BLOCK_N, 64]``, for ``wgmma``."""
    ROWS: gl.constexpr = bytes.shape[0]
    low, high = gl.inline_asm_elementwise(
        "and.b32 $1, $2, 0xF0F0F0F0; shl.b32 $0, $2, 4; and.b32 $0, $0, 0xF0F0F0F0;",
        "=&r,=&r,r", [bytes], dtype=(gl.int8, gl.int8), is_pure=True, pack=4,
    )  # fmt: skip
    codes = gl.reshape(gl.join(low, high), (ROWS, 4, 4, 4, 2))  # c, w, i, h of ``quantized.packed``
    codes = gl.reshape(gl.permute(codes, (0, 2, 4, 1, 3)), (ROWS, 128))
    return gl.convert_layout(codes, gl.DotOperandLayout(0, layout, 4), assert_trivial=True)


@gluon.jit(do_not_specialize=["M", "tiles"])
def _grouped_ring_kernel(
    w_desc, scales_desc, x, x_scales_ptr, bias_ptr, out_ptr, M, N, tiles,
    ROWS: gl.constexpr, DIGITS: gl.constexpr, HELD: gl.constexpr, BLOCK_N: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
    REFILL: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Compute one tile ``[BLOCK_N, ROWS]`` of the transposed product, over ``tiles`` tiles of GROUPS groups.

    Arguments as in ``ring._ring_kernel``.
    """
    GATED: gl.constexpr = ACTIVATION == "swiglu"
    COLUMNS: gl.constexpr = ROWS * DIGITS
    WIDTH: gl.constexpr = 64 * GROUPS  # bytes of a row of a tile
    X_BYTES: gl.constexpr = 0 if HELD else x.block_type.nbytes
    BYTES: gl.constexpr = w_desc.block_type.nbytes + scales_desc.block_type.nbytes + X_BYTES
    ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    x_ring = x_tiles(x, gl.int8, HELD, STAGES, COLUMNS, 2 * WIDTH)
    scales_ring = gl.allocate_shared_memory(
        scales_desc.dtype, [STAGES] + scales_desc.block_type.shape, scales_desc.layout
    )
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    first, row, part = gl.program_id(0) * ROWS, gl.program_id(1) * BLOCK_N, gl.program_id(2)
    begin = part * tiles
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=1)
    hopper.fence_async_shared()
    for s in gl.static_range(STAGES):
        mbarrier.expect(bars.index(s), BYTES, pred=s < tiles)
        load_weights(w_desc, row, (begin + s) * WIDTH, bars.index(s), ring, s, GATED, s < tiles)
        _load_scales(scales_desc, row, (begin + s) * GROUPS, bars.index(s), scales_ring, s, GATED, s < tiles)
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, COLUMNS, 32]
    )
    bias = load_of_rows(bias_ptr, row, N, BLOCK_N, GATED, layout, part == 0) if BIAS else None
    if DEPENDENT:
        griddepcontrol("wait")
        griddepcontrol("launch_dependents")
    if HELD:
        x_scales = hold_codes(x + begin * 2 * WIDTH, x_ring, tiles * GROUPS)
    else:
        for s in gl.static_range(STAGES):
            place = [first * DIGITS, (begin + s) * 2 * WIDTH]
            async_load(x, place, bars.index(s), x_ring.index(s), pred=s < tiles)
    y = gl.zeros((BLOCK_N, COLUMNS), gl.float32, layout)
    nothing = gl.zeros((BLOCK_N, COLUMNS), gl.int32, layout)
    stage = 0
    phase = 0
    for tile in range(tiles):
        mbarrier.wait(bars.index(stage), phase)
        w_tile, scales_tile = ring.index(stage), scales_ring.index(stage)
        if GATED:
            w_tile = w_tile.reshape((BLOCK_N, WIDTH))
            scales_tile = scales_tile.reshape((GROUPS, BLOCK_N))
        sums: gl.tuple = ()
        for g in gl.static_range(GROUPS):
            codes = _unpacked(w_tile.slice(64 * g, 64, 1).load(_bytes_layout(BLOCK_N, warps)), layout)
            at = tile * GROUPS + g if HELD else stage
            x_codes = x_ring.index(at).slice(0 if HELD else 128 * g, 128, 1).permute((1, 0))
            sums += (hopper.warpgroup_mma(codes, x_codes, nothing, use_acc=False, is_async=True),)
        if REFILL:  # the previous products have ended, so that their stage is free
            ahead = tile - 1 + STAGES
            free = gl.where(stage == 0, STAGES - 1, stage - 1)
            more = (tile > 0) & (ahead < tiles)
            bar = bars.index(free)
            mbarrier.expect(bar, BYTES, pred=more)
            load_weights(w_desc, row, (begin + ahead) * WIDTH, bar, ring, free, GATED, more)
            _load_scales(scales_desc, row, (begin + ahead) * GROUPS, bar, scales_ring, free, GATED, more)
            if not HELD:
                place = [first * DIGITS, (begin + ahead) * 2 * WIDTH]
                async_load(x, place, bar, x_ring.index(free), pred=more)
        for g in gl.static_range(GROUPS):
            scales = gl.reshape(scales_tile.slice(g, 1, 0).load(_scales_layout(BLOCK_N, warps)), (BLOCK_N,))
            scales = gl.convert_layout(scales, gl.SliceLayout(1, layout), assert_trivial=True)
            done = hopper.warpgroup_mma_wait(num_outstanding=GROUPS - 1 - g, deps=(sums[g],))
            y += done.to(gl.float32) * scales.to(gl.float32)[:, None]
        stage += 1
        wraps = stage == STAGES
        stage = gl.where(wraps, 0, stage)
        phase = gl.where(wraps, phase ^ 1, phase)
    if not HELD:
        x_scales = load_x_scales(x_scales_ptr, first, M, COLUMNS, DIGITS, layout)
    y = scaled(y * 0.0625, x_scales, DIGITS, gl.int8)  # codes were times 16
    finish(y, bias, out_ptr, first, row, part, M, N, ACTIVATION, layout)
    for s in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(s))


@gluon.jit
def _load_scales(scales_desc, row, group, bar, scales_ring, stage, GATED: gl.constexpr, pred):
    """Start to copy the scales of one stage's weights."""
    if GATED:
        async_load(scales_desc, [group, row // 16, 0, 0], bar, scales_ring.index(stage), pred=pred)
    else:
        async_load(scales_desc, [group, row], bar, scales_ring.index(stage), pred=pred)


def groups_of(columns: int) -> int:
    """Return the number of groups per stage; with many columns of codes of x, the sums of two would spill."""
    return 2 if columns < 64 else 1


def grouped_ring_linear(
    *, x: AnyRows, weight: GroupedWeight, bias=None, activation: str = "none", parts=1,
    block_n: int | None = None, dependent: int = False,
) -> Tensor:  # fmt: skip
    """Compute ``f(x @ weight.T + bias)`` as ``linear.some_rows_linear_ref`` does, in Gluon.

    x: ``[M, K]``, in codes of "int8"; or a tensor, as in :func:`ring.ring_linear`.
    weight: ``[N, K]``, with 16-bit scales; N must be a multiple of 16.
    block_n, dependent: as in ``ring.ring_linear``.
    """
    (rows, k), n, dtype = x.shape, len(weight), x.dtype
    x, x_scales, digits = parts_of_rows(x)
    held = held_of(k // parts) if x_scales is None else 0
    digits = 2 if held else digits
    width = n // 2 if activation == "swiglu" else n
    size, kind = ((rows, width), dtype) if parts == 1 else ((parts, rows, n), torch.float32)
    out = torch.empty(*size, dtype=kind, device=x.device)
    columns = min(MOST_COLUMNS, max(8, digits * next_power_of_2(rows)))
    padded, groups = columns // digits, groups_of(columns)
    block_n = block_n or block_n_of(columns // 2, n, parts)
    row_blocks, blocks = cdiv(rows, padded), cdiv(n, block_n)
    tiles = cdiv(cdiv(k, GROUP * groups), parts)
    stage_bytes = groups * (GROUP // 2 * block_n + GROUP * (0 if held else columns) + 2 * block_n)
    held_bytes = held * columns * GROUP
    stages = fitting_stages(stage_bytes, row_blocks * blocks * parts, tiles, 2 * MOST_STAGES, held_bytes)
    gated = activation == "swiglu"
    weights = (described_pairs if gated else described)(weight.codes, block_n, GROUP // 2 * groups)
    scales = _described_scales(weight.scales, groups, block_n, gated)
    _grouped_ring_kernel[(row_blocks, blocks, parts)](
        weights, scales, x if held else described(x.view(-1, k), columns, GROUP * groups), x_scales,
        out if bias is None else bias, out, rows, n, tiles, ROWS=padded, DIGITS=digits, HELD=held,
        BLOCK_N=block_n, GROUPS=groups, STAGES=stages, BIAS=bias is not None, ACTIVATION=activation,
        REFILL=tiles > stages, num_warps=block_n // 16, **launch_options(dependent),
    )  # fmt: skip
    return out


def _described_scales(scales: Tensor, groups: int, rows: int, gated: bool) -> GluonDescriptor:
    """Return a TMA descriptor of tiles ``[groups, rows]`` of scales, in the order of the weight's rows."""
    k, n = scales.shape
    if not gated:
        return described(scales, groups, rows)
    return descriptor(scales, [k, n // 16, 2, 8], [n, 8, n // 2, 1], [groups, rows // 16, 2, 8])
