"""The LM head with its argmax: logits never reach memory. A torch spec and a kernel.

The likeliest token of a row is found tile by tile: each program multiplies the hidden states by some of the
vocabulary's columns and keeps the best of them, value and index; who reads the ``[M, TILES]`` results takes the best
of those. Logits are rounded to the model's dtype before they are compared, as if they had been stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosellm.roseinfer.dependent_launch import launch_dependents, wait_for_predecessor


@triton.jit
def _best_of_tile_kernel(
    hidden_ptr,
    weight_ptr,
    values_ptr,
    indices_ptr,
    M,
    V,
    TILES,
    C: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    tile = tl.program_id(1)
    columns = tile * BN + tl.arange(0, BN)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, BK)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    acc = tl.zeros((BM, BN), tl.float32)
    for first in range(0, C, BK):
        inner = first + c
        h = tl.load(
            hidden_ptr + rows[:, None] * C + inner[None, :],
            mask=(rows[:, None] < M) & (inner[None, :] < C),
            other=0.0,
        )
        w = tl.load(
            weight_ptr + columns[None, :].to(tl.int64) * C + inner[:, None],
            mask=(columns[None, :] < V) & (inner[:, None] < C),
            other=0.0,
        )
        acc = tl.dot(h, w, acc, input_precision="ieee")
    logits = acc.to(hidden_ptr.dtype.element_ty).to(tl.float32)
    logits = tl.where(columns[None, :] < V, logits, float("-inf"))
    best, index = tl.max(logits, axis=1, return_indices=True)
    tl.store(values_ptr + rows * TILES + tile, best, mask=rows < M)
    tl.store(indices_ptr + rows * TILES + tile, tile * BN + index, mask=rows < M)
