"""Write one new token per sequence into a layer's paged KV cache: a torch reference and three kernels.

k_cache_layer, v_cache_layer: the layer's caches, ``[N_BLOCKS, H_kv, BLOCK_SIZE, D]``, contiguous.
key_new, value_new: ``[B, H_kv, D]``; rows with equal strides, as in slices of a fused projection, and
    contiguous ``[H_kv, D]``.
batch_idx, block_idx, pos: ``[n]`` int32. Token i is copied from row ``batch_idx[i]`` to slot ``pos[i]`` of
    block ``block_idx[i]``.

No two tokens of one append may share a slot. The kernels copy bits, so they match the reference exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rosellm.triton_or_none import next_power_of_2, tl, triton

_KERNELS = "_kv_append_kernel", "_kv_append_full_batch_kernel", "_kv_append_identity_pos_kernel"
ROLES = dict.fromkeys(_KERNELS, "append")


def kv_append_ref(
    *,
    k_cache_layer: Tensor,
    v_cache_layer: Tensor,
    key_new: Tensor,
    value_new: Tensor,
    batch_idx: Tensor,
    block_idx: Tensor,
    pos: Tensor,
) -> None:
    """Copy token i from row ``batch_idx[i]`` to its slot (torch reference).

    The index tensors may also be int64.
    """
    k_cache_layer[block_idx, :, pos] = key_new.index_select(0, batch_idx)
    v_cache_layer[block_idx, :, pos] = value_new.index_select(0, batch_idx)


def kv_append_rows_ref(*, k_cache_layer, v_cache_layer, key_new, value_new, block_idx, pos) -> None:
    """Copy rows 0..B-1 in order to their slots (torch reference).

    pos: a tensor, or an int that all rows share.
    """
    k_cache_layer[block_idx, :, pos] = key_new
    v_cache_layer[block_idx, :, pos] = value_new


def kv_append_live_rows_ref(*, k_cache_layer, v_cache_layer, key_new, value_new, block_idx, pos) -> None:
    """Copy rows 0..B-1 in order (torch reference), except inert rows, whose block is negative."""
    live = block_idx >= 0
    k_cache_layer[block_idx[live], :, pos[live]] = key_new[live]
    v_cache_layer[block_idx[live], :, pos[live]] = value_new[live]


@triton.jit
def _copy_token(
    k_cache_ptr, v_cache_ptr, key_ptr, value_ptr, source_row, block, pos, new_stride,
    H_KV: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Copy the ``H_KV * D`` elements of one token's key and value into its slot; skip a negative block."""
    element = tl.arange(0, WIDTH)
    mask = element < tl.where(block >= 0, H_KV * D, 0)
    head = element // D
    target = block.to(tl.int64) * (H_KV * BLOCK_SIZE * D) + head * (BLOCK_SIZE * D) + pos * D + element % D
    source = source_row.to(tl.int64) * new_stride + element
    tl.store(k_cache_ptr + target, tl.load(key_ptr + source, mask=mask), mask=mask)
    tl.store(v_cache_ptr + target, tl.load(value_ptr + source, mask=mask), mask=mask)


@triton.jit
def _kv_append_kernel(
    k_cache_ptr, v_cache_ptr, key_ptr, value_ptr, batch_idx_ptr, block_idx_ptr, pos_ptr, new_stride,
    H_KV: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    row = tl.load(batch_idx_ptr + token)
    block = tl.load(block_idx_ptr + token)
    pos = tl.load(pos_ptr + token)
    _copy_token(
        k_cache_ptr, v_cache_ptr, key_ptr, value_ptr, row, block, pos, new_stride, H_KV, BLOCK_SIZE, D, WIDTH
    )


@triton.jit(do_not_specialize=["pos"])
def _kv_append_full_batch_kernel(
    k_cache_ptr, v_cache_ptr, key_ptr, value_ptr, block_idx_ptr, pos, new_stride,
    H_KV: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    block = tl.load(block_idx_ptr + row)
    _copy_token(
        k_cache_ptr, v_cache_ptr, key_ptr, value_ptr, row, block, pos, new_stride, H_KV, BLOCK_SIZE, D, WIDTH
    )


@triton.jit
def _kv_append_identity_pos_kernel(
    k_cache_ptr, v_cache_ptr, key_ptr, value_ptr, block_idx_ptr, pos_ptr, new_stride,
    H_KV: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    block = tl.load(block_idx_ptr + row)
    pos = tl.load(pos_ptr + row)
    _copy_token(
        k_cache_ptr, v_cache_ptr, key_ptr, value_ptr, row, block, pos, new_stride, H_KV, BLOCK_SIZE, D, WIDTH
    )


def kv_append_triton(*, k_cache_layer, v_cache_layer, key_new, value_new, batch_idx, block_idx, pos) -> None:
    """Append any subset of ``key_new``'s rows, each to its own slot, in one kernel."""
    indices, constants = (batch_idx, block_idx, pos), _constants(k_cache_layer)
    _kv_append_kernel[(block_idx.numel(),)](
        k_cache_layer, v_cache_layer, key_new, value_new, *indices, key_new.stride(0), **constants
    )


def kv_append_triton_full_batch(*, k_cache_layer, v_cache_layer, key_new, value_new, block_idx, pos) -> None:
    """Append rows 0..B-1 in order, all at the same slot ``pos`` (a Python int) of their blocks."""
    constants = _constants(k_cache_layer)
    _kv_append_full_batch_kernel[(block_idx.numel(),)](
        k_cache_layer, v_cache_layer, key_new, value_new, block_idx, pos, key_new.stride(0), **constants
    )


def kv_append_triton_identity_pos(
    *, k_cache_layer, v_cache_layer, key_new, value_new, block_idx, pos
) -> None:
    """Append rows 0..B-1 in order, each at its slot ``pos[b]``, except rows with a negative block."""
    constants = _constants(k_cache_layer)
    _kv_append_identity_pos_kernel[(block_idx.numel(),)](
        k_cache_layer, v_cache_layer, key_new, value_new, block_idx, pos, key_new.stride(0), **constants
    )


def _constants(cache: Tensor) -> dict[str, int]:
    _, n_kv_heads, block_size, head_dim = cache.shape
    width = next_power_of_2(n_kv_heads * head_dim)
    return {
        "H_KV": n_kv_heads,
        "BLOCK_SIZE": block_size,
        "D": head_dim,
        "WIDTH": width,
        "num_warps": 4 if width >= 512 else 1,
    }


def kv_append_bytes(n_tokens: int, n_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes an append must move: each key and value element read once and written once."""
    return 4 * n_tokens * n_kv_heads * head_dim * dtype.itemsize
