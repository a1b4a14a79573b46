"""Copies of quantised prefixes in the model's dtype, one layer at a time, for prefill attention.

Every tile of a prefill, and every query head, reads the keys and values of its sequence's cached prefix.
If the prefix is long, it is faster to convert the codes once beforehand than in each of these programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rosellm.models.quantized import QuantizedHeads
from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.roseinfer.kernels.paged_cache import AttentionShape, PagedCache, head_slot, load_scales
from rosellm.triton_or_none import cdiv, tl, triton

ROLES = {"_widen_kernel": "attention"}
MOST_TOKENS = 2**16  # per prefill: 256 MiB of 16-bit keys and values for 8 heads of size 128
TOKENS = 32  # per program


class Prefixes(NamedTuple):
    """The cached prefixes of a prefill's sequences, whose copies lie back to back, in whole blocks.

    firsts: int32 ``[rows]``, where the copy of the sequence in each row of the block table begins, in tokens.
    blocks: int32 ``[n]``, the copied blocks, one sequence after another.
    """

    firsts: Tensor
    blocks: Tensor

    @classmethod
    def of(cls, words: Tensor, rows: int) -> Prefixes:
        """Split the result of :func:`prefix_words`, on the device, for ``rows`` rows of the block table."""
        return cls(words[:rows], words[rows:])


def prefix_words(starts: Sequence[int] | np.ndarray, tables: np.ndarray, block_size: int) -> np.ndarray:
    """Return ``firsts`` and ``blocks`` of :class:`Prefixes`, concatenated → ``[rows + n]``, on the host.

    starts: number of cached tokens of the sequence in each row of the block table; 0 copies nothing.
    tables: the block table ``[rows, W]`` int32.
    """
    n_blocks = -(-np.asarray(starts) // block_size)
    firsts = (n_blocks.cumsum() - n_blocks) * block_size
    blocks = tables[np.arange(tables.shape[1]) < n_blocks[:, None]]
    return np.concatenate((firsts, blocks)).astype(np.int32)


def widen_ref(*, cache: QuantizedHeads, blocks: Tensor) -> Tensor:
    """Copy the tokens of blocks in the model's dtype → ``[n * BLOCK_SIZE, H_kv, D]`` (torch reference).

    cache: a layer's keys or values, ``[N_BLOCKS, H_kv, BLOCK_SIZE, D]``.
    blocks: ``[n]``, block ids.
    """
    return cache[blocks.long()].dequantized().transpose(1, 2).flatten(0, 1).to(cache.dtype)


@triton.jit(do_not_specialize=["n_tokens"], do_not_specialize_on_alignment=["blocks_ptr"])
def _widen_kernel(
    cache, blocks_ptr, n_tokens, k_ptr, v_ptr, shape: tl.constexpr, TOKENS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Copy the keys and values of TOKENS tokens, of one head, per program."""
    token, kv_head = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1)
    d = tl.arange(0, shape.D_PADDED)[None, :]
    held = token < n_tokens
    inside = held[:, None] & (d < shape.D)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    block = tl.load(blocks_ptr + token // shape.BLOCK_SIZE, mask=held, other=0)
    slots = head_slot(block, token % shape.BLOCK_SIZE, kv_head, shape)
    k_scales, v_scales = load_scales(cache, slots, held)
    source = slots[:, None] * shape.D + d
    target = (token.to(tl.int64) * shape.H_KV + kv_head)[:, None] * shape.D + d
    k = tl.load(cache.k + source, mask=inside, other=0.0).to(tl.float32) * k_scales[:, None]
    v = tl.load(cache.v + source, mask=inside, other=0.0).to(tl.float32) * v_scales[:, None]
    tl.store(k_ptr + target, k.to(k_ptr.dtype.element_ty), mask=inside)
    tl.store(v_ptr + target, v.to(v_ptr.dtype.element_ty), mask=inside)


def widen(
    *, cache: PagedCache, shape: AttentionShape, blocks: Tensor, dtype: torch.dtype, dependent: int = False
) -> tuple[Tensor, Tensor]:
    """Copy both keys and values as :func:`widen_ref` does, in Triton.

    cache, shape: a layer's, from ``layer_arguments``.

    dtype: that of the copies.
    dependent: the launch mode, as in ``launch_options``.
    """
    n_tokens = len(blocks) * shape.BLOCK_SIZE
    k, v = (blocks.new_empty(n_tokens, shape.H_KV, shape.D, dtype=dtype) for _ in range(2))
    _widen_kernel[(cdiv(n_tokens, TOKENS), shape.H_KV)](
        cache, blocks, n_tokens, k, v, shape, TOKENS, num_warps=4, **launch_options(dependent)
    )
    return k, v
