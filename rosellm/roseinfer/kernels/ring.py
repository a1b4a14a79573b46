"""A GEMM for 2 to 64 rows on Hopper GPUs whose weights are in flight before its input is ready.

Each program owns 64 rows of the weight and one range of K. Before it waits for the kernel before it, it
starts TMA copies of its first weight tiles into a ring of stages in shared memory; after the wait, the tiles
of x follow, and each stage is filled again once its product is done. The products are transposed,
``weight @ x.T``, so that the wide operand of ``wgmma`` is the weight and few rows of x are not padded.
Weights that arrive before their GEMM's turn are what NVIDIA's CUTLASS example 63 shows.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from rosellm.roseinfer.kernels.dependent_launch import launch_options
from rosellm.triton_or_none import GluonDescriptor, cdiv, gl, gluon, hopper, next_power_of_2

ROLES = {"_ring_kernel": "GEMM"}
MOST_ROWS, BLOCK_N, BLOCK_K, MOST_STAGES = 64, 64, 128, 8
SHARED_BYTES = 200_000  # of a program's stages
FEWEST_PROGRAMS, MOST_PROGRAMS = 40, 132

mbarrier, tma = hopper.mbarrier, hopper.tma
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # renamed


@gluon.jit
def _load_weights(w_desc, row, half, k, bar, ring, stage, GATED: gl.constexpr, pred):
    """Start to copy one stage's weights: for "swiglu", rows of the gate and of the up projection."""
    if GATED:
        async_load(w_desc, [row, k], bar, ring.index(2 * stage), pred=pred)
        async_load(w_desc, [half + row, k], bar, ring.index(2 * stage + 1), pred=pred)
    else:
        async_load(w_desc, [row, k], bar, ring.index(stage), pred=pred)


@gluon.jit
def _griddepcontrol(what: gl.constexpr):
    gl.inline_asm_elementwise(
        "griddepcontrol." + what + "; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit(do_not_specialize=["M", "tiles"])
def _ring_kernel(
    w_desc, x_desc, bias_ptr, out_ptr, M, N, tiles, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
    REFILL: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Compute one tile ``[BLOCK_N, ROWS]`` of the transposed result, over ``tiles`` tiles of K.

    REFILL: whether there are more tiles than stages.
    """
    GATED: gl.constexpr = ACTIVATION == "swiglu"
    COPIES: gl.constexpr = 2 if GATED else 1
    ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * COPIES, BLOCK_N, BLOCK_K], w_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, ROWS, BLOCK_K], x_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    BYTES: gl.constexpr = COPIES * w_desc.block_type.nbytes + x_desc.block_type.nbytes
    row, part, half = gl.program_id(0) * BLOCK_N, gl.program_id(1), N // 2
    begin = part * tiles * BLOCK_K
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=1)
    hopper.fence_async_shared()
    for s in gl.static_range(STAGES):
        mbarrier.expect(bars.index(s), BYTES, pred=s < tiles)
        _load_weights(w_desc, row, half, begin + s * BLOCK_K, bars.index(s), ring, s, GATED, s < tiles)
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, ROWS, 16]
    )
    n = row + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    width = half if GATED else N
    if BIAS:
        bias = gl.load(bias_ptr + n, mask=n < width, other=0.0).to(gl.float32)
        up_bias = bias
        if GATED:
            up_bias = gl.load(bias_ptr + half + n, mask=n < width, other=0.0).to(gl.float32)
    if DEPENDENT:
        _griddepcontrol("wait")
        _griddepcontrol("launch_dependents")
    for s in gl.static_range(STAGES):
        async_load(x_desc, [0, begin + s * BLOCK_K], bars.index(s), x_ring.index(s), pred=s < tiles)
    sums = hopper.warpgroup_mma_init(gl.zeros((BLOCK_N, ROWS), gl.float32, layout))
    ups = hopper.warpgroup_mma_init(gl.zeros((BLOCK_N, ROWS), gl.float32, layout))
    stage = 0
    phase = 0
    for tile in range(tiles):
        mbarrier.wait(bars.index(stage), phase)
        x_tile = x_ring.index(stage).permute((1, 0))
        if GATED:
            done, done_ups = hopper.warpgroup_mma_wait(num_outstanding=0, deps=(sums, ups))
            sums = hopper.warpgroup_mma(ring.index(2 * stage), x_tile, done, is_async=True)
            ups = hopper.warpgroup_mma(ring.index(2 * stage + 1), x_tile, done_ups, is_async=True)
        else:
            done = hopper.warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
            sums = hopper.warpgroup_mma(ring.index(stage), x_tile, done, is_async=True)
        if REFILL:  # the previous product has ended, so that its stage is free
            ahead = tile - 1 + STAGES
            free = gl.where(stage == 0, STAGES - 1, stage - 1)
            more = (tile > 0) & (ahead < tiles)
            bar = bars.index(free)
            mbarrier.expect(bar, BYTES, pred=more)
            _load_weights(w_desc, row, half, begin + ahead * BLOCK_K, bar, ring, free, GATED, more)
            async_load(x_desc, [0, begin + ahead * BLOCK_K], bar, x_ring.index(free), pred=more)
        stage += 1
        wraps = stage == STAGES
        stage = gl.where(wraps, 0, stage)
        phase = gl.where(wraps, phase ^ 1, phase)
    if GATED:
        y, up = hopper.warpgroup_mma_wait(num_outstanding=0, deps=(sums, ups))
    else:
        y = hopper.warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
    for s in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(s))
    if BIAS:
        y += bias[:, None]
    if GATED:
        if BIAS:
            up += up_bias[:, None]
        y = y / (1.0 + gl.exp(-y)) * up
    if ACTIVATION == "gelu":
        y = y / (1.0 + gl.exp(-1.5957691216057308 * (y + 0.044715 * y * y * y)))
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    target = out_ptr + (part * M + m)[None, :].to(gl.int64) * width + n[:, None]
    gl.store(target, y.to(out_ptr.dtype.element_ty), mask=(n < width)[:, None] & (m < M)[None, :])


def runs_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernel can run: on GPUs of compute capability 9.0, in fp16 and bf16."""
    return device.type == "cuda" and _is_hopper(device) and dtype.itemsize == 2


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def is_faster(x: Tensor, weight: Tensor, activation: str, parts: int) -> bool:
    """Return whether the kernel can run, and is faster than ``linear.some_rows_linear`` on an H200."""
    rows, k = x.shape
    if not (2 <= rows <= MOST_ROWS and k % 8 == 0 and runs_on(x.device, x.dtype)):
        return False
    columns = len(weight) // (2 if activation == "swiglu" else 1)
    return parts > 1 or (activation != "none" and cdiv(columns, BLOCK_N) >= FEWEST_PROGRAMS)


def parts_of(rows: int, n: int, k: int) -> int:
    """Return into how many ranges to split K: at most ``MOST_PROGRAMS`` programs, none of few tiles.

    x is ``[rows, k]``, and the weight ``[n, k]``.
    """
    parts, fewest_tiles = 1, 3 if n < 1024 else 4
    while 2 * parts * cdiv(n, BLOCK_N) <= MOST_PROGRAMS and k >= 2 * parts * fewest_tiles * BLOCK_K:
        parts *= 2
    return parts


def ring_linear(*, x, weight, bias=None, activation: str = "none", parts=1, dependent: int = False) -> Tensor:
    """Compute ``f(x @ weight.T + bias)`` as ``linear.some_rows_linear_ref`` does, in Gluon.

    x: ``[M, K]`` with M at most ``MOST_ROWS``. The tensors must be contiguous, and K a multiple of 8.
    dependent: the launch mode, as in ``launch_options``.
    """
    (rows, k), n = x.shape, len(weight)
    gated = activation == "swiglu"
    width = n // 2 if gated else n
    out = x.new_empty(rows, width) if parts == 1 else x.new_empty(parts, rows, n, dtype=torch.float32)
    padded = max(8, next_power_of_2(rows))
    block_k = BLOCK_K // 2 if gated and padded > 32 else BLOCK_K
    tiles = cdiv(cdiv(k, block_k), parts)
    stages = min(MOST_STAGES, tiles, SHARED_BYTES // (((1 + gated) * BLOCK_N + padded) * block_k * 2))
    _ring_kernel[(cdiv(width, BLOCK_N), parts)](
        _described(weight, BLOCK_N, block_k), _described(x, padded, block_k), x if bias is None else bias,
        out, rows, n, tiles,
        ROWS=padded, BLOCK_N=BLOCK_N, BLOCK_K=block_k, STAGES=stages, BIAS=bias is not None,
        ACTIVATION=activation, REFILL=tiles > stages, num_warps=4, **launch_options(dependent),
    )  # fmt: skip
    return out


def _described(tensor: Tensor, rows: int, columns: int) -> GluonDescriptor:
    """Return a TMA descriptor of tiles ``[rows, columns]``."""
    dtype = gl.bfloat16 if tensor.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return GluonDescriptor(tensor, list(tensor.shape), [tensor.shape[1], 1], [rows, columns], layout)
