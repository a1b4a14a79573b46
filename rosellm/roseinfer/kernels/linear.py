"""Linear layers for few rows, fused with what surrounds them in a layer: torch specs and two kernels.

Decode multiplies M rows, one per sequence, by weights that are read once per step. Such a product is bound by
the latency of a chain of loads, not by arithmetic: what helps is many programs, weights in flight early, and
no round trip through memory for the LayerNorm before it and the GELU or residual sum after it.

Weights are ``[N, K]`` with K contiguous, the transpose of a GPT-2 checkpoint's; activations are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.triton_or_none import tl, triton

ROLES = {"_few_rows_kernel": "GEMM", "_some_rows_kernel": "GEMM"}
Shape = Callable[[int, int, int, torch.dtype], tuple[int, int, int, int, int]]
FEW_ROWS = 16
SOME_ROWS = 256


def few_rows_linear_ref(
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    column_sums: Tensor | None = None,
    eps: float = 0.0,
    gelu: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """The specification: ``f(x @ weight.T + bias)``, ``[M, K]`` x ``[N, K]`` → ``[M, N]``, in fp32.

    column_sums ``[N]`` fp32, the sums of ``weight`` over K: if given, each row of x is normalised to mean 0
    and variance 1. That is done after the product, ``(x @ w - mean * sum(w)) / deviation``, so the product
    need not wait for it; a LayerNorm's scale and shift are folded into weight and bias beforehand
    (:func:`fold_norm`). gelu: the tanh form. residual ``[M, N]``: updated in place and returned.
    """
    y = x.float() @ weight.float().t()
    if column_sums is not None:
        mean = x.float().mean(dim=1, keepdim=True)
        variance = x.float().var(dim=1, correction=0, keepdim=True)
        y = (y - mean * column_sums) * (variance + eps).rsqrt()
    y = y + bias.float()
    if gelu:
        y = F.gelu(y, approximate="tanh")
    if residual is None:
        return y.to(x.dtype)
    return residual.copy_(residual.float() + y)


def some_rows_linear_ref(
    *, x: Tensor, weight: Tensor, bias: Tensor | None = None, gelu: bool = False, parts: int = 1
) -> Tensor:
    """The specification: ``f(x @ weight.T + bias)`` → ``[M, N]``; or, without a bias, ``parts`` partial sums.

    With ``parts`` above 1 (split-K) the result is ``[parts, M, N]`` fp32: products over that many equal
    ranges of K, which the consumer adds up.
    """
    if parts == 1:
        y = x.float() @ weight.float().t()
        y = y if bias is None else y + bias.float()
        return (F.gelu(y, approximate="tanh") if gelu else y).to(x.dtype)
    ranges = zip(x.float().chunk(parts, dim=1), weight.float().chunk(parts, dim=1), strict=True)
    return torch.stack([a @ w.t() for a, w in ranges])


def fold_norm(weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Weight ``[N, K]`` and bias ``[N]`` that absorb a LayerNorm's scale and shift, for a normalised x."""
    folded = (weight.float() * scale.float()).to(weight.dtype)
    return folded.contiguous(), (bias.float() + weight.float() @ shift.float()).to(bias.dtype)


@cache
def shared_memory(device: torch.device) -> int | None:
    """Shared memory per program in bytes, from 65,536 (sm_75) to 232,448 (sm_90); None on a CPU."""
    if device.type == "cpu":
        return None
    return triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]


def fitting_stages(stages: int, block_m: int, block_n: int, block_k: int, x: Tensor) -> int:
    """Pipeline stages of a product's tiles, in x's dtype, that fit the shared memory of x's device."""
    limit, stage = shared_memory(x.device), (block_m + block_n) * block_k * x.element_size()
    return stages if limit is None else max(1, min(stages, limit // stage))


@triton.jit
def gelu(y):
    return y / (1.0 + tl.exp(-1.5957691216057308 * (y + 0.044715 * y * y * y)))


@triton.jit(do_not_specialize=["M"])
def _few_rows_kernel(
    x_ptr, weight_ptr, bias_ptr, sums_ptr, out_ptr, eps, M, N,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr,
    BLOCK_K: tl.constexpr, NORM: tl.constexpr, GELU: tl.constexpr, ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns per program, for all M <= BLOCK_M rows; weights are loaded before the inputs are.

    K is cut into chunks of SLICES x BLOCK_K; the slices of a chunk are separate products, one per warp,
    summed at the end: one chain of K / 16 matrix instructions would take longer than loading the weights.
    """
    CHUNKS: tl.constexpr = (K + SLICES * BLOCK_K - 1) // (SLICES * BLOCK_K)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    # [SLICES, 1, BLOCK_K]
    inner = tl.arange(0, SLICES)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    weights = ()  # type: tuple
    for chunk in tl.static_range(CHUNKS):
        k = chunk * SLICES * BLOCK_K + inner
        held = (columns[None, :, None] < N) & (k < K)
        place = weight_ptr + columns[None, :, None].to(tl.int64) * K + k
        weights = weights + (tl.load(place, mask=held, other=0.0),)  # [SLICES, BLOCK_N, BLOCK_K]
    bias = tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
    if NORM:
        sums = tl.load(sums_ptr + columns, mask=columns < N, other=0.0)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    target = out_ptr + rows[:, None] * N + columns[None, :]
    if ADD:
        residual = tl.load(target, mask=inside, other=0.0).to(tl.float32)
    # Which operand provides the matrix instruction's 16 rows.
    WEIGHTS_FIRST: tl.constexpr = BLOCK_N >= 16
    acc = tl.zeros((SLICES, BLOCK_N, BLOCK_M) if WEIGHTS_FIRST else (SLICES, BLOCK_M, BLOCK_N), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        k = chunk * SLICES * BLOCK_K + inner
        held = (rows[None, :, None] < M) & (k < K)
        x = tl.load(x_ptr + rows[None, :, None] * K + k, mask=held, other=0.0)  # [SLICES, BLOCK_M, BLOCK_K]
        if NORM:
            wide = x.to(tl.float32)
            total += tl.sum(tl.sum(wide, axis=2), axis=0)
            squares += tl.sum(tl.sum(wide * wide, axis=2), axis=0)
        if BLOCK_M == 1:
            acc += tl.sum(weights[chunk].to(tl.float32) * x.to(tl.float32), axis=2)[:, :, None]
        elif WEIGHTS_FIRST:
            acc = tl.dot(weights[chunk], tl.permute(x, (0, 2, 1)), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.permute(weights[chunk], (0, 2, 1)), acc, input_precision="ieee")
    y = tl.sum(acc, axis=0)
    if WEIGHTS_FIRST:
        y = tl.trans(y)
    if NORM:
        mean = total / K
        variance = tl.maximum(squares / K - mean * mean, 0.0)
        y = (y - mean[:, None] * sums[None, :]) * tl.rsqrt(variance + eps)[:, None]
    y += bias[None, :]
    if GELU:
        y = gelu(y)
    if ADD:
        y += residual
    tl.store(target, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def tile_product(
    x_ptr, weight_ptr, rows, held_rows, columns, begin, N, K: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The product of these rows of x and these columns, in fp32, over WIDTH elements of K from ``begin``."""
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, WIDTH, BLOCK_K):
        inner = begin + first + k
        held = first + k < WIDTH
        x = tl.load(
            x_ptr + rows[:, None] * K + inner[None, :], mask=held_rows[:, None] & held[None, :], other=0.0
        )
        w = tl.load(
            weight_ptr + columns[None, :].to(tl.int64) * K + inner[:, None],
            mask=(columns[None, :] < N) & held[:, None],
            other=0.0,
        )
        acc = tl.dot(x, w, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["M"])
def _some_rows_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, M, N,
    K: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One BLOCK_M x BLOCK_N tile per program, over one of PARTS ranges of K in a pipelined loop."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first_row = tl.program_id(1) * BLOCK_M
    rows = tl.arange(0, BLOCK_M)  # within the tile; only its first row's offset needs 64 bits
    held_rows = first_row + rows < M
    x_ptr += first_row.to(tl.int64) * K
    part = tl.program_id(2)
    WIDTH: tl.constexpr = K // PARTS
    if BIAS:
        bias = tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    begin = part * WIDTH
    acc = tile_product(
        x_ptr, weight_ptr, rows, held_rows, columns, begin, N, K, WIDTH, BLOCK_M, BLOCK_N, BLOCK_K
    )
    if BIAS:
        acc += bias[None, :]
    if GELU:
        acc = gelu(acc)
    target = out_ptr + (part * M + first_row).to(tl.int64) * N + rows[:, None] * N + columns[None, :]
    inside = held_rows[:, None] & (columns[None, :] < N)
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=inside)


def make_few_rows_linear(dependent: int = False) -> Callable[..., Tensor]:
    """The Triton kernel for up to ``FEW_ROWS`` rows, called like :func:`few_rows_linear_ref`.

    All tensors are contiguous. With column_sums, variance is a difference of two sums and loses digits if a
    row's mean is many times its deviation.
    """
    launch = launch_options(dependent)

    def few_rows_linear(*, x, weight, bias, column_sums=None, eps=0.0, gelu=False, residual=None) -> Tensor:
        rows, k = x.shape
        n = weight.shape[0]
        out = x.new_empty(rows, n) if residual is None else residual
        block_n, slices, block_k, warps = _few_rows_shape(rows, n, k)
        sums = bias if column_sums is None else column_sums
        block_m = 1 if rows == 1 else 8 if rows <= 8 else 16
        blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "SLICES": slices, "BLOCK_K": block_k}
        fused = {"NORM": column_sums is not None, "GELU": gelu, "ADD": residual is not None}
        options = {"DEPENDENT": dependent, "num_warps": warps, **launch}
        _few_rows_kernel[(triton.cdiv(n, block_n),)](
            x, weight, bias, sums, out, eps, rows, n, K=k, **blocks, **fused, **options
        )
        return out

    return few_rows_linear


def _few_rows_shape(rows: int, n: int, k: int) -> tuple[int, int, int, int]:
    """Columns per program, slices of K, elements per slice, warps: the fastest measured on an H200."""
    if k <= 1024:
        columns = 32 if rows > 8 and n > k else 16
        return columns, 4, max(16, triton.next_power_of_2(k) // 4), 4
    return (16, 4, 256, 4) if rows == 1 else (8, 8, 128, 4)


def _some_rows_shape(rows: int, n: int, k: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """Tile sizes, warps and pipeline stages: the fastest measured on an H200."""
    if dtype == torch.float32:
        return 32, 32, 32, 4, 3
    if rows <= 32:
        return (32, 16, 128, 4, 4) if n == k else (32, 32, 128, 4, 4)
    if rows <= 128:
        warps = 8 if n == 3 * k else 4  # lets attention, which starts alongside, spread better
        return (64, 16, 128, 4, 4) if n == k else (64, 64, 64, 4, 5) if k > n else (64, 32, 64, warps, 6)
    return (64, 32, 128, 4, 4) if n == k else (64, 64, 64, 8, 5)


def make_some_rows_linear(dependent: int = False, shape: Shape = _some_rows_shape) -> Callable[..., Tensor]:
    """The Triton kernel for up to ``SOME_ROWS`` rows, called like :func:`some_rows_linear_ref`.

    All tensors are contiguous. shape: rows, n, k and dtype → tile sizes, warps and pipeline stages.
    """
    launch = launch_options(dependent)

    def some_rows_linear(*, x, weight, bias=None, gelu=False, parts=1) -> Tensor:
        rows, k = x.shape
        n = weight.shape[0]
        out = x.new_empty(rows, n) if parts == 1 else x.new_empty(parts, rows, n, dtype=torch.float32)
        block_m, block_n, block_k, warps, stages = shape(rows, n, k, x.dtype)
        stages = fitting_stages(stages, block_m, block_n, block_k, x)
        blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k}
        added, fused = x if bias is None else bias, {"BIAS": bias is not None, "GELU": gelu}
        options = {"DEPENDENT": dependent, "num_warps": warps, "num_stages": stages, **launch}
        _some_rows_kernel[(triton.cdiv(n, block_n), triton.cdiv(rows, block_m), parts)](
            x, weight, added, out, rows, n, K=k, PARTS=parts, **blocks, **fused, **options
        )
        return out

    return some_rows_linear


def parts_of(rows: int, n: int, k: int) -> int:
    """Ranges of K (split-K), to keep more programs busy where inputs are much wider than outputs."""
    parts = 4 if rows <= 32 or rows > 128 else 8
    return parts if k >= 2 * n and k % (64 * parts) == 0 else 1
