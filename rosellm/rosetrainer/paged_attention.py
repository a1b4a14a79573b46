"""Decode attention over a paged KV cache (PagedAttention, Kwon et al. 2023, arXiv:2309.06180).

Shapes: B sequences with one new token each, H query heads, H_kv key/value heads (H a multiple of H_kv), D
head size. A layer's caches are ``[N_BLOCKS, H_kv, BLOCK_SIZE, D]``. Row b of ``block_table`` lists the blocks
of sequence b in order; ``context_lens[b]`` is its number of cached tokens. The new token's own key and value
are not cached yet: they are passed as ``k_new`` and ``v_new``, and the query attends to them, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rosellm.models.quantized import AnyHeads, full
from rosellm.triton_or_none import next_power_of_2, tl, triton

ROLES = {"_paged_attention_decode_kernel": "attention"}
FIXED_NUM_WARPS, FIXED_NUM_STAGES = 4, 3
AUTOTUNE_CHOICES = ((2, 2), (4, 2), (4, 4), (8, 2))  # (num_warps, num_stages)


def paged_attention_decode_ref(
    *,
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache_layer: Tensor,
    v_cache_layer: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attend with each sequence's new token to its cache and itself (torch reference, in fp32 arithmetic).

    q: ``[B, H, D]``.
    k_new, v_new: ``[B, H_kv, D]``.
    k_cache_layer, v_cache_layer: the layer's caches.
    block_table: ``[B, MAX_BLOCKS]`` int32; entries past a sequence's context may hold anything.
    context_lens: ``[B]`` int32, which may be 0.
    scale: factor on the scores.
    window: number of tokens that each query attends to, including the new one; None for all.

    Returns ``[B, H, D]`` in q's dtype.
    """
    held = held_slots(block_table, context_lens, k_cache_layer, None if window is None else window - 1)
    k = torch.cat((held.gather(k_cache_layer), k_new[:, :, None].float()), dim=2)  # [B, H_kv, S + 1, D]
    v = torch.cat((held.gather(v_cache_layer), v_new[:, :, None].float()), dim=2)
    return attend(q, k, v, F.pad(held.seen, (0, 1), value=True), scale)


@dataclass(frozen=True)
class HeldSlots:
    """The locations of each sequence's cached tokens, in N blocks of any layer.

    index: ``[B, H_kv, N]`` int64, block times ``H_kv`` plus head.
    seen: ``[B, 1, 1, S]`` bool, which of the S = N * width slots hold a token that is attended to.
    width: number of slots read from each block: the block size, or less if all contexts are shorter.
    """

    index: Tensor
    seen: Tensor
    width: int

    def gather(self, cache_layer: AnyHeads) -> Tensor:
        """Return a layer's keys or values ``[B, H_kv, S, D]`` in fp32; 0, never NaN, in slots not seen."""
        slots = full(cache_layer.flatten(0, 1)[:, : self.width][self.index])  # [B, H_kv, N, width, D]
        return slots.flatten(2, 3).float().masked_fill_(~self.seen.transpose(2, 3), 0)


def held_slots(
    block_table: Tensor, context_lens: Tensor, cache_layer: AnyHeads, last: int | None = None
) -> HeldSlots:
    """Return where each sequence's tokens are in any layer.

    block_table, context_lens: as in :func:`paged_attention_decode_ref`. Entries of blocks without a token
        that is attended to may hold anything.
    cache_layer: any layer's keys or values, of which only the shape is read.
    last: how many of each sequence's last tokens are attended to; None for all.
    """
    _, n_kv_heads, block_size, _ = cache_layer.shape
    longest, device = max(int(context_lens.max()), 0), context_lens.device
    width, start = min(longest, block_size), torch.arange(0, longest, block_size, device=device)  # [N]
    unseen = start >= context_lens[:, None]  # [B, N]
    if last is not None:
        unseen |= start + block_size <= context_lens[:, None] - last
    blocks = block_table[:, : len(start)].long().masked_fill(unseen, 0)
    index = blocks[:, None] * n_kv_heads + torch.arange(n_kv_heads, device=device)[:, None]
    slots = torch.arange(len(start) * width, device=device)  # [S]
    seen = slots < context_lens[:, None]
    if last is not None:
        seen &= slots >= context_lens[:, None] - last
    return HeldSlots(index, seen[:, None, None], width)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Return the attention of q ``[B, H, D]`` to cached keys and values, in q's shape and dtype.

    k, v: ``[B, H_kv, S, D]`` fp32.
    seen: ``[B, 1, 1, S]`` bool, which keys are attended to.
    scale: factor on the scores.
    """
    grouped = q.float().view(len(q), k.shape[1], -1, q.shape[2])  # [B, H_kv, G, D]
    return F.scaled_dot_product_attention(grouped, k, v, seen, scale=scale).reshape(q.shape).to(q.dtype)


@triton.jit
def _paged_attention_decode_kernel(
    out_ptr, q_ptr, k_new_ptr, v_new_ptr, k_cache_ptr, v_cache_ptr, block_table_ptr, context_lens_ptr,
    scale, q_stride, kv_new_stride, block_stride, MAX_BLOCKS,
    H: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Attend with one query head of one sequence per program, to one block of tokens after the other.

    The softmax is computed online (Milakov & Gimelshein 2018).
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    kv_head = head // (H // H_KV)
    d = tl.arange(0, D_PADDED)
    in_head = d < D
    slot = tl.arange(0, BLOCK_SIZE)

    q = tl.load(q_ptr + row * q_stride + head * D + d, mask=in_head, other=0.0).to(tl.float32) * scale
    new = row * kv_new_stride + kv_head * D + d
    k_new = tl.load(k_new_ptr + new, mask=in_head, other=0.0).to(tl.float32)
    m_i = tl.sum(q * k_new, axis=0)
    l_i = 1.0
    acc = tl.load(v_new_ptr + new, mask=in_head, other=0.0).to(tl.float32)

    context_len = tl.load(context_lens_ptr + row)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(context_len - WINDOW + 1, 0)
    for start in range(begin // BLOCK_SIZE * BLOCK_SIZE, context_len, BLOCK_SIZE):
        block = tl.load(block_table_ptr + row * MAX_BLOCKS + start // BLOCK_SIZE).to(tl.int64)
        held = (start + slot < context_len) & (start + slot >= begin)
        tile = block * block_stride + kv_head * BLOCK_SIZE * D + slot[:, None] * D + d[None, :]
        loaded = held[:, None] & in_head[None, :]
        k = tl.load(k_cache_ptr + tile, mask=loaded, other=0.0).to(tl.float32)
        scores = tl.where(held, tl.sum(k * q[None, :], axis=1), float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, axis=0))
        p = tl.exp(scores - m_new)
        alpha = tl.exp(m_i - m_new)
        v = tl.load(v_cache_ptr + tile, mask=loaded, other=0.0).to(tl.float32)
        acc = acc * alpha + tl.sum(v * p[:, None], axis=0)
        l_i = l_i * alpha + tl.sum(p, axis=0)
        m_i = m_new

    tl.store(out_ptr + (row * H + head) * D + d, (acc / l_i).to(out_ptr.dtype.element_ty), mask=in_head)


def make_fixed_paged_attention_decode(
    num_warps: int = FIXED_NUM_WARPS, num_stages: int = FIXED_NUM_STAGES
) -> Callable[..., Tensor]:
    """Return the Triton version of :func:`paged_attention_decode_ref`, at one launch configuration.

    Caches and rows of block_table must be contiguous. q, k_new and v_new may be slices of a fused projection
    (strided rows, contiguous ``[H, D]``; k_new and v_new with one stride). The block size must be a power of
    two.
    """

    def paged_attention_decode(
        *, q, k_new, v_new, k_cache_layer, v_cache_layer, block_table, context_lens, scale, window=None
    ) -> Tensor:
        out = q.new_empty(q.shape)
        grid, arguments, constants = _launch_arguments(
            out, q, k_new, v_new, k_cache_layer, v_cache_layer, block_table, context_lens, scale, window
        )
        kernel = _paged_attention_decode_kernel[grid]
        kernel(*arguments, **constants, num_warps=num_warps, num_stages=num_stages)
        return out

    return paged_attention_decode


paged_attention_decode = make_fixed_paged_attention_decode()


class AutotunedPagedAttention:
    """An autotuned version of :func:`paged_attention_decode_ref`.

    tuner: the kernel, wrapped by Triton's autotuner, which caches its choices.
    """

    def __init__(self, tuner: Any) -> None:
        self.tuner = tuner

    def __call__(
        self, *, q, k_new, v_new, k_cache_layer, v_cache_layer, block_table, context_lens, scale, window=None
    ) -> Tensor:
        out = q.new_empty(q.shape)
        grid, arguments, constants = _launch_arguments(
            out, q, k_new, v_new, k_cache_layer, v_cache_layer, block_table, context_lens, scale, window
        )
        self.tuner[grid](*arguments, **constants)
        return out


def make_autotuned_paged_attention_decode(
    do_bench: Callable[..., list[float]] | None = None,
) -> AutotunedPagedAttention:
    """Return paged attention that ``triton.autotune`` tunes: num_warps and num_stages.

    There is one choice for each H, D, BLOCK_SIZE and MAX_BLOCKS. Each call of this function creates its own
    tuner, so engines share no tuning state. The kernel only writes its output, so repeated launches while
    tuning are harmless. do_bench: replaces Triton's timer; required without a GPU.
    """
    tune = triton.autotune(
        configs=[triton.Config({}, num_warps=w, num_stages=s) for w, s in AUTOTUNE_CHOICES],
        key=["H", "D", "BLOCK_SIZE", "MAX_BLOCKS"],
        do_bench=do_bench,
    )
    return AutotunedPagedAttention(tune(_paged_attention_decode_kernel))


def _launch_arguments(out, q, k_new, v_new, k_cache, v_cache, block_table, context_lens, scale, window):
    batch, n_heads, head_dim = q.shape
    _, n_kv_heads, block_size, _ = k_cache.shape
    strides = q.stride(0), k_new.stride(0), k_cache.stride(0), block_table.stride(0)
    arguments = out, q, k_new, v_new, k_cache, v_cache, block_table, context_lens, scale, *strides
    padded = next_power_of_2(head_dim)
    sizes = {"H": n_heads, "H_KV": n_kv_heads, "D": head_dim, "D_PADDED": padded, "BLOCK_SIZE": block_size}
    return (batch, n_heads), arguments, sizes | {"WINDOW": window or 0}
