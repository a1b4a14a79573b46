"""Norm and rotary embedding of q and k, between projection and attention: reference and kernels.

Each head is normalised (RMSNorm, as in Qwen3) and rotated by its token's position (RoPE, Su et al. 2021). In
a prefill this is a separate kernel; a decode step's attention kernel does it itself.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from rosellm.models.rope import Rotary, rotate
from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.triton_or_none import next_power_of_2, tl, triton

ROLES = {"_position_heads_kernel": "elementwise"}
WARPS = 4


def position_heads_ref(*, q: Tensor, k: Tensor, positions: Tensor, rotary: Rotary) -> None:
    """Normalise and rotate q ``[N, H, D]`` and k ``[N, H_kv, D]`` in place (torch reference).

    positions: ``[N]`` int32, the tokens' positions; a negative one, of an inert row, counts as 0.
    """
    for heads, norm in ((q, rotary.q_norm), (k, rotary.k_norm)):
        heads.copy_(positioned_ref(heads, norm, positions, rotary))


def positioned_ref(heads: Tensor, norm: Tensor | None, positions: Tensor, rotary: Rotary) -> Tensor:
    """Return heads ``[N, H, D]`` after norm and rotation, computed in fp32, in their dtype.

    norm: the norm's weights ``[D]``; None to rotate only.
    """
    wide = heads.float()
    if norm is not None:
        wide = F.rms_norm(wide, norm.shape, norm.float(), rotary.eps)
    return rotate(wide, rotary.cos_sin[positions.clamp_min(0)]).to(heads.dtype)


@triton.jit
def load_angles(rotary, position, shape: tl.constexpr):
    """Return cosines and signed sines ``[1, D]`` of a position; zeros if rotary is None.

    A rotated head is ``x * cos + swapped * sin``, where swapped is x with its halves exchanged.
    """
    D: tl.constexpr = shape.D_PADDED
    d = tl.arange(0, D)[None, :]
    if rotary is None:
        cos = tl.zeros((1, D), tl.float32)
        sin = cos
    else:
        HALF: tl.constexpr = shape.D // 2
        place = rotary.cos_sin + tl.maximum(position, 0).to(tl.int64) * shape.D + d % HALF
        cos = tl.load(place, mask=d < shape.D, other=0.0)
        sin = tl.load(place + HALF, mask=d < shape.D, other=0.0)
        sin = tl.where(d < HALF, -sin, sin)
    return cos, sin


@triton.jit
def load_heads(ptr, rotary, count, ROWS: tl.constexpr, shape: tl.constexpr):
    """Load ``count`` adjacent heads, padded with zeros to ``[ROWS, D]``, as a pair of tensors.

    In the second tensor, the halves of each head are swapped; without rotary, it equals the first.
    """
    m = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, shape.D_PADDED)[None, :]
    mask = (m < count) & (d < shape.D)
    heads = tl.load(ptr + m * shape.D + d, mask=mask, other=0.0)
    swapped = heads
    if rotary is not None:
        swapped = tl.load(ptr + m * shape.D + (d + shape.D // 2) % shape.D, mask=mask, other=0.0)
    return heads, swapped


@triton.jit
def positioned(heads, norm, rotary, cos, sin, NORMS: tl.constexpr, shape: tl.constexpr):
    """Return heads after norm (if NORMS) and rotation, in their dtype; unchanged if rotary is None.

    heads and norm: pairs from :func:`load_heads`. cos and sin: from :func:`load_angles`.
    """
    x, swapped = heads
    dtype: tl.constexpr = x.dtype
    if rotary is not None:
        x, swapped = x.to(tl.float32), swapped.to(tl.float32)
        if NORMS:
            unit = tl.rsqrt(tl.sum(x * x, axis=1) / shape.D + rotary.eps)[:, None]
            x = x * unit * norm[0].to(tl.float32)
            swapped = swapped * unit * norm[1].to(tl.float32)
        x = (x * cos + swapped * sin).to(dtype)
    return x


@triton.jit
def _position(
    heads_ptr, norm_ptr, cos, sin, eps, H: tl.constexpr, H_PADDED: tl.constexpr, D: tl.constexpr,
    HALF_PADDED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Normalise (if NORM) and rotate the heads of one row in place.

    No barrier is needed between loads and stores, since one thread handles each element.
    """
    head = tl.arange(0, H_PADDED)[:, None]
    d = tl.arange(0, HALF_PADDED)
    inside = (head < H) & (d < D // 2)[None, :]
    place = heads_ptr + head * D + d[None, :]
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + D // 2, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        weights = tl.load(norm_ptr + d, mask=d < D // 2, other=0.0).to(tl.float32)
        more = tl.load(norm_ptr + D // 2 + d, mask=d < D // 2, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / D + eps)[:, None]
        first = first * inverse * weights[None, :]
        second = second * inverse * more[None, :]
    kind = heads_ptr.dtype.element_ty
    tl.store(place, (first * cos[None, :] - second * sin[None, :]).to(kind), mask=inside)
    tl.store(place + D // 2, (second * cos[None, :] + first * sin[None, :]).to(kind), mask=inside)


@triton.jit
def _position_heads_kernel(
    q_ptr, k_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, positions_ptr, row_stride, position_stride, eps,
    H: tl.constexpr, H_KV: tl.constexpr, H_PADDED: tl.constexpr, H_KV_PADDED: tl.constexpr, D: tl.constexpr,
    HALF_PADDED: tl.constexpr, NORM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate the heads of one row per program."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, HALF_PADDED)
    position = tl.maximum(tl.load(positions_ptr + row * position_stride), 0).to(tl.int64)
    cos = tl.load(cos_sin_ptr + position * D + d, mask=d < D // 2, other=0.0)
    sin = tl.load(cos_sin_ptr + position * D + D // 2 + d, mask=d < D // 2, other=0.0)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    _position(q_ptr + row * row_stride, q_norm_ptr, cos, sin, eps, H, H_PADDED, D, HALF_PADDED, NORM)
    _position(k_ptr + row * row_stride, k_norm_ptr, cos, sin, eps, H_KV, H_KV_PADDED, D, HALF_PADDED, NORM)


def position_heads(*, q, k, positions, rotary, dependent: int = False) -> None:
    """Normalise and rotate q and k in place as :func:`position_heads_ref` does, in Triton.

    q and k are slices of one fused projection, with a common row stride and contiguous ``[H, D]``.
    """
    rows, n_heads, head_dim = q.shape
    n_kv, padded = k.shape[1], next_power_of_2(head_dim // 2)
    has_norms = rotary.q_norm is not None
    norms = (rotary.q_norm, rotary.k_norm) if has_norms else (q, k)
    strides = q.stride(0), positions.stride(0)
    heads = {"H_PADDED": next_power_of_2(n_heads), "H_KV_PADDED": next_power_of_2(n_kv)}
    sizes = {"H": n_heads, "H_KV": n_kv, **heads, "D": head_dim, "HALF_PADDED": padded}
    options = {"NORM": has_norms, "num_warps": WARPS, **launch_options(dependent)}
    _position_heads_kernel[(rows,)](
        q, k, *norms, rotary.cos_sin, positions, *strides, rotary.eps, **sizes, **options
    )
