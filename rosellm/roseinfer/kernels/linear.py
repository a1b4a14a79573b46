"""Linear layers for few rows, fused with what surrounds them in a layer: torch specs and two kernels.

Decode multiplies M rows, one per sequence, by weights that are read once per step. Such a product is bound by
the latency of a chain of loads, not by arithmetic: what helps is many programs, weights in flight early, and
no round trip through memory for the norm before it and the activation or residual sum after it.

Weights are ``[N, K]`` with K contiguous; activations are contiguous. With "swiglu" (Shazeer 2020) the rows of
a weight are those of the gate and then as many of the product's other factor, and results are ``[M, N / 2]``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.triton_or_none import tl, triton

ROLES = {"_few_rows_kernel": "GEMM", "_some_rows_kernel": "GEMM"}
Activation = Literal["none", "gelu", "swiglu"]
Shape = Callable[[int, int, int, torch.dtype], tuple[int, int, int, int, int]]
FEW_ROWS = 16
SOME_ROWS = ((2**23, 256), (2**25, 128))  # parameters of a layer, and rows up to which ours are faster
LARGE = 2**24  # elements of a weight; gpt2-xl has up to 10 million
WIDE = 6144  # outputs


class NormPrologue(NamedTuple):
    """A norm of x's rows before the product: scale ``[K]`` of x's dtype, and the variance's ``eps``.

    sums ``[N]`` fp32, ``weight.float() @ scale.float()``: LayerNorm, its shift in the product's bias; without
    them RMSNorm (Zhang & Sennrich 2019).
    """

    scale: Tensor
    eps: float
    sums: Tensor | None = None

    @property
    def kind(self) -> str:
        return "rms" if self.sums is None else "layer"


class FewRowsShape(NamedTuple):
    """How a product for few rows is cut: a chunk is BLOCK_N rows of weights x SLICES x BLOCK_K of K.

    Slices go to different warps, and with one row of x so do rows of weights; 32 threads' loads of 16 bytes
    are 256 elements of 16 bits. held: chunks in registers before the inputs are there. stages: of the loop
    over the rest (not for one row, whose loop holds as many chunks all along).
    """

    block_n: int
    slices: int
    block_k: int
    held: int
    warps: int
    stages: int


def few_rows_linear_ref(
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: NormPrologue | None = None,
    activation: Activation = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """The specification: ``f(norm(x) @ weight.T + bias)``, ``[M, K]`` x ``[N, K]`` → ``[M, N]``, in fp32.

    A norm divides after the product, which so need not wait for it: ``((x * scale) @ w - mean * sums) /
    deviation``, and without the mean for RMSNorm. activation: "gelu" (tanh form) or "swiglu", which halves N.
    residual of the result's shape: updated in place and returned.
    """
    wide = x.float()
    y = (wide if norm is None else wide * norm.scale.float()) @ weight.float().t()
    y = y if norm is None else normed_ref(y, wide, norm)
    y = activated_ref(y if bias is None else y + bias.float(), activation)
    if residual is None:
        return y.to(x.dtype)
    return residual.copy_(residual.float() + y)


def normed_ref(y: Tensor, x: Tensor, norm: NormPrologue) -> Tensor:
    """A product y ``[M, N]`` of scaled rows x ``[M, K]``, normalised by the moments of those rows."""
    if norm.sums is None:
        return y * (x.square().mean(dim=1, keepdim=True) + norm.eps).rsqrt()
    mean, variance = x.mean(dim=1, keepdim=True), x.var(dim=1, correction=0, keepdim=True)
    return (y - mean * norm.sums) * (variance + norm.eps).rsqrt()


def activated_ref(y: Tensor, activation: Activation) -> Tensor:
    """``[M, N]`` → ``[M, N]``, or ``[M, N / 2]`` for "swiglu"."""
    if activation == "gelu":
        return F.gelu(y, approximate="tanh")
    if activation == "swiglu":
        gate, up = y.chunk(2, dim=1)
        return F.silu(gate) * up
    return y


def some_rows_linear_ref(
    *, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation = "none", parts: int = 1
) -> Tensor:
    """The specification: ``f(x @ weight.T + bias)`` → ``[M, N]``; or, without a bias, ``parts`` partial sums.

    With ``parts`` above 1 (split-K) the result is ``[parts, M, N]`` fp32: products over that many equal
    ranges of K, which the consumer adds up.
    """
    if parts == 1:
        y = x.float() @ weight.float().t()
        return activated_ref(y if bias is None else y + bias.float(), activation).to(x.dtype)
    ranges = zip(x.float().chunk(parts, dim=1), weight.float().chunk(parts, dim=1), strict=True)
    return torch.stack([a @ w.t() for a, w in ranges])


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


@triton.jit
def silu(y):
    return y / (1.0 + tl.exp(-y))


@triton.jit
def weight_rows(block, i, N, BLOCK_N: tl.constexpr, ACTIVATION: tl.constexpr):
    """The rows i of the weight that a program multiplies by; with "swiglu" gate and factor alternate."""
    if ACTIVATION == "swiglu":
        rows = block * (BLOCK_N // 2) + i // 2 + (i % 2) * (N // 2)
    else:
        rows = block * BLOCK_N + i
    return rows


@triton.jit
def activated(y, M: tl.constexpr, N: tl.constexpr, ACTIVATION: tl.constexpr):
    """``[M, N]`` → ``[M, N]``, or ``[M, N / 2]`` for "swiglu"."""
    if ACTIVATION == "gelu":
        y = gelu(y)
    if ACTIVATION == "swiglu":
        gate, up = tl.split(tl.reshape(y, (M, N // 2, 2)))
        y = silu(gate) * up
    return y


@triton.jit
def _load(place, k, K: tl.constexpr, WHOLE: tl.constexpr):
    """What is at ``place``, or 0 where k, the position along K, is beyond it; WHOLE: it never is."""
    return tl.load(place) if WHOLE else tl.load(place, mask=k < K, other=0.0)


@triton.jit
def _held(place, inner, K: tl.constexpr, STEP: tl.constexpr, HELD: tl.constexpr, WHOLE: tl.constexpr):
    """The first HELD chunks."""
    chunks = ()  # type: tuple
    for chunk in tl.static_range(HELD):
        chunks = chunks + (_load(place + chunk * STEP, inner + chunk * STEP, K, WHOLE),)
    return chunks


@triton.jit
def _repeated(x, ROWS: tl.constexpr):
    """``[A, B]`` → ``[ROWS, B]``, all of x's rows again and again."""
    TIMES: tl.constexpr = ROWS // x.shape[0]
    times = tl.broadcast_to(tl.reshape(x, (1, x.shape[0], x.shape[1])), (TIMES, x.shape[0], x.shape[1]))
    return tl.reshape(times, (ROWS, x.shape[1]))


@triton.jit
def _add_row(acc, total, squares, w, x, scale, NORM: tl.constexpr):
    """One chunk of one row: w ``[BLOCK_N, STEP]``, x ``[ACROSS, STEP]``, as often as w's rows need it."""
    x = x.to(tl.float32)
    total += x
    squares += x * x
    if NORM != "none":
        x = x * scale.to(tl.float32)
    acc += w.to(tl.float32) * _repeated(x, w.shape[0])
    return acc, total, squares


@triton.jit
def _one_row_product(
    weights, scales, weight_place, scale_place, x_place, inner,
    K: tl.constexpr, BLOCK_N: tl.constexpr, ACROSS: tl.constexpr, STEP: tl.constexpr,
    HELD: tl.constexpr, NORM: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The product ``[1, BLOCK_N]`` of one row, its sum and sum of squares ``[1, 1]``.

    As a chunk in registers is used up, the one HELD chunks after it is requested. Sums across threads are
    left to the end.
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
    total, squares = _repeated(total, BLOCK_N), _repeated(squares, BLOCK_N)
    return tl.sum(acc, axis=1)[None, :], tl.trans(total), tl.trans(squares)


@triton.jit
def _sums_of_8(x):
    """``[A, B, C]`` → ``[A, B, C / 8]``, within a thread where it has loaded 16 bytes of 16-bit elements."""
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // 8, 8)), axis=3)


@triton.jit
def _add_product(acc, total, squares, w, x, scale, BLOCK_N: tl.constexpr, NORM: tl.constexpr):
    """One chunk: w ``[SLICES, BLOCK_N, BLOCK_K]``, x ``[SLICES, BLOCK_M, BLOCK_K]``."""
    if NORM != "none":
        wide = x.to(tl.float32)
        total += _sums_of_8(wide)
        squares += _sums_of_8(wide * wide)
        x = (wide * scale.to(tl.float32)).to(w.dtype)
    if BLOCK_N >= 16:  # which operand provides the matrix instruction's 16 rows
        acc = tl.dot(w, tl.permute(x, (0, 2, 1)), acc, input_precision="ieee")
    else:
        acc = tl.dot(x, tl.permute(w, (0, 2, 1)), acc, input_precision="ieee")
    return acc, total, squares


@triton.jit
def _few_rows_product(
    weights, scales, weight_place, scale_place, x_place, inner,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr,
    BLOCK_K: tl.constexpr, HELD: tl.constexpr, NORM: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The product ``[BLOCK_M, BLOCK_N]``, and each row's sum and sum of squares ``[BLOCK_M, 1]``.

    The chunks in registers come last: the loop over the others, which go through shared memory, is to begin
    at once. Slices are separate products, one per warp, summed at the end: one chain of K / 16 matrix
    instructions would take longer than loading the weights.
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
def _normed(y, total, squares, sums, eps, K: tl.constexpr, NORM: tl.constexpr):
    """A product of scaled rows, normalised by the sums and sums of squares of the rows themselves."""
    if NORM == "rms":
        y *= tl.rsqrt(squares / K + eps)
    if NORM == "layer":
        mean = total / K
        variance = tl.maximum(squares / K - mean * mean, 0.0)
        y = (y - mean * sums) * tl.rsqrt(variance + eps)
    return y


@triton.jit(do_not_specialize=["M"])
def _few_rows_kernel(
    x_ptr, weight_ptr, bias_ptr, scale_ptr, sums_ptr, out_ptr, eps, M, N,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACROSS: tl.constexpr,
    SLICES: tl.constexpr, BLOCK_K: tl.constexpr, HELD: tl.constexpr, BIAS: tl.constexpr,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr, ADD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of the weight per program, for all M <= BLOCK_M rows of x.

    The first weights are loaded before the inputs are. Rows beyond the last repeat it, and are not stored.
    With one row, x and the weights have the same layout over the threads, ACROSS rows of weights at a time.
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
    y = _normed(y, total, squares, sums, eps, K, NORM)
    if BIAS:
        y += bias
    y = activated(y, BLOCK_M, BLOCK_N, ACTIVATION)
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
    BLOCK_K: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One BLOCK_M x BLOCK_N tile per program, over one of PARTS ranges of K in a pipelined loop."""
    block = tl.program_id(0)
    w_rows = weight_rows(block, tl.arange(0, BLOCK_N), N, BLOCK_N, ACTIVATION)
    first_row = tl.program_id(1) * BLOCK_M
    rows = tl.arange(0, BLOCK_M)  # within the tile; only its first row's offset needs 64 bits
    held_rows = first_row + rows < M
    x_ptr += first_row.to(tl.int64) * K
    part = tl.program_id(2)
    RANGE: tl.constexpr = K // PARTS
    if BIAS:
        bias = tl.load(bias_ptr + w_rows, mask=w_rows < N, other=0.0).to(tl.float32)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    begin = part * RANGE
    acc = tile_product(
        x_ptr, weight_ptr, rows, held_rows, w_rows, begin, N, K, RANGE, BLOCK_M, BLOCK_N, BLOCK_K
    )
    if BIAS:
        acc += bias[None, :]
    acc = activated(acc, BLOCK_M, BLOCK_N, ACTIVATION)
    WIDTH: tl.constexpr = BLOCK_N // 2 if ACTIVATION == "swiglu" else BLOCK_N
    n_out = N // 2 if ACTIVATION == "swiglu" else N
    columns = block * WIDTH + tl.arange(0, WIDTH)
    target = out_ptr + (part * M + first_row).to(tl.int64) * n_out + rows[:, None] * n_out + columns[None, :]
    inside = held_rows[:, None] & (columns[None, :] < n_out)
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=inside)


def output_width(n: int, activation: Activation) -> int:
    """Columns of the result of a product by n rows of weights."""
    return n // 2 if activation == "swiglu" else n


def make_few_rows_linear(
    dependent: int = False, shape: Callable[[int, int, int, torch.dtype], FewRowsShape] | None = None
) -> Callable[..., Tensor]:
    """The Triton kernel for up to ``FEW_ROWS`` rows, called like :func:`few_rows_linear_ref`.

    All tensors are contiguous. With LayerNorm, variance is a difference of two sums and loses digits if a
    row's mean is many times its deviation; x times scale is rounded to x's dtype, except for a single row.
    shape: rows, n, k and dtype → how the product is cut.
    """
    launch, shape_of = launch_options(dependent), shape or _few_rows_shape

    def few_rows_linear(
        *, x, weight, bias=None, norm=None, activation: Activation = "none", residual=None
    ) -> Tensor:
        rows, k = x.shape
        n = weight.shape[0]
        out = x.new_empty(rows, output_width(n, activation)) if residual is None else residual
        cut = shape_of(rows, n, k, x.dtype)
        fused = {"BIAS": bias is not None, "ADD": residual is not None, "ACTIVATION": activation}
        fused |= {"NORM": "none" if norm is None else norm.kind}
        scale, eps, sums = norm or (x, 0.0, x)
        bias, sums = (x if it is None else it for it in (bias, sums))
        options = {**_blocks(rows, k, cut), **_launch(rows, cut, x), "DEPENDENT": dependent, **launch}
        _few_rows_kernel[(triton.cdiv(n, cut.block_n),)](
            x, weight, bias, scale, sums, out, eps, rows, n, K=k, **fused, **options
        )
        return out

    return few_rows_linear


def _rows_held(rows: int) -> int:
    return 1 if rows == 1 else 8 if rows <= 8 else 16


def _blocks(rows: int, k: int, cut: FewRowsShape) -> dict[str, int]:
    """The kernel's constants."""
    held = min(cut.held, triton.cdiv(k, cut.slices * cut.block_k))
    across = max(1, min(cut.block_n, cut.warps // cut.slices))
    blocks = {"BLOCK_M": _rows_held(rows), "BLOCK_N": cut.block_n, "BLOCK_K": cut.block_k}
    return blocks | {"ACROSS": across, "SLICES": cut.slices, "HELD": held}


def _launch(rows: int, cut: FewRowsShape, x: Tensor) -> dict[str, int]:
    """Warps, and as many stages as fit shared memory along with one chunk more, of those in registers."""
    step = cut.slices * cut.block_k
    stages = fitting_stages(cut.stages + 1, _rows_held(rows), cut.block_n, step, x) - 1
    return {"num_warps": cut.warps, "num_stages": max(1, stages)}


def _few_rows_shape(rows: int, n: int, k: int, dtype: torch.dtype) -> FewRowsShape:
    """The fastest measured on an H200, for 16-bit weights of models from GPT-2 to Llama-3.1-8B."""
    if rows == 1:
        return _one_row_shape(n, k, dtype)
    if dtype == torch.float32 and (rows > 8 or k > 1024):
        return FewRowsShape(16, 4, 32, 2, 4, 3)
    if k <= 1024:
        wide = (rows > 8 and n > k) or (n >= WIDE and dtype != torch.float32)
        columns = 32 if wide else 16
        return FewRowsShape(columns, 4, max(16, triton.next_power_of_2(k) // 4), 1, 4, 1)
    if n < 2048:
        return FewRowsShape(8, 8, 128, 1, 4, 4) if k <= 2048 else FewRowsShape(8, 8, 128, 3, 4, 3)
    if n > k:
        return FewRowsShape(32, 4, 64, 2, 4, 4)
    if k <= 2048:
        return FewRowsShape(16, 8, 128, 2, 8, 1)
    return FewRowsShape(16, 4, 128, 2, 4, 4) if n >= 4096 else FewRowsShape(16, 4, 128, 1, 4, 6)


def _one_row_shape(n: int, k: int, dtype: torch.dtype) -> FewRowsShape:
    """Chunks of 32 weights a thread; fewer rows of the weight per program the longer they are."""
    if dtype == torch.float32 or k < 256:
        return _plain_one_row_shape(n, k, dtype)
    if k <= 1024 or (n > 4 * k and k <= 2048):
        return FewRowsShape(16, 1, 256, 2 if n >= WIDE else 4, 4, 1)
    if n >= 4096 and k >= 4096:
        return FewRowsShape(4, 2, 256, 4, 2, 1)
    if n > k:
        return FewRowsShape(8, 4, 256, 2, 4, 1)
    return (
        FewRowsShape(4, 1, 256, 4, 4, 1)
        if k <= 2048
        else FewRowsShape(4, 4, 256, 2 if k >= 8192 else 4, 4, 1)
    )


def _plain_one_row_shape(n: int, k: int, dtype: torch.dtype) -> FewRowsShape:
    block_n, slices = (16, 1) if k <= 1024 else (8, 2) if k <= 2048 and n >= 2048 else (4, 4)
    block_k = min(256, max(16, triton.next_power_of_2(k) // slices))
    return FewRowsShape(block_n, slices, block_k, 2 if dtype == torch.float32 else 4, 4, 1)


def _some_rows_shape(rows: int, n: int, k: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """Tile sizes, warps and pipeline stages: the fastest measured on an H200."""
    if dtype == torch.float32:
        return 32, 32, 32, 4, 3
    if n * k >= LARGE:
        return _large_shape(rows, n * k)
    if rows <= 32:
        return (32, 16, 128, 4, 4) if n == k else (32, 32, 128, 4, 4)
    square = n <= k <= 2 * n
    if rows <= 128:
        return (64, 16, 128, 4, 4) if square else (64, 64, 64, 4, 5) if k > n else (64, 32, 64, 4, 6)
    return (64, 32, 128, 4, 4) if n == k else (64, 64, 64, 8, 5)


def _large_shape(rows: int, size: int) -> tuple[int, int, int, int, int]:
    """Of weights of ``size`` elements, ``LARGE`` or more."""
    if rows <= 32:
        return 32, 64, 128, 4, 4
    if rows <= 64:
        return (64, 64, 64, 4, 5) if size <= 2 * LARGE else (64, 128, 64, 4, 4)
    return (128, 64, 64, 4, 5) if rows <= 256 else (128, 128, 64, 8, 4)


def make_some_rows_linear(dependent: int = False, shape: Shape = _some_rows_shape) -> Callable[..., Tensor]:
    """The Triton kernel for some rows, called like :func:`some_rows_linear_ref`.

    All tensors are contiguous. shape: rows, n, k and dtype → tile sizes, warps and pipeline stages.
    """
    launch = launch_options(dependent)

    def some_rows_linear(*, x, weight, bias=None, activation: Activation = "none", parts=1) -> Tensor:
        rows, k = x.shape
        n = weight.shape[0]
        width = output_width(n, activation)
        out = x.new_empty(rows, width) if parts == 1 else x.new_empty(parts, rows, n, dtype=torch.float32)
        block_m, block_n, block_k, warps, stages = shape(rows, n, k, x.dtype)
        stages = fitting_stages(stages, block_m, block_n, block_k, x)
        blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k}
        added, fused = x if bias is None else bias, {"BIAS": bias is not None, "ACTIVATION": activation}
        options = {"DEPENDENT": dependent, "num_warps": warps, "num_stages": stages, **launch}
        _some_rows_kernel[(triton.cdiv(n, block_n), triton.cdiv(rows, block_m), parts)](
            x, weight, added, out, rows, n, K=k, PARTS=parts, **blocks, **fused, **options
        )
        return out

    return some_rows_linear


def some_rows(layer_parameters: int) -> int:
    """Rows up to which ``some_rows_linear`` beats cuBLAS, as measured on an H200: the fewer, the larger."""
    return next((rows for most, rows in SOME_ROWS if layer_parameters <= most), 64)


def parts_of(rows: int, n: int, k: int) -> int:
    """Ranges of K (split-K), to keep more programs busy where inputs are much wider than outputs."""
    parts = 4 if rows <= 32 or rows > 128 else 8
    return parts if k >= 2 * n and k % (64 * parts) == 0 else 1
