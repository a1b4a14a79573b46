"""Quantised activations, keys and values, and dequantised weights for GEMMs by the vendor's library."""

from __future__ import annotations

import torch
from torch import Tensor

from rosellm.models.quantized import (
    CODES,
    FINER,
    GROUP,
    GroupedWeight,
    QuantizedRows,
    QuantizedWeight,
    RowFormat,
)
from rosellm.roseinfer.kernels.codes import coded, nearest
from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.roseinfer.kernels.linear import Activation, activated_ref, gelu, output_width, silu
from rosellm.roseinfer.kernels.paged_cache import (
    AttentionShape,
    NewTokens,
    PagedCache,
    head_slot,
    store_quantized,
)
from rosellm.roseinfer.kernels.prefill_tiles import Tiles
from rosellm.triton_or_none import cdiv, next_power_of_2, tl, triton

ROLES = {"_quantize_kernel": "elementwise", "_round_heads_kernel": "elementwise"}
ROLES |= {"_dequantize_kernel": "GEMM", "_dequantize_groups_kernel": "GEMM"}
ROWS, PLACES, GROUP_ROWS = 8, 512, 32  # codes per program; rows of a group per program


def quantize_ref(*, x: Tensor, form: RowFormat, activation: Activation = "none") -> QuantizedRows:
    """Apply an activation to x, and quantise the result (torch reference).

    x: ``[M, K]``, or ``[M, 2 K]`` for "swiglu".
    activation: "none", "gelu" (tanh form), or "swiglu".
    """
    return QuantizedRows.of(activated_ref(x.float(), activation).to(x.dtype), form)


def dequantize_ref(*, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Return a quantised weight ``[N, K]`` in a floating-point dtype (torch reference)."""
    return weight.dequantized(dtype)


@triton.jit
def store_codes(
    x, codes_ptr, scales_ptr, row, c, inside, C: tl.constexpr, DIGITS: tl.constexpr, FINER: tl.constexpr
):
    """Quantise a row x ``[WIDTH]`` fp32, which is 0 outside, and store its codes and scale.

    c: the indices of its elements. inside: which of them exist.
    """
    dtype: tl.constexpr = codes_ptr.dtype.element_ty
    codes, scale = coded(x[None, :], dtype)
    place = codes_ptr + row * DIGITS * C + c[None, :]
    tl.store(place, codes, mask=inside[None, :])
    tl.store(scales_ptr + row + tl.arange(0, 1), scale)
    if DIGITS == 2:
        rest = x[None, :] * (1.0 / scale)[:, None] - codes.to(tl.float32)
        tl.store(place + C, nearest(rest * FINER, dtype), mask=inside[None, :])


@triton.jit
def _quantize_kernel(
    x_ptr, codes_ptr, scales_ptr, C: tl.constexpr, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr,
    DIGITS: tl.constexpr, FINER: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Quantise one row of C elements per program."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDTH)
    inside = c < C
    launch_dependents(DEPENDENT)  # the GEMM that follows may load its first weights while this waits
    wait_for_predecessor(DEPENDENT)
    if ACTIVATION == "swiglu":
        gate = tl.load(x_ptr + row * 2 * C + c, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + row * 2 * C + C + c, mask=inside, other=0.0).to(tl.float32)
        x = silu(gate) * up
    else:
        x = tl.load(x_ptr + row * C + c, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "gelu":
        x = gelu(x)
    x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    store_codes(x, codes_ptr, scales_ptr, row, c, inside, C, DIGITS, FINER)


@triton.jit(
    do_not_specialize=["tiles_stride", "table_stride"],
    do_not_specialize_on_alignment=["tiles_ptr", "table_ptr"],
)
def _round_heads_kernel(
    new, cache, table_ptr, table_stride, tiles_ptr, tiles_stride, shape: tl.constexpr, ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Quantise one head's keys and values of a tile per program."""
    tiles_ptr += tl.program_id(0)
    kv_head = tl.program_id(1)
    first, n_rows = tl.load(tiles_ptr).to(tl.int64), tl.load(tiles_ptr + tiles_stride)
    position, piece = tl.load(tiles_ptr + 2 * tiles_stride), tl.load(tiles_ptr + 6 * tiles_stride)
    table_ptr += tl.load(tiles_ptr + 5 * tiles_stride).to(tl.int64) * table_stride
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    if n_rows == 0 or piece > 0:
        return
    i, d = tl.arange(0, ROWS), tl.arange(0, shape.D_PADDED)[None, :]
    own = i < n_rows
    inside = own[:, None] & (d < shape.D)
    place = ((first + i) * new.kv_stride + kv_head * shape.D)[:, None] + d
    k = tl.load(new.k + place, mask=inside, other=0.0)
    v = tl.load(new.v + place, mask=inside, other=0.0)
    slot = position + i
    block = tl.load(table_ptr + slot // shape.BLOCK_SIZE, mask=own, other=0)
    slots = head_slot(block, slot % shape.BLOCK_SIZE, kv_head, shape)
    k_rounded, v_rounded = store_quantized(cache, slots, own, k, v, shape)
    tl.store(new.k + place, k_rounded.to(k.dtype), mask=inside)
    tl.store(new.v + place, v_rounded.to(v.dtype), mask=inside)


@triton.jit
def _dequantize_kernel(
    codes_ptr, scales_ptr, out_ptr, N, K: tl.constexpr, ROWS: tl.constexpr, PLACES: tl.constexpr
):
    """Dequantise ROWS x PLACES codes per program."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    inside = (rows < N)[:, None] & (k < K)[None, :]
    place = rows[:, None].to(tl.int64) * K + k[None, :]
    scales = tl.load(scales_ptr + rows, mask=rows < N, other=0.0)
    codes = tl.load(codes_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, (codes * scales[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dequantize_groups_kernel(codes_ptr, scales_ptr, out_ptr, N, K: tl.constexpr, ROWS: tl.constexpr):
    """Dequantise ROWS rows of one group per program (``quantized.packed``)."""
    rows, group = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    inside, first = (rows < N)[:, None], rows.to(tl.int64)[:, None] * K + group * 128
    scales = tl.load(scales_ptr + group.to(tl.int64) * N + rows, mask=rows < N, other=0.0).to(tl.float32)
    codes = tl.load(codes_ptr + first // 2 + tl.arange(0, 64)[None, :], mask=inside, other=0).to(tl.int32)
    pairs = tl.reshape(tl.join(codes << 28 >> 28, codes << 24 >> 28), (ROWS, 4, 4, 4, 2))
    codes = tl.reshape(tl.permute(pairs, (0, 2, 4, 1, 3)), (ROWS, 128)).to(tl.float32)
    values = (codes * scales[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + first + tl.arange(0, 128)[None, :], values, mask=inside)


def empty_rows(x: Tensor, width: int, form: RowFormat) -> tuple[QuantizedRows, dict[str, float]]:
    """Return uninitialised rows of ``width`` elements, as many as x has, and constants of ``store_codes``."""
    dtype = CODES[form.name]
    codes = torch.empty(len(x), form.digits, width, dtype=dtype, device=x.device)
    rows = QuantizedRows(codes, torch.empty(len(x), dtype=torch.float32, device=x.device), x.dtype)
    return rows, {"DIGITS": form.digits, "FINER": FINER[dtype]}


def warps_of(rows: int, width: int) -> int:
    """Return the number of warps of a program that computes one of ``rows`` rows.

    A thread computes at most 32 elements: with more, registers spill.
    """
    most = 32 if rows <= 2 else 16 if rows <= 16 else 8 if rows <= 1024 else 4
    return max(1, min(max(most, width // 1024), width // (128 if most > 8 else 256)))


def quantize(*, x, form: RowFormat, activation: Activation = "none", dependent: int = False) -> QuantizedRows:
    """Quantise as :func:`quantize_ref` does, in Triton; x must be contiguous.

    dependent: the launch mode, as in ``launch_options``.
    """
    width = output_width(x.shape[1], activation)
    rows, constants = empty_rows(x, width, form)
    padded = next_power_of_2(width)
    options = {"num_warps": warps_of(len(x), padded), **launch_options(dependent)}
    _quantize_kernel[(len(x),)](
        x, rows.codes, rows.scales, C=width, WIDTH=padded, ACTIVATION=activation, **constants, **options
    )
    return rows


def round_heads(
    *, new: NewTokens, cache: PagedCache, block_table: Tensor, tiles: Tiles, shape: AttentionShape,
    dependent: int = False,
) -> None:  # fmt: skip
    """Store the codes and scales of new keys and values, and round these in place to what is read, in Triton.

    new, cache, shape: a layer's, from ``layer_arguments``.
    block_table, tiles: as in ``prefill.prefill_attention``.
    """
    _round_heads_kernel[(tiles.columns.shape[1], shape.H_KV)](
        new, cache, block_table, block_table.stride(0), tiles.columns, tiles.columns.stride(0), shape,
        tiles.size, num_warps=8, **launch_options(dependent),
    )  # fmt: skip


def dequantize(*, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Dequantise as :func:`dequantize_ref` does, in Triton."""
    n, k = weight.shape
    out = torch.empty(n, k, dtype=dtype, device=weight.codes.device)
    if isinstance(weight, GroupedWeight):
        grid = cdiv(n, GROUP_ROWS), k // GROUP
        _dequantize_groups_kernel[grid](weight.codes, weight.scales, out, n, k, GROUP_ROWS)
        return out
    grid = cdiv(n, ROWS), cdiv(k, PLACES)
    _dequantize_kernel[grid](weight.codes, weight.scales, out, n, k, ROWS, PLACES)
    return out
