"""Linear layers for up to a few hundred rows, with bias and activation: torch reference and kernel.

Weights are ``[N, K]`` with K contiguous; activations are contiguous. With "swiglu" (Shazeer 2020) a weight
has the rows of the gate, then those of the up projection, and results are ``[M, N / 2]``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rosellm.models.quantized import (
    AnyRows,
    AnyWeight,
    GroupedWeight,
    QuantizedRows,
    RowFormat,
    full,
    parts_of_weight,
)
from rosellm.roseinfer.kernels import ring
from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.roseinfer.kernels.grouped_ring import grouped_ring_linear
from rosellm.roseinfer.kernels.tile_tables import best
from rosellm.roseinfer.kernels.tuned import choice_of
from rosellm.triton_or_none import TensorDescriptor, cdiv, tl, triton

ROLES = {"_some_rows_kernel": "GEMM"}
Activation = Literal["none", "gelu", "swiglu"]
Shape = tuple[int, int, int, int, int]  # rows, columns and K of a tile, warps, pipeline stages
ShapeOf = Callable[[int, int, int, torch.dtype, int], Shape]
TMA_ROWS = 64


def activated_ref(y: Tensor, activation: Activation) -> Tensor:
    """Apply the activation: ``[M, N]`` → ``[M, N]``, or ``[M, N / 2]`` for "swiglu"."""
    if activation == "gelu":
        return F.gelu(y, approximate="tanh")
    if activation == "swiglu":
        gate, up = y.chunk(2, dim=1)
        return F.silu(gate) * up
    return y


def some_rows_linear_ref(
    *,
    x: AnyRows,
    weight: AnyWeight,
    bias: Tensor | None = None,
    activation: Activation = "none",
    parts: int = 1,
    form: RowFormat | None = None,
) -> Tensor:
    """Compute ``f(x @ weight.T + bias)``, or ``parts`` partial sums (torch reference).

    x: ``[M, K]``, or ``QuantizedRows``.
    weight: ``[N, K]``, or a ``QuantizedWeight``, which quantised rows require.
    bias: ``[N]``, or None; the first of several partial sums includes it.
    activation: f, which is "none", "gelu" (tanh form), or "swiglu".
    parts: number of equal ranges into which K is split (split-K). Above 1, activation must be "none".
    form: the format to which each range of x is quantised first, with a scale of its own; None for none.

    The result is ``[M, N]`` in x's dtype, or ``[M, N / 2]`` for "swiglu". With several parts, it is
    ``[parts, M, N]`` fp32: one GEMM per range of K, which the consumer adds up.
    """
    wide, weight = full(x).float(), full(weight).float()
    if form is not None:
        wide = torch.cat([QuantizedRows.of(it, form).dequantized() for it in wide.chunk(parts, dim=1)], dim=1)
    if parts == 1:
        y = wide @ weight.t()
        return activated_ref(y if bias is None else y + bias.float(), activation).to(x.dtype)
    ranges = zip(wide.chunk(parts, dim=1), weight.chunk(parts, dim=1), strict=True)
    sums = torch.stack([a @ w.t() for a, w in ranges])
    if bias is not None:
        sums[0] += bias.float()
    return sums


def is_narrow(n: int, k: int) -> bool:
    """Return whether a weight ``[n, k]`` has a dimension below 1,024, as in GPT-2 small.

    Attention and GEMMs of such a model are so short that they overlap, so their tiles compete for shared
    memory.
    """
    return min(n, k) < 1024


def parts_of(rows: int, n: int, k: int) -> int:
    """Return the number of equal ranges into which to split K (split-K).

    x is ``[rows, k]``, and the weight ``[n, k]``. If there are several ranges, each is a multiple of 128
    long, or of 64 in a narrow model.
    """
    (parts,) = best("parts", rows=rows, n=n, k=k, narrow=min(n, k))
    if is_narrow(n, k):
        return parts if k % (64 * parts) == 0 else 1
    while k % (128 * parts) and parts > 1:
        parts //= 2
    return parts


def some_rows_shape(rows: int, n: int, k: int, dtype: torch.dtype, parts: int) -> Shape:
    """Return the tile shape of a GEMM ``[M, K]`` x ``[N, K]``, over one of ``parts`` ranges of K.

    Every program rereads its rows of x from the L2 cache: wide tiles over short ranges of K read less, and
    narrow tiles over long ranges leave fewer partial sums.
    """
    return best("some_rows", rows=rows, n=n, k=k, parts=parts, bits=8 * dtype.itemsize, narrow=min(n, k))


@cache
def shared_memory(device: torch.device) -> int | None:
    """Return the maximum shared memory of a program in bytes; None on a CPU.

    It ranges from 65,536 (sm_75) to 232,448 (sm_90).
    """
    if device.type == "cpu":
        return None
    return triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]


def fitting_stages(
    stages: int, block_m: int, block_n: int, block_k: int, itemsize: int, device: torch.device
) -> int:
    """Return how many of ``stages`` pipeline stages, at least 1, fit the device's shared memory.

    itemsize: bytes of an element of the operands.
    """
    limit, stage = shared_memory(device), (block_m + block_n) * block_k * itemsize
    return stages if limit is None else max(1, min(stages, limit // stage))


@triton.jit
def gelu(y):
    return y / (1.0 + tl.exp(-1.5957691216057308 * (y + 0.044715 * y * y * y)))


@triton.jit
def silu(y):
    return y / (1.0 + tl.exp(-y))


@triton.jit
def weight_rows(block, i, N, BLOCK_N: tl.constexpr, ACTIVATION: tl.constexpr):
    """Return the weight rows at indices i of a program's tile; for "swiglu", gate and up rows alternate."""
    if ACTIVATION == "swiglu":
        rows = block * (BLOCK_N // 2) + i // 2 + (i % 2) * (N // 2)
    else:
        rows = block * BLOCK_N + i
    return rows


@triton.jit
def activated(y, M: tl.constexpr, N: tl.constexpr, ACTIVATION: tl.constexpr):
    """Apply the activation: ``[M, N]`` → ``[M, N]``, or ``[M, N / 2]`` for "swiglu"."""
    if ACTIVATION == "gelu":
        y = gelu(y)
    if ACTIVATION == "swiglu":
        gate, up = tl.split(tl.reshape(y, (M, N // 2, 2)))
        y = silu(gate) * up
    return y


@triton.jit
def tile_product(
    x_ptr, weight_ptr, rows, held_rows, columns, begin, N, K: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the fp32 product of x's rows and a tile's weight rows, over WIDTH elements of K from ``begin``.

    rows: the rows of x.
    held_rows: which of them exist; 0 is used for the rest.
    columns: the weight rows, or rows of codes; 0 is used for those from N on.
    """
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
        acc = tl.dot(x, w.to(x.dtype), acc, input_precision="ieee")
    return acc


@triton.jit
def copied_product(
    x_tiles, w_tiles, first_row, first_w_row, begin, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the same product as :func:`tile_product`, from tiles copied by TMA, which reads 0 past the end.

    x_tiles and w_tiles: TMA descriptors, whose tiles start at ``first_row`` and ``first_w_row``.
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, WIDTH, BLOCK_K):
        x = x_tiles.load([first_row, begin + first])
        w = w_tiles.load([first_w_row, begin + first])
        acc = tl.dot(x, tl.trans(w), acc)
    return acc


@triton.jit
def copied_gated_product(
    x_tiles, w_tiles, first_row, first_w_row, half, begin, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return x's rows times the gate's weight rows, and x's rows times the up projection's, from TMA copies.

    The up projection's weight rows are ``half`` rows after the gate's.
    """
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, WIDTH, BLOCK_K):
        x = x_tiles.load([first_row, begin + first])
        w = w_tiles.load([first_w_row, begin + first])
        gate = tl.dot(x, tl.trans(w), gate)
        w = w_tiles.load([half + first_w_row, begin + first])
        up = tl.dot(x, tl.trans(w), up)
    return gate, up


@triton.jit(do_not_specialize=["M"])
def _some_rows_kernel(
    x_ptr, weight_ptr, scales_ptr, x_tiles, w_tiles, bias_ptr, out_ptr, M, N,
    K: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute one BLOCK_M x BLOCK_N tile per program, over one of PARTS ranges of K, in a pipelined loop.

    scales_ptr: the scales of quantised weights, or None.
    x_tiles and w_tiles: TMA descriptors, or None to load tiles by pointers.
    """
    block = tl.program_id(0)
    w_rows = weight_rows(block, tl.arange(0, BLOCK_N), N, BLOCK_N, ACTIVATION)
    first_row = tl.program_id(1) * BLOCK_M
    rows = tl.arange(0, BLOCK_M)  # within the tile: only the offset of its first row needs 64 bits
    held_rows = first_row + rows < M
    x_ptr += first_row.to(tl.int64) * K
    part = tl.program_id(2)
    RANGE: tl.constexpr = K // PARTS
    if BIAS:
        bias = tl.load(bias_ptr + w_rows, mask=w_rows < tl.where(part == 0, N, 0), other=0.0).to(tl.float32)
    begin = part * RANGE
    WIDTH: tl.constexpr = BLOCK_N // 2 if ACTIVATION == "swiglu" else BLOCK_N
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    if x_tiles is None:
        acc = tile_product(
            x_ptr, weight_ptr, rows, held_rows, w_rows, begin, N, K, RANGE, BLOCK_M, BLOCK_N, BLOCK_K
        )
        if scales_ptr is not None:
            acc *= tl.load(scales_ptr + w_rows, mask=w_rows < N, other=0.0)[None, :]
        if BIAS:
            acc += bias[None, :]
        acc = activated(acc, BLOCK_M, BLOCK_N, ACTIVATION)
    elif ACTIVATION == "swiglu":
        gate, up = copied_gated_product(
            x_tiles, w_tiles, first_row, block * WIDTH, N // 2, begin, RANGE, BLOCK_M, WIDTH, BLOCK_K
        )
        if BIAS:
            gate_bias, up_bias = tl.split(tl.reshape(bias, (WIDTH, 2)))
            gate, up = gate + gate_bias[None, :], up + up_bias[None, :]
        acc = silu(gate) * up
    else:
        acc = copied_product(
            x_tiles, w_tiles, first_row, block * WIDTH, begin, RANGE, BLOCK_M, WIDTH, BLOCK_K
        )
        if BIAS:
            acc += bias[None, :]
        acc = activated(acc, BLOCK_M, BLOCK_N, ACTIVATION)
    n_out = N // 2 if ACTIVATION == "swiglu" else N
    columns = block * WIDTH + tl.arange(0, WIDTH)
    target = out_ptr + (part * M + first_row).to(tl.int64) * n_out + rows[:, None] * n_out + columns[None, :]
    inside = held_rows[:, None] & (columns[None, :] < n_out)
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=inside)


def output_width(n: int, activation: Activation) -> int:
    """Return the number of output columns for n weight rows."""
    return n // 2 if activation == "swiglu" else n


def some_rows_linear(
    *, x, weight, bias=None, activation: Activation = "none", parts=1, form: RowFormat | None = None,
    dependent: int = False, shape: ShapeOf | None = None, copies: bool = True,
) -> Tensor:  # fmt: skip
    """Compute ``f(x @ weight.T + bias)`` as :func:`some_rows_linear_ref` does, in Triton.

    All tensors must be contiguous.

    form: requires two digits and :func:`ring.holds`.
    dependent: the launch mode, as in ``launch_options``.
    shape: maps (rows, n, k, dtype, parts) to tile sizes, warps and pipeline stages; None for the tuned or the
        fastest measured ones, or for ``ring.ring_linear`` where that is faster.
    copies: True to use TMA where that is faster; False to load tiles in the same way for any number of rows.
    """
    (rows, k), n = x.shape, len(weight)
    in_ring = form is not None or isinstance(x, QuantizedRows)
    tile = shape(rows, n, k, x.dtype, parts) if shape else tile_of(x, weight, activation, parts, in_ring)
    if tile is None or len(tile) == 1:
        fused = {"bias": bias, "activation": activation}
        gemm = grouped_ring_linear if isinstance(weight, GroupedWeight) else ring.ring_linear
        block_n = tile and tile[0]
        return gemm(x=x, weight=weight, **fused, parts=parts, block_n=block_n, dependent=dependent)
    width = output_width(n, activation)
    weight, scales = parts_of_weight(weight)
    out = x.new_empty(rows, width) if parts == 1 else x.new_empty(parts, rows, n, dtype=torch.float32)
    block_m, block_n, block_k, warps, stages = tile
    stages = fitting_stages(stages, block_m, block_n, block_k, x.element_size(), x.device)
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k}
    added, fused = x if bias is None else bias, {"BIAS": bias is not None, "ACTIVATION": activation}
    options = {"num_warps": warps, "num_stages": stages, **launch_options(dependent)}
    tiles = None, None
    if copies and scales is None:
        tiles = _described(x, weight, k // parts, block_m, output_width(block_n, activation), block_k)
    _some_rows_kernel[(cdiv(n, block_n), cdiv(rows, block_m), parts)](
        x, weight, scales, *tiles, added, out, rows, n, K=k, PARTS=parts, **blocks, **fused, **options
    )
    return out


def tile_of(
    x: AnyRows, weight: AnyWeight, activation: str, parts: int, in_ring: bool = False
) -> Shape | tuple[int] | None:
    """Return the tuned tile, or else the fastest measured one; None for ``ring.ring_linear``.

    in_ring: whether only the ring can run; what is tuned is then its ``block_n`` alone.
    """
    rows, (n, k) = len(x), weight.shape
    form = None if isinstance(weight, Tensor) else weight.form
    few = rows == 1 and not in_ring  # what is tuned is then a tile of ``few_rows``
    can_tune = in_ring or (form is None and not few and ring.runs_on(x.device, x.dtype))
    tuned = choice_of(rows, n, k, activation, form) if can_tune else None
    if tuned is not None and tuned.parts == parts:
        return tuned.tile
    if in_ring or not isinstance(x, Tensor) or ring.is_faster(x, weight, activation, parts):
        return None
    return some_rows_shape(rows, n, k, x.dtype, parts)


def _described(x: Tensor, weight: Tensor, width: int, block_m: int, block_n: int, block_k: int):
    """Return TMA descriptors of x's and the weight's tiles, or (None, None) for ordinary loads.

    TMA requires rows of a multiple of 16 bytes, and ranges of K that end where a tile ends. Ordinary loads
    are faster for tiles of fewer than ``TMA_ROWS`` rows, for up to 128 rows of narrow models, and for fp32.
    """
    whole = width % block_k == 0 or width == x.shape[1]
    few = block_m < TMA_ROWS or (len(x) <= 128 and is_narrow(*weight.shape))
    if x.dtype == torch.float32 or few or x.shape[1] % 8 or not whole:
        return None, None
    return tuple(
        TensorDescriptor(it, list(it.shape), [it.shape[1], 1], [rows, block_k])
        for it, rows in ((x, block_m), (weight, block_n))
    )
