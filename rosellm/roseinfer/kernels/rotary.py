"""What happens to q and k between the projection and a prefill's attention, in one kernel: spec and kernel.

Each head is normalised (RMSNorm, as in Qwen3) and turned by its token's position (RoPE, Su et al. 2021). A
decode step does both inside its attention kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from rosellm.models.rope import rotate
from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.triton_or_none import tl, triton

ROLES = {"_position_heads_kernel": "elementwise"}
WARPS = 4


def position_heads_ref(
    *,
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> None:
    """The specification, in place: q ``[N, H, D]``, k ``[N, H_kv, D]``, at positions ``[N]`` int32.

    cos_sin ``[P, D]`` fp32: ``Rope.table``. q_norm, k_norm ``[D]``: weights of the norms, both or neither. A
    negative position, of an inert row, counts as 0.
    """
    angles = cos_sin[positions.clamp_min(0)]  # [N, D]
    for heads, weight in ((q, q_norm), (k, k_norm)):
        normed = heads if weight is None else _normed(heads, weight, eps)
        heads.copy_(rotate(normed, angles))


def _normed(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(heads.float(), weight.shape, weight.float(), eps)


@triton.jit
def _position(
    heads_ptr, norm_ptr, cos, sin, eps, H: tl.constexpr, H_PADDED: tl.constexpr, D: tl.constexpr,
    HALF_PADDED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """In place: every element is read and written by one thread, so the halves need no barrier."""
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
    """One row per program."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, HALF_PADDED)
    position = tl.maximum(tl.load(positions_ptr + row * position_stride), 0).to(tl.int64)
    cos = tl.load(cos_sin_ptr + position * D + d, mask=d < D // 2, other=0.0)
    sin = tl.load(cos_sin_ptr + position * D + D // 2 + d, mask=d < D // 2, other=0.0)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    _position(q_ptr + row * row_stride, q_norm_ptr, cos, sin, eps, H, H_PADDED, D, HALF_PADDED, NORM)
    _position(k_ptr + row * row_stride, k_norm_ptr, cos, sin, eps, H_KV, H_KV_PADDED, D, HALF_PADDED, NORM)


def make_position_heads(dependent: int = False) -> Callable[..., None]:
    """The Triton kernel, called like :func:`position_heads_ref`.

    q and k are slices of one fused projection: their rows share a stride, ``[H, D]`` is contiguous.
    """
    launch = launch_options(dependent)

    def position_heads(*, q, k, positions, cos_sin, q_norm, k_norm, eps) -> None:
        rows, n_heads, head_dim = q.shape
        n_kv, padded = k.shape[1], triton.next_power_of_2(head_dim // 2)
        norms = (q, k) if q_norm is None else (q_norm, k_norm)
        heads = {"H_PADDED": triton.next_power_of_2(n_heads), "H_KV_PADDED": triton.next_power_of_2(n_kv)}
        sizes = {"H": n_heads, "H_KV": n_kv, **heads, "D": head_dim, "HALF_PADDED": padded}
        options = {"NORM": q_norm is not None, "DEPENDENT": dependent, "num_warps": WARPS, **launch}
        _position_heads_kernel[(rows,)](
            q, k, *norms, cos_sin, positions, q.stride(0), positions.stride(0), eps, **sizes, **options
        )

    return position_heads
