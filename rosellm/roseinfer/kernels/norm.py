"""Kernels between a layer's GEMMs: embeddings; residual sum, bias and norm; the SwiGLU activation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from rosellm.models.quantized import (
    AnyRows,
    AnyWeight,
    QuantizedRows,
    QuantizedWeight,
    RowFormat,
    parts_of_weight,
)
from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.roseinfer.kernels.linear import silu
from rosellm.roseinfer.kernels.quantize import empty_rows, store_codes, warps_of
from rosellm.triton_or_none import cdiv, next_power_of_2, tl, triton

ROLES = {"_embed_kernel": "embedding", "_add_norm_kernel": "norm", "_silu_mul_kernel": "elementwise"}


def embed_ref(
    *,
    ids: Tensor,
    positions: Tensor,
    tokens: AnyWeight,
    places: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the sum of token and position embeddings, ``[N, C]`` (torch reference).

    ids: ``[N]``, token ids.
    positions: ``[N]``; a negative one, of an inert row, counts as 0.
    tokens: ``[V, C]``, the token embeddings, or a ``QuantizedWeight``.
    places: ``[P, C]``, the position embeddings; None if the model has none, so that positions are ignored.
    dtype: that of the embeddings, if tokens are quantised.
    """
    embedded = tokens[ids]
    if isinstance(embedded, QuantizedWeight):
        embedded = embedded.dequantized(cast(torch.dtype, dtype))
    return embedded if places is None else embedded + places[positions.clamp_min(0)]


def add_norm_ref(
    *,
    x: Tensor,
    delta: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor,
    shift: Tensor | None,
    eps: float,
    form: RowFormat | None = None,
) -> Any:
    """Add ``sum(delta) + bias`` to x in place, and return the norm of x (reference, in fp32 arithmetic).

    x: ``[M, C]``.
    delta: ``[P, M, C]``, partial sums; if None, x stays unchanged and bias is ignored.
    bias: ``[C]``, or None.
    scale: ``[C]``.
    shift: ``[C]`` for LayerNorm; None for RMSNorm (Zhang & Sennrich 2019).
    eps: added to the variance.
    form: the format to which the norm is quantised, or None.

    The norm, ``[M, C]`` in x's dtype, is that of the updated x, rounded to its dtype.
    """
    if delta is not None:
        added = delta.float().sum(dim=0)
        x.copy_(x.float() + (added if bias is None else added + bias.float()))
    if shift is None:
        out = F.rms_norm(x.float(), x.shape[1:], scale.float(), eps)
    else:
        out = F.layer_norm(x.float(), x.shape[1:], scale.float(), shift.float(), eps)
    return out.to(x.dtype) if form is None else replace(QuantizedRows.of(out, form), dtype=x.dtype)


def silu_mul_ref(*, x: Tensor) -> Tensor:
    """Return ``silu(x[:, :F]) * x[:, F:]`` (SwiGLU, Shazeer 2020) of x ``[M, 2 F]`` (reference, in fp32)."""
    gate, up = x.float().chunk(2, dim=1)
    return (F.silu(gate) * up).to(x.dtype)


@triton.jit
def _embed_kernel(
    ids_ptr, positions_ptr, tokens_ptr, scales_ptr, places_ptr, out_ptr, id_stride, position_stride,
    C: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Embed one token per program. scales_ptr: the scales of quantised embeddings, or None."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDTH)
    inside = c < C
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    token = tl.load(ids_ptr + row * id_stride).to(tl.int64)
    if PLACES:
        position = tl.maximum(tl.load(positions_ptr + row * position_stride), 0).to(tl.int64)
    embedded = tl.load(tokens_ptr + token * C + c, mask=inside).to(tl.float32)
    if scales_ptr is not None:
        embedded *= tl.load(scales_ptr + token)
        embedded = embedded.to(out_ptr.dtype.element_ty).to(tl.float32)
    if PLACES:
        embedded += tl.load(places_ptr + position * C + c, mask=inside).to(tl.float32)
    tl.store(out_ptr + row * C + c, embedded.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_affine(
    scale_ptr, shift_ptr, bias_ptr, c, inside, WIDTH: tl.constexpr, SHIFT: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """Load a norm's scale and shift, and the bias that is added before the norm, ``[WIDTH]`` fp32 each.

    An absent shift or bias is 0.
    """
    scale = tl.load(scale_ptr + c, mask=inside, other=0.0).to(tl.float32)
    shift = tl.zeros((WIDTH,), tl.float32)
    if SHIFT:
        shift = tl.load(shift_ptr + c, mask=inside, other=0.0).to(tl.float32)
    bias = tl.zeros((WIDTH,), tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + c, mask=inside, other=0.0).to(tl.float32)
    return scale, shift, bias


@triton.jit
def normed(x, inside, scale, shift, eps, C: tl.constexpr, SHIFT: tl.constexpr):
    """Return the norm of a row x ``[WIDTH]`` fp32: LayerNorm if SHIFT, otherwise RMSNorm."""
    if SHIFT:
        mean = tl.sum(x, axis=0) / C
        centred = tl.where(inside, x - mean, 0.0)
        variance = tl.sum(centred * centred, axis=0) / C
        return centred * tl.rsqrt(variance + eps) * scale + shift
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / C + eps) * scale


@triton.jit(do_not_specialize=["M"])
def _add_norm_kernel(
    x_ptr, delta_ptr, bias_ptr, scale_ptr, shift_ptr, out_ptr, out_scales_ptr, eps, M,
    C: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr,
    SHIFT: tl.constexpr, DIGITS: tl.constexpr, FINER: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Add the partial sums and the bias to one row of x per program, and normalise the row.

    DIGITS: the number of codes per element of the result; 0 if it is not quantised.
    """
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDTH)
    inside = c < C
    scale, shift, added = load_affine(scale_ptr, shift_ptr, bias_ptr, c, inside, WIDTH, SHIFT, BIAS)
    launch_dependents(DEPENDENT)  # the GEMM that follows may load its first weights while this waits
    wait_for_predecessor(DEPENDENT)
    x = tl.load(x_ptr + row * C + c, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        for part in tl.static_range(PARTS):
            added += tl.load(delta_ptr + (part * M + row) * C + c, mask=inside, other=0.0).to(tl.float32)
        rounded = (x + added).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row * C + c, rounded, mask=inside)
        x = rounded.to(tl.float32)
    out = normed(x, inside, scale, shift, eps, C, SHIFT)
    if DIGITS > 0:
        out = tl.where(inside, out, 0.0)
        store_codes(out, out_ptr, out_scales_ptr, row, c, inside, C, DIGITS, FINER)
    else:
        tl.store(out_ptr + row * C + c, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul_kernel(x_ptr, out_ptr, C: tl.constexpr, WIDTH: tl.constexpr, DEPENDENT: tl.constexpr):
    """Compute WIDTH elements of one row's result per program."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = c < C
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    gate = tl.load(x_ptr + row * 2 * C + c, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * C + C + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * C + c, (silu(gate) * up).to(out_ptr.dtype.element_ty), mask=inside)


def embed(*, ids, positions, tokens, places=None, dtype=None, dependent: int = False) -> Tensor:
    """Embed tokens as :func:`embed_ref` does, in Triton.

    ids and positions are int32; tables are contiguous. dependent: the launch mode, as in ``launch_options``.
    """
    rows, width = len(ids), tokens.shape[1]
    tokens, scales = parts_of_weight(tokens)
    out = torch.empty(rows, width, dtype=dtype or tokens.dtype, device=tokens.device)
    padded = next_power_of_2(width)
    strides = ids.stride(0), positions.stride(0)
    table, learned = tokens if places is None else places, places is not None
    options = {"num_warps": warps_of(rows, padded), **launch_options(dependent)}
    _embed_kernel[(rows,)](
        ids, positions, tokens, scales, table, out, *strides, C=width, WIDTH=padded, PLACES=learned, **options
    )
    return out


def add_norm(
    *, x, delta=None, bias=None, scale, shift, eps, form: RowFormat | None = None, dependent: int = False,
    warps: int | None = None,
) -> Any:  # fmt: skip
    """Add to x and return its norm as :func:`add_norm_ref` does, in Triton; tensors must be contiguous.

    dependent: the launch mode, as in ``launch_options``.
    warps: warps per row, on which the order of sums depends; None for the fastest number.
    """
    rows, width = x.shape
    constants: dict[str, float] = {"DIGITS": 0, "FINER": 0.0}
    out: AnyRows = x.new_empty(rows, width)
    codes, scales = out, x
    if form is not None:
        out, constants = empty_rows(x, width, form)
        codes, scales = out.codes, out.scales
    padded = next_power_of_2(width)
    parts = 0 if delta is None else len(delta)
    given = {"PARTS": parts, "BIAS": bias is not None, "SHIFT": shift is not None}
    delta, bias, shift = (x if it is None else it for it in (delta, bias, shift))
    options = {"num_warps": warps or warps_of(rows, padded), **launch_options(dependent)}
    _add_norm_kernel[(rows,)](
        x, delta, bias, scale, shift, codes, scales, eps, rows,
        C=width, WIDTH=padded, **given, **constants, **options,
    )  # fmt: skip
    return out


def silu_mul(*, x, dependent: int = False) -> Tensor:
    """Compute SwiGLU as :func:`silu_mul_ref` does, in Triton; x must be contiguous."""
    rows, width = len(x), x.shape[1] // 2
    out = x.new_empty(rows, width)
    block = min(1024, next_power_of_2(width))
    options = {"num_warps": warps_of(rows, block), **launch_options(dependent)}
    _silu_mul_kernel[(rows, cdiv(width, block))](x, out, C=width, WIDTH=block, **options)
    return out
