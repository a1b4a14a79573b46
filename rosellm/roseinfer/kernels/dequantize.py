"""Dequantised weights, for GEMMs of many rows by the vendor's library: torch reference and kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from rosellm.models.quantized import QuantizedWeight
from rosellm.roseinfer.kernels.linear import input_of
from rosellm.triton_or_none import cdiv, tl, triton

ROLES = {"_dequantize_kernel": "GEMM"}
ROWS, PLACES = 8, 512  # codes per program


def dequantize_ref(*, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Return a quantised weight ``[N, K]`` in a floating-point dtype (torch reference)."""
    return weight.dequantized(dtype)


@triton.jit
def _dequantize_kernel(
    codes_ptr, scales_ptr, out_ptr, N, K: tl.constexpr, ROWS: tl.constexpr, PLACES: tl.constexpr
):
    """Dequantise ROWS x PLACES codes per program."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    inside = (rows < N)[:, None] & (place < K)[None, :]
    start = rows[:, None].to(tl.int64) * K
    scales = tl.load(scales_ptr + rows, mask=rows < N, other=0.0)
    codes = tl.load(codes_ptr + start + place[None, :], mask=inside, other=0.0).to(tl.float32)
    wide = (codes * scales[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + start + input_of(place, True)[None, :], wide, mask=inside)


def dequantize(*, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Dequantise as :func:`dequantize_ref` does, in Triton."""
    n, k = weight.shape
    out = torch.empty(n, k, dtype=dtype, device=weight.codes.device)
    grid = cdiv(n, ROWS), cdiv(k, PLACES)
    _dequantize_kernel[grid](weight.codes, weight.scales, out, n, k, ROWS, PLACES)
    return out
