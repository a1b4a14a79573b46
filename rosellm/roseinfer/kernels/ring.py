"""A GEMM for few rows on Hopper GPUs whose weights are in flight before its input is ready.

Each program owns 64 or 128 rows of the weight and one range of K. Before it waits for the kernel before it,
it starts TMA copies of its first weight tiles into a ring of stages in shared memory; after the wait, the
tiles of x follow, and each stage is filled again once its product is done. The products are transposed,
``weight @ x.T``, so that the wide operand of ``wgmma`` is the weight and few rows of x are not padded. For
"swiglu", 8 rows of the gate alternate with 8 of the up projection, so that each thread has both factors.
Weights that arrive before their GEMM's turn are what NVIDIA's CUTLASS example 63 shows.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from rosellm.models.quantized import AnyWeight, parts_of_rows, parts_of_weight
from rosellm.roseinfer.kernels.dependent_launch import launch_options
from rosellm.triton_or_none import GluonDescriptor, cdiv, gl, gluon, hopper, next_power_of_2

ROLES = {"_ring_kernel": "GEMM"}
MOST_ROWS, BLOCK_N, BLOCK_K, MOST_STAGES = 64, 64, 128, 8
MOST_COLUMNS = 128  # of codes of x per program
SHARED_BYTES, FEWEST_BYTES = 200_000, 60_000  # of the stages of all programs of an SM; of one program
FEWEST_PROGRAMS, NUM_SMS = 36, 132  # of a launch of whole K for which it is faster; of an H200
HELD_K = 4096  # elements of a row that a program quantises, at most

mbarrier, tma = hopper.mbarrier, hopper.tma
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # renamed
memory = gl.shared_memory_descriptor
reinterpret = memory.reinterpret if hasattr(memory, "reinterpret") else memory._reinterpret  # noqa: SLF001


@gluon.jit
def load_weights(w_desc, row, k, bar, ring, stage, GATED: gl.constexpr, pred):
    """Start to copy one stage's weights."""
    if GATED:
        async_load(w_desc, [row // 16, 0, 0, k], bar, ring.index(stage), pred=pred)
    else:
        async_load(w_desc, [row, k], bar, ring.index(stage), pred=pred)


@gluon.jit
def griddepcontrol(what: gl.constexpr):
    gl.inline_asm_elementwise(
        "griddepcontrol." + what + "; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit(do_not_specialize=["M", "tiles"])
def _ring_kernel(
    w_desc, x, scales_ptr, x_scales_ptr, bias_ptr, out_ptr, M, N, tiles,
    ROWS: gl.constexpr, DIGITS: gl.constexpr, HELD: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
    REFILL: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Compute one tile ``[BLOCK_N, ROWS]`` of the transposed product, over ``tiles`` tiles of K.

    Programs of the same weights run at about the same time, so that one of them finds the weights in L2.

    x: a TMA descriptor; or the input itself, of which each program quantises its range of K.
    scales_ptr, x_scales_ptr: the scales of quantised weights and rows of x, or None.
    DIGITS: the number of codes per element of x; 1 if it is not quantised.
    HELD: the tiles of a single row x that a program quantises, a power of two; 0 if it copies tiles of x.
    REFILL: whether there are more tiles than stages.
    """
    GATED: gl.constexpr = ACTIVATION == "swiglu"
    COLUMNS: gl.constexpr = ROWS * DIGITS
    ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    x_ring = x_tiles(x, w_desc.dtype, HELD, STAGES, COLUMNS, BLOCK_K)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    BYTES: gl.constexpr = w_desc.block_type.nbytes + (0 if HELD else x.block_type.nbytes)
    first, row, part = gl.program_id(0) * ROWS, gl.program_id(1) * BLOCK_N, gl.program_id(2)
    begin = part * tiles * BLOCK_K
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=1)
    hopper.fence_async_shared()
    for s in gl.static_range(STAGES):
        mbarrier.expect(bars.index(s), BYTES, pred=s < tiles)
        load_weights(w_desc, row, begin + s * BLOCK_K, bars.index(s), ring, s, GATED, s < tiles)
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[warps, 1],
        instr_shape=[16, COLUMNS, 256 // w_desc.dtype.primitive_bitwidth],
    )
    if scales_ptr is not None:
        scales = load_of_rows(scales_ptr, row, N, BLOCK_N, GATED, layout, True)
    bias = load_of_rows(bias_ptr, row, N, BLOCK_N, GATED, layout, part == 0) if BIAS else None
    if DEPENDENT:
        griddepcontrol("wait")
        griddepcontrol("launch_dependents")
    if HELD:
        x_scales = hold_codes(x + begin, x_ring, tiles)
    else:
        for s in gl.static_range(STAGES):
            place = [first * DIGITS, begin + s * BLOCK_K]
            async_load(x, place, bars.index(s), x_ring.index(s), pred=s < tiles)
    SUM: gl.constexpr = gl.int32 if w_desc.dtype == gl.int8 else gl.float32
    sums = hopper.warpgroup_mma_init(gl.zeros((BLOCK_N, COLUMNS), SUM, layout))
    stage = 0
    phase = 0
    for tile in range(tiles):
        mbarrier.wait(bars.index(stage), phase)
        x_tile = x_ring.index(tile if HELD else stage).permute((1, 0))
        w_tile = ring.index(stage)
        if GATED:
            w_tile = w_tile.reshape((BLOCK_N, BLOCK_K))
        done = hopper.warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
        sums = hopper.warpgroup_mma(w_tile, x_tile, done, is_async=True)
        if REFILL:  # the previous product has ended, so that its stage is free
            ahead = tile - 1 + STAGES
            free = gl.where(stage == 0, STAGES - 1, stage - 1)
            more = (tile > 0) & (ahead < tiles)
            bar = bars.index(free)
            mbarrier.expect(bar, BYTES, pred=more)
            load_weights(w_desc, row, begin + ahead * BLOCK_K, bar, ring, free, GATED, more)
            if not HELD:
                place = [first * DIGITS, begin + ahead * BLOCK_K]
                async_load(x, place, bar, x_ring.index(free), pred=more)
        stage += 1
        wraps = stage == STAGES
        stage = gl.where(wraps, 0, stage)
        phase = gl.where(wraps, phase ^ 1, phase)
    y = hopper.warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
    if scales_ptr is not None:
        if not HELD:
            x_scales = load_x_scales(x_scales_ptr, first, M, COLUMNS, DIGITS, layout)
        y = scaled(y.to(gl.float32) * scales[:, None], x_scales, DIGITS, w_desc.dtype)
    finish(y, bias, out_ptr, first, row, part, M, N, ACTIVATION, layout)
    for s in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(s))


@gluon.jit
def load_of_rows(
    pointer, row, N, BLOCK_N: gl.constexpr, GATED: gl.constexpr, layout: gl.constexpr, is_wanted
):
    """Load one value for each of a tile's weight rows, ``[BLOCK_N]``, in fp32; 0 if it is not wanted."""
    i = row + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    n = i // 16 * 8 + i % 8 + i // 8 % 2 * (N // 2) if GATED else i
    return gl.load(pointer + n, mask=(i < N) & is_wanted, other=0.0).to(gl.float32)


@gluon.jit
def finish(y, bias, out_ptr, first, row, part, M, N, ACTIVATION: gl.constexpr, layout: gl.constexpr):
    """Add the bias to y ``[BLOCK_N, ROWS]`` fp32, apply the activation, and store the result.

    bias: ``[BLOCK_N]``, or None. first, row: the first row of x, and of the weight. layout: that of sums.
    """
    GATED: gl.constexpr = ACTIVATION == "swiglu"
    PAIRS: gl.constexpr = y.shape[0] // 16  # of 8 rows of the gate and 8 of the up projection
    ROWS: gl.constexpr = y.shape[1]
    if bias is not None:
        y += gl.convert_layout(bias, gl.SliceLayout(1, y.type.layout))[:, None]
    if ACTIVATION == "gelu":
        y = y / (1.0 + gl.exp(-1.5957691216057308 * (y + 0.044715 * y * y * y)))
    if GATED:
        gate, up = gl.split(gl.permute(gl.reshape(y, (PAIRS, 2, 8, ROWS)), (0, 2, 3, 1)))
        y = gl.reshape(gate / (1.0 + gl.exp(-gate)) * up, (PAIRS * 8, ROWS))
    stored: gl.constexpr = (
        layout if y.type.layout == layout else gl.BlockedLayout([1, 1], [8, 4], [gl.num_warps(), 1], [0, 1])
    )
    i = (row // 2 if GATED else row) + gl.arange(0, y.shape[0], layout=gl.SliceLayout(1, stored))
    m = first + gl.arange(0, ROWS, layout=gl.SliceLayout(0, stored))
    width = N // 2 if GATED else N
    target = out_ptr + (part * M + m)[None, :].to(gl.int64) * width + i[:, None]
    y = gl.convert_layout(y.to(out_ptr.dtype.element_ty), stored)
    gl.store(target, y, mask=(i < width)[:, None] & (m < M)[None, :])


@gluon.jit
def x_tiles(
    x, dtype: gl.constexpr, HELD: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr,
    BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Return shared memory for tiles of x ``[COLUMNS, BLOCK_K]``: of STAGES, or of all that are held."""
    if HELD:
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, 128], dtype)
        return gl.allocate_shared_memory(dtype, [HELD, COLUMNS, 128], layout)
    else:
        return gl.allocate_shared_memory(x.dtype, [STAGES, COLUMNS, BLOCK_K], x.layout)


@gluon.jit
def hold_codes(x_ptr, held, n_tiles):
    """Quantise ``n_tiles`` tiles of a row x to two digits, in all columns, and return its scale.

    held: shared memory ``[TILES, COLUMNS, 128]`` for the codes.
    """
    TILES: gl.constexpr = held.shape[0]
    TIMES: gl.constexpr = held.shape[1] // 2
    LARGEST: gl.constexpr = 127.0 if held.dtype == gl.int8 else 448.0
    FINER: gl.constexpr = 254.0 if held.dtype == gl.int8 else 16.0  # ``quantized.FINER``
    own: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    tile = gl.arange(0, TILES, layout=gl.SliceLayout(1, own))[:, None]
    place = x_ptr + tile * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, own))[None, :]
    x = gl.load(place, mask=tile < n_tiles, other=0.0).to(gl.float32)
    largest = gl.max(gl.max(gl.where(x == x, gl.abs(x), float("inf")), axis=0), axis=0)
    scale = gl.maximum(largest / LARGEST, 1.1754943508222875e-38)  # the smallest normal number
    x = gl.minimum(gl.maximum(x * (1.0 / scale), -LARGEST), LARGEST)
    first = nearest(x, held.dtype)
    rest = nearest((x - first) * FINER, held.dtype)
    codes = gl.permute(gl.join(first.to(held.dtype), rest.to(held.dtype)), (0, 2, 1))
    codes = gl.reshape(codes, (TILES, 1, 2, 128)).broadcast_to((TILES, TIMES, 2, 128))
    whole: gl.constexpr = [TILES * held.shape[1], 128]
    reinterpret(held, held.dtype, whole, held.layout).store(gl.reshape(codes, whole))
    hopper.fence_async_shared()
    return scale


@gluon.jit
def nearest(x, dtype: gl.constexpr):
    """Round to the nearest code, in fp32.

    That of FP8 keeps 3 bits of mantissa; reading a code back instead is miscompiled by ptxas 12.8.
    """
    if dtype == gl.int8:
        x = (x + 12582912.0) - 12582912.0  # 1.5 * 2 ** 23: to the nearest integer
    else:
        x = ((x.to(gl.int32, bitcast=True) + 0x80000) & -0x100000).to(gl.float32, bitcast=True)
    return x


@gluon.jit
def load_x_scales(x_scales_ptr, first, M, COLUMNS: gl.constexpr, DIGITS: gl.constexpr, layout: gl.constexpr):
    """Load the scale of each column of codes of x. first: the first row of x. layout: that of sums."""
    m = first + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout)) // DIGITS
    return gl.load(x_scales_ptr + m, mask=m < M, other=0.0)


@gluon.jit
def scaled(sums, x_scales, DIGITS: gl.constexpr, dtype: gl.constexpr):
    """Return fp32 sums ``[BLOCK_N, ROWS x DIGITS]`` times scales of x, added up to ``[BLOCK_N, ROWS]``.

    x_scales: the scale of each column, or that of all. dtype: that of x's codes.
    """
    N: gl.constexpr = sums.shape[0]
    COLUMNS: gl.constexpr = sums.shape[1]
    LOW: gl.constexpr = 1 / 254 if dtype == gl.int8 else 1 / 16  # ``quantized.FINER``
    c = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, sums.type.layout))
    y = sums * (gl.where(c % DIGITS == 0, 1.0, LOW) * x_scales)[None, :]
    return gl.sum(gl.reshape(y, (N, COLUMNS // 2, 2)), axis=2) if DIGITS == 2 else y


def runs_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernel can run: on GPUs of compute capability 9.0, in fp16 and bf16."""
    return device.type == "cuda" and _is_hopper(device) and dtype.itemsize == 2


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def takes(rows: int, k: int) -> bool:
    """Return whether the kernel can run, and by rule is faster, for this number of rows and this K."""
    return rows <= MOST_ROWS and k % 8 == 0


def is_faster(x: Tensor, weight: AnyWeight, activation: str, parts: int) -> bool:
    """Return whether the kernel can run, and is faster than ``linear.some_rows_linear`` on an H200."""
    rows, k = x.shape
    if not isinstance(weight, Tensor):
        return False
    if not (takes(rows, k) and runs_on(x.device, x.dtype)):
        return False
    if activation == "swiglu":
        return len(weight) % 16 == 0 and cdiv(len(weight), 2 * BLOCK_N) >= FEWEST_PROGRAMS
    fits = cdiv(len(weight), BLOCK_N) >= FEWEST_PROGRAMS and (activation == "gelu" or k < 1024)
    return parts > 1 or fits


def parts_of(rows: int, n: int, k: int, most_programs: int = NUM_SMS) -> int:
    """Return into how many ranges to split K: at most ``most_programs`` programs, none of few tiles.

    x is ``[rows, k]``, and the weight ``[n, k]``.
    """
    parts, fewest_tiles = 1, 3 if max(n, k) < 1024 else 4
    while 2 * parts * cdiv(n, BLOCK_N) <= most_programs and k >= 2 * parts * fewest_tiles * BLOCK_K:
        parts *= 2
    return parts


def block_n_of(rows: int, n: int, parts: int) -> int:
    """Return the number of weight rows per program.

    Doubling it halves the reads of x, but is faster only if there are still enough programs.

    rows: those of x, or any number above 32 if x is quantised.
    """
    return 2 * BLOCK_N if rows > 32 and parts == 1 and n > 3 * BLOCK_N * NUM_SMS else BLOCK_N


def stages_of(
    columns: int, programs: int, tiles: int, block_n: int = BLOCK_N, itemsize: int = 2, held: int = 0
) -> int:
    """Return the number of stages of a program that multiplies ``tiles`` tiles.

    columns: rows of x per program, or of their codes.
    itemsize: bytes of a weight, and of an element or code of x.
    held: the result of :func:`held_of`, or 0.
    """
    stage_bytes = itemsize * (block_n + (0 if held else columns)) * BLOCK_K
    held_bytes = held * columns * BLOCK_K
    return fitting_stages(stage_bytes, programs, tiles, 2 * MOST_STAGES // itemsize, held_bytes)


def fitting_stages(stage_bytes: int, programs: int, tiles: int, most: int, held_bytes: int = 0) -> int:
    """Return the number of stages of a program that multiplies ``tiles`` tiles, at most ``most``.

    stage_bytes, held_bytes: shared memory of a stage, and of other things.

    A stage is filled again while the tensor core reads another: there are at least two, unless all tiles fit
    in one.
    """
    shared_bytes = max(FEWEST_BYTES, SHARED_BYTES // cdiv(programs, NUM_SMS))
    return min(most, tiles, max(2, (shared_bytes - held_bytes) // stage_bytes))


def ring_linear(
    *, x, weight, bias=None, activation: str = "none", parts=1, block_n: int | None = None,
    dependent: int = False,
) -> Tensor:  # fmt: skip
    """Compute ``f(x @ weight.T + bias)`` as ``linear.some_rows_linear_ref`` does, in Gluon.

    x: ``[M, K]``, or ``QuantizedRows`` if the weight is quantised, too. The tensors must be contiguous, and
        rows of K elements or codes a multiple of 16 bytes; for "swiglu", N must be a multiple of 16.
    weight: ``[N, K]``, or a ``QuantizedWeight``, for which programs quantise x to two digits if it is a
        tensor; this requires :func:`holds`.
    block_n: the number of weight rows per program, 64 or 128; None for that of :func:`block_n_of`.
    dependent: the launch mode, as in ``launch_options``.
    """
    (rows, k), n, dtype = x.shape, len(weight), x.dtype
    weight, scales = parts_of_weight(weight)
    x, x_scales, digits = parts_of_rows(x)
    held = held_of(k // parts) if scales is not None and x_scales is None else 0
    digits = 2 if held else digits
    width = n // 2 if activation == "swiglu" else n
    size, kind = ((rows, width), dtype) if parts == 1 else ((parts, rows, n), torch.float32)
    out = torch.empty(*size, dtype=kind, device=x.device)
    block_n = block_n or block_n_of(rows if scales is None else MOST_COLUMNS, n, parts)
    columns = min(MOST_COLUMNS, max(8, digits * next_power_of_2(rows)))
    padded = columns // digits
    row_blocks, blocks, tiles = cdiv(rows, padded), cdiv(n, block_n), cdiv(cdiv(k, BLOCK_K), parts)
    stages = stages_of(columns, row_blocks * blocks * parts, tiles, block_n, weight.element_size(), held)
    weights = described_pairs(weight, block_n) if activation == "swiglu" else described(weight, block_n)
    _ring_kernel[(row_blocks, blocks, parts)](
        weights, x if held else described(x.view(-1, k), columns), scales, x_scales,
        out if bias is None else bias, out, rows, n, tiles, ROWS=padded, DIGITS=digits, HELD=held,
        BLOCK_N=block_n, BLOCK_K=BLOCK_K, STAGES=stages, BIAS=bias is not None, ACTIVATION=activation,
        REFILL=tiles > stages, num_warps=4, **launch_options(dependent),
    )  # fmt: skip
    return out


def holds(rows: int, k: int, parts: int) -> bool:
    """Return whether each program can quantise its range of K: of a single row, in pairs of tiles."""
    return rows == 1 and k // parts <= HELD_K and k % (parts * 2 * BLOCK_K) == 0


def held_of(k: int) -> int:
    """Return how many tiles, a power of two, hold k elements."""
    return next_power_of_2(cdiv(k, BLOCK_K))


def described(tensor: Tensor, rows: int, columns: int = BLOCK_K) -> GluonDescriptor:
    """Return a TMA descriptor of tiles ``[rows, columns]`` of a contiguous matrix."""
    return descriptor(tensor, list(tensor.shape), [tensor.shape[1], 1], [rows, columns])


def described_pairs(weight: Tensor, rows: int, columns: int = BLOCK_K) -> GluonDescriptor:
    """Return a TMA descriptor of tiles ``[rows, columns]``: in turn 8 rows of each half of ``weight``."""
    n, k = weight.shape
    return descriptor(weight, [n // 16, 2, 8, k], [8 * k, n // 2 * k, k, 1], [rows // 16, 2, 8, columns])


def descriptor(tensor: Tensor, shape: list[int], strides: list[int], block: list[int]) -> GluonDescriptor:
    return GluonDescriptor(tensor, shape, strides, block, _layout(tuple(block), tensor.dtype))


@cache
def _layout(block: tuple[int, ...], dtype: torch.dtype):
    name = "float8e4nv" if dtype == torch.float8_e4m3fn else str(dtype).removeprefix("torch.")
    return gl.NVMMASharedLayout.get_default_for(block, getattr(gl, name))
