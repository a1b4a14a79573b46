"""Device functions that quantise rows to codes of 8 bits (``models.quantized``)."""

from __future__ import annotations

from rosellm.triton_or_none import tl, triton


@triton.jit
def coded(x, dtype: tl.constexpr):
    """Return the codes ``[N, K]`` and scales ``[N]`` of rows x ``[N, K]`` fp32.

    The scale of a row with a NaN is infinite, so that what is read from it is NaN.
    """
    LARGEST: tl.constexpr = 127.0 if dtype == tl.int8 else 448.0
    largest = tl.max(tl.where(x == x, tl.abs(x), float("inf")), axis=1)
    scales = tl.maximum(largest / LARGEST, 1.1754943508222875e-38)  # the smallest normal number
    left = tl.minimum(tl.maximum(x / scales[:, None], -LARGEST), LARGEST)  # 448 may have become 448.00003
    return nearest(left, dtype), scales


@triton.jit
def nearest(x, dtype: tl.constexpr):
    """Round to the nearest code."""
    if dtype == tl.int8:
        x = (x + 12582912.0) - 12582912.0  # 1.5 * 2 ** 23: to the nearest integer
    return x.to(dtype)
