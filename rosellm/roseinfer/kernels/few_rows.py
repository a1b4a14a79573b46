"""Linear layers for few rows, fused with the surrounding norm, activation and residual: reference and kernel.

Decode multiplies M rows, one per sequence, by weights that are read once per step. Such a GEMM is bound by
the latency of a chain of loads, not by arithmetic: it needs many programs, weights that are loaded early, and
no round trip through memory for the norm before it and the activation or residual sum after it. Weights and
activations have the layout described in ``linear``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from rosellm.models.quantized import AnyWeight, full, parts_of_weight
from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.roseinfer.kernels.linear import (
    Activation,
    activated,
    activated_ref,
    fitting_stages,
    output_width,
    weight_rows,
)
from rosellm.roseinfer.kernels.repeated import repeated
from rosellm.roseinfer.kernels.tile_tables import best
from rosellm.roseinfer.kernels.tuned import choice_of
from rosellm.triton_or_none import cdiv, next_power_of_2, tl, triton

ROLES = {"_few_rows_kernel": "GEMM"}
FEW_ROWS = 16


class NormPrologue(NamedTuple):
    """A norm of x's rows before the GEMM.

    scale: ``[K]`` in x's dtype.
    eps: added to the variance.
    sums: ``[N]`` fp32, ``weight.float() @ scale.float()``, for LayerNorm, whose shift is in the GEMM's bias;
        None for RMSNorm (Zhang & Sennrich 2019).
    gain: factor on the normalised values. A scale above 1 has been divided by it, so that x times scale is
        finite in fp16.
    """

    scale: Tensor
    eps: float
    sums: Tensor | None = None
    gain: float = 1.0

    @property
    def kind(self) -> str:
        return "rms" if self.sums is None else "layer"


class FewRowsShape(NamedTuple):
    """The tiling of a GEMM for few rows; a chunk is BLOCK_N weight rows by SLICES x BLOCK_K elements of K.

    block_n: weight rows per program.
    slices: slices of a chunk along K, computed by different warps. With one row of x, weight rows are spread
        over warps, too.
    block_k: elements of K per slice. A warp whose 32 threads load 16 bytes each reads 256 16-bit elements.
    held: chunks loaded into registers before the inputs are ready.
    warps: warps per program.
    stages: pipeline stages of the loop over the chunks after those held; unused for one row of x, whose loop
        keeps ``held`` chunks in registers throughout.
    """

    block_n: int
    slices: int
    block_k: int
    held: int
    warps: int
    stages: int


ShapeOf = Callable[[int, int, int, torch.dtype], FewRowsShape]


def few_rows_linear_ref(
    *,
    x: Tensor,
    weight: AnyWeight,
    bias: Tensor | None = None,
    norm: NormPrologue | None = None,
    activation: Activation = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """Compute ``f(norm(x) @ weight.T + bias)`` (torch reference, in fp32 arithmetic).

    x: ``[M, K]``.
    weight: ``[N, K]``, or a ``QuantizedWeight``.
    bias: ``[N]``, or None.
    norm: the norm of x's rows, or None.
    activation: f, which is "none", "gelu" (tanh form), or "swiglu".
    residual: a tensor of the result's shape, to which the result is added in place, and which is returned;
        None to return the result in x's dtype.

    The result is ``[M, N]``, or ``[M, N / 2]`` for "swiglu". The GEMM need not wait for the norm's moments
    (mean and variance), which are applied afterwards: ``((x * scale) @ w - mean * sums) * gain / deviation``,
    without the mean for RMSNorm.
    """
    wide = x.float()
    y = (wide if norm is None else wide * norm.scale.float()) @ full(weight).float().t()
    y = y if norm is None else normed_ref(y, wide, norm)
    y = activated_ref(y if bias is None else y + bias.float(), activation)
    if residual is None:
        return y.to(x.dtype)
    return residual.copy_(residual.float() + y)


def normed_ref(y: Tensor, x: Tensor, norm: NormPrologue) -> Tensor:
    """Normalise y ``[M, N]``, the GEMM of x times scale, by each row's mean and variance in x ``[M, K]``."""
    if norm.sums is None:
        return y * norm.gain * (x.square().mean(dim=1, keepdim=True) + norm.eps).rsqrt()
    mean, variance = x.mean(dim=1, keepdim=True), x.var(dim=1, correction=0, keepdim=True)
    return (y - mean * norm.sums) * norm.gain * (variance + norm.eps).rsqrt()


@triton.jit
def _load(place, k, K: tl.constexpr, WHOLE: tl.constexpr):
    """Load from ``place``, or 0 where k, the index along K, is K or more.

    WHOLE: k is always below K, so no mask is needed.
    """
    return tl.load(place) if WHOLE else tl.load(place, mask=k < K, other=0.0)


@triton.jit
def _held(place, inner, K: tl.constexpr, STEP: tl.constexpr, HELD: tl.constexpr, WHOLE: tl.constexpr):
    """Load the first HELD chunks, and return them as a tuple."""
    chunks = ()  # type: tuple
    for chunk in tl.static_range(HELD):
        chunks = chunks + (_load(place + chunk * STEP, inner + chunk * STEP, K, WHOLE),)
    return chunks


@triton.jit
def _add_row(acc, total, squares, w, x, scale, NORM: tl.constexpr):
    """Add a chunk to the products, sum and sum of squares of the only row of x.

    w ``[BLOCK_N, STEP]``, x ``[ACROSS, STEP]``: ACROSS copies of the row.
    """
    x = x.to(tl.float32)
    total += x
    squares += x * x
    if NORM != "none":
        x = x * scale.to(tl.float32)
    acc += w.to(tl.float32) * repeated(x, w.shape[0])
    return acc, total, squares


@triton.jit
def _one_row_product(
    weights, scales, weight_place, scale_place, x_place, inner,
    K: tl.constexpr, BLOCK_N: tl.constexpr, ACROSS: tl.constexpr, STEP: tl.constexpr,
    HELD: tl.constexpr, NORM: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return the GEMM result, sum and sum of squares of the only row of x, ``[1, BLOCK_N]`` each.

    Each chunk in registers, once used, is replaced by the chunk HELD positions later. Sums across threads are
    taken at the end.
    """
    ROUND: tl.constexpr = HELD * STEP
    ROUNDS: tl.constexpr = (K + ROUND - 1) // ROUND
    xs = _held(x_place, inner, K, STEP, HELD, WHOLE)
    acc = tl.zeros((BLOCK_N, STEP), tl.float32)
    total, squares = tl.zeros((ACROSS, STEP), tl.float32), tl.zeros((ACROSS, STEP), tl.float32)
    for first in range(ROUND, ROUNDS * ROUND, ROUND):
        next_weights, next_scales, next_xs = (), (), ()  # type: tuple, tuple, tuple
        for chunk in tl.static_range(HELD):
            scale = scales[chunk] if NORM != "none" else xs[chunk]
            acc, total, squares = _add_row(acc, total, squares, weights[chunk], xs[chunk], scale, NORM)
            ahead = first + chunk * STEP
            next_weights = next_weights + (_load(weight_place + ahead, inner + ahead, K, WHOLE),)
            next_xs = next_xs + (_load(x_place + ahead, inner + ahead, K, WHOLE),)
            if NORM != "none":
                next_scales = next_scales + (_load(scale_place + ahead, inner + ahead, K, WHOLE),)
        weights, scales, xs = next_weights, next_scales, next_xs
    for chunk in tl.static_range(HELD):
        scale = scales[chunk] if NORM != "none" else xs[chunk]
        acc, total, squares = _add_row(acc, total, squares, weights[chunk], xs[chunk], scale, NORM)
    total, squares = tl.sum(total, axis=1, keep_dims=True), tl.sum(squares, axis=1, keep_dims=True)
    total, squares = repeated(total, BLOCK_N), repeated(squares, BLOCK_N)
    return tl.sum(acc, axis=1)[None, :], tl.trans(total), tl.trans(squares)


@triton.jit
def _sums_of_8(x):
    """Sum each group of 8 adjacent elements: ``[A, B, C]`` → ``[A, B, C / 8]``.

    Each sum stays within a thread if threads have loaded 16 bytes of 16-bit elements each.
    """
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // 8, 8)), axis=3)


@triton.jit
def _add_product(acc, total, squares, w, x, scale, BLOCK_N: tl.constexpr, NORM: tl.constexpr):
    """Add a chunk to the products, and to each row's sum and sum of squares.

    w ``[SLICES, BLOCK_N, BLOCK_K]``, x ``[SLICES, BLOCK_M, BLOCK_K]``. Without a norm, sum and sum of squares
    are not computed.
    """
    if NORM != "none":
        wide = x.to(tl.float32)
        total += _sums_of_8(wide)
        squares += _sums_of_8(wide * wide)
        x *= scale
    if BLOCK_N >= 16:  # the matrix instruction needs 16 rows, of the weight or of x
        acc = tl.dot(w.to(x.dtype), tl.permute(x, (0, 2, 1)), acc, input_precision="ieee")
    else:
        acc = tl.dot(x, tl.permute(w.to(x.dtype), (0, 2, 1)), acc, input_precision="ieee")
    return acc, total, squares


@triton.jit
def _few_rows_product(
    weights, scales, weight_place, scale_place, x_place, inner,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr,
    BLOCK_K: tl.constexpr, HELD: tl.constexpr, NORM: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return the GEMM result ``[BLOCK_M, BLOCK_N]``, and each row's sum and sum of squares ``[BLOCK_M, 1]``.

    The chunks held in registers are multiplied last, so that the loop over the remaining chunks, which go
    through shared memory, starts at once. Slices are separate GEMMs, one per warp, summed at the end: a
    single chain of K / 16 matrix instructions would take longer than loading the weights.
    """
    STEP: tl.constexpr = SLICES * BLOCK_K
    CHUNKS: tl.constexpr = (K + STEP - 1) // STEP
    WEIGHTS_FIRST: tl.constexpr = BLOCK_N >= 16
    acc = tl.zeros((SLICES, BLOCK_N, BLOCK_M) if WEIGHTS_FIRST else (SLICES, BLOCK_M, BLOCK_N), tl.float32)
    total = tl.zeros((SLICES, BLOCK_M, BLOCK_K // 8), tl.float32)
    squares = total
    for first in range(HELD * STEP, CHUNKS * STEP, STEP):
        w = _load(weight_place + first, inner + first, K, WHOLE)
        x = _load(x_place + first, inner + first, K, WHOLE)
        scale = x
        if NORM != "none":
            scale = _load(scale_place + first, inner + first, K, WHOLE)
        acc, total, squares = _add_product(acc, total, squares, w, x, scale, BLOCK_N, NORM)
    for chunk in tl.static_range(HELD):
        x = _load(x_place + chunk * STEP, inner + chunk * STEP, K, WHOLE)
        scale = scales[chunk] if NORM != "none" else x
        acc, total, squares = _add_product(acc, total, squares, weights[chunk], x, scale, BLOCK_N, NORM)
    y = tl.sum(acc, axis=0)
    if WEIGHTS_FIRST:
        y = tl.trans(y)
    total, squares = tl.sum(tl.sum(total, axis=2), axis=0), tl.sum(tl.sum(squares, axis=2), axis=0)
    return y, total[:, None], squares[:, None]


@triton.jit
def _normed(y, total, squares, sums, eps, gain, K: tl.constexpr, NORM: tl.constexpr):
    """Normalise y, the GEMM of x times scale, by the sum and sum of squares of each row of x."""
    if NORM == "rms":
        y *= tl.rsqrt(squares / K + eps) * gain
    if NORM == "layer":
        mean = total / K
        variance = tl.maximum(squares / K - mean * mean, 0.0)
        y = (y - mean * sums) * (tl.rsqrt(variance + eps) * gain)
    return y


@triton.jit(do_not_specialize=["M"])
def _few_rows_kernel(
    x_ptr, weight_ptr, w_scales_ptr, bias_ptr, scale_ptr, sums_ptr, out_ptr, eps, gain, M, N,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACROSS: tl.constexpr,
    SLICES: tl.constexpr, BLOCK_K: tl.constexpr, HELD: tl.constexpr, BIAS: tl.constexpr,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr, ADD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Multiply all M <= BLOCK_M rows of x by BLOCK_N rows of the weight per program.

    The first weights are loaded before the inputs are ready. Padding rows repeat the last row and are not
    stored. With one row of x, x and weights have the same layout across threads, ACROSS weight rows at a
    time.

    w_scales_ptr: the scales of quantised weights, or None.
    """
    STEP: tl.constexpr = SLICES * BLOCK_K
    WHOLE: tl.constexpr = K % (HELD * STEP) == 0 if BLOCK_M == 1 else K % STEP == 0
    block = tl.program_id(0)
    rows = tl.arange(0, BLOCK_M)
    i = tl.arange(0, BLOCK_N)
    held_rows = tl.minimum(weight_rows(block, i, N, BLOCK_N, ACTIVATION), N - 1)
    if BLOCK_M == 1:
        inner = tl.arange(0, STEP)[None, :]
        weight_place = weight_ptr + held_rows[:, None].to(tl.int64) * K + inner
        x_place = tl.broadcast_to(x_ptr + inner, (ACROSS, STEP))
        scale_place = tl.broadcast_to(scale_ptr + inner, (ACROSS, STEP))
    else:
        inner = tl.arange(0, SLICES)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
        weight_place = weight_ptr + held_rows[None, :, None].to(tl.int64) * K + inner
        x_place = x_ptr + tl.minimum(rows, M - 1)[None, :, None] * K + inner
        scale_place = scale_ptr + inner
    weights = _held(weight_place, inner, K, STEP, HELD, WHOLE)
    scales = _held(scale_place, inner, K, STEP, HELD if NORM != "none" else 0, WHOLE)
    if w_scales_ptr is not None:
        w_scales = tl.load(w_scales_ptr + held_rows)[None, :]
    if BIAS:
        bias = tl.load(bias_ptr + held_rows).to(tl.float32)[None, :]
    sums = tl.load(sums_ptr + held_rows)[None, :] if NORM == "layer" else 0.0
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    if ACTIVATION == "swiglu":
        width, columns = N // 2, block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)[None, :]
    else:
        width, columns = N, block * BLOCK_N + i[None, :]
    target = out_ptr + rows[:, None] * width + columns
    inside = (rows[:, None] < M) & (columns < width)
    if ADD:
        residual = tl.load(target, mask=inside, other=0.0).to(tl.float32)
    if BLOCK_M == 1:
        y, total, squares = _one_row_product(
            weights, scales, weight_place, scale_place, x_place, inner,
            K, BLOCK_N, ACROSS, STEP, HELD, NORM, WHOLE,
        )  # fmt: skip
    else:
        y, total, squares = _few_rows_product(
            weights, scales, weight_place, scale_place, x_place, inner,
            K, BLOCK_M, BLOCK_N, SLICES, BLOCK_K, HELD, NORM, WHOLE,
        )  # fmt: skip
    if w_scales_ptr is not None:
        y *= w_scales
    y = _normed(y, total, squares, sums, eps, gain, K, NORM)
    if BIAS:
        y += bias
    y = activated(y, BLOCK_M, BLOCK_N, ACTIVATION)
    if ADD:
        y += residual
    tl.store(target, y.to(out_ptr.dtype.element_ty), mask=inside)


def few_rows_linear(
    *, x, weight, bias=None, norm=None, activation: Activation = "none", residual=None,
    dependent: int = False, shape: ShapeOf | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``f(norm(x) @ weight.T + bias)`` in Triton, for up to ``FEW_ROWS`` rows.

    Arguments as in :func:`few_rows_linear_ref`; all tensors must be contiguous.

    dependent: the launch mode, as in ``launch_options``.
    shape: maps (rows, n, k, dtype) to a tiling; None for the tuned or the fastest measured one.

    With LayerNorm, the variance is a difference of two sums and loses digits if a row's mean is many times
    its deviation. x times scale is rounded to x's dtype, except for a single row.
    """
    rows, k = x.shape
    n, (weight, w_scales) = len(weight), parts_of_weight(weight)
    out = x.new_empty(rows, output_width(n, activation)) if residual is None else residual
    can_tune = rows == 1 and shape is None and weight.dtype.itemsize == 2
    tuned = choice_of(1, n, k, activation) if can_tune else None
    dtype = weight.dtype if x.element_size() == 2 else x.dtype
    cut = FewRowsShape(*tuned.tile) if tuned else (shape or _few_rows_shape)(rows, n, k, dtype)
    fused = {"BIAS": bias is not None, "ADD": residual is not None, "ACTIVATION": activation}
    fused |= {"NORM": "none" if norm is None else norm.kind}
    scale, eps, sums, gain = norm or (x, 0.0, x, 1.0)
    bias, sums = (x if it is None else it for it in (bias, sums))
    options = {**_options(rows, k, cut, x.dtype, x.device), **launch_options(dependent)}
    _few_rows_kernel[(cdiv(n, cut.block_n),)](
        x, weight, w_scales, bias, scale, sums, out, eps, gain, rows, n, K=k, **fused, **options
    )
    return out


@lru_cache(1024)
def _options(
    rows: int, k: int, cut: FewRowsShape, dtype: torch.dtype, device: torch.device
) -> dict[str, int]:
    """Return block sizes, warps and pipeline stages.

    Shared memory for one stage is left to the chunks in registers.
    """
    block_m, step = 1 if rows == 1 else 8 if rows <= 8 else 16, cut.slices * cut.block_k
    stages = fitting_stages(cut.stages + 1, block_m, cut.block_n, step, dtype.itemsize, device) - 1
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": cut.block_n,
        "BLOCK_K": cut.block_k,
        "ACROSS": max(1, min(cut.block_n, cut.warps // cut.slices)),
        "SLICES": cut.slices,
        "HELD": min(cut.held, cdiv(k, step)),
        "num_warps": cut.warps,
        "num_stages": max(1, stages),
    }


@lru_cache(1024)
def _few_rows_shape(rows: int, n: int, k: int, dtype: torch.dtype) -> FewRowsShape:
    """Return the fastest measured tiling."""
    return filled(FewRowsShape(*best("few_rows", rows=rows, n=n, k=k, bits=8 * dtype.itemsize)), k)


def filled(shape: FewRowsShape, k: int) -> FewRowsShape:
    """Return ``shape`` with block_k 0 replaced by about K / slices, and held 0 by the number of chunks."""
    block_k = shape.block_k or min(256, max(16, next_power_of_2(k) // shape.slices))
    held = shape.held or cdiv(k, shape.slices * block_k)
    return shape._replace(block_k=block_k, held=held)
