"""LM head fused with token selection, so that logits never reach memory: torch reference and kernel.

Each program multiplies the hidden states by one tile of the vocabulary and keeps each row's best value and
its index; ``advance.advance`` picks the best of the ``[M, TILES]`` results. A sampled row's value is
``logit + temperature * gumbel noise``, whose argmax is an exact draw from ``softmax(logits / temperature)``
(Gumbel 1954), with the noise of ``noise.gumbel``. Logits are compared in fp32: rounded to 16 bits, many of a
large vocabulary would tie. If head and hidden states are quantised, codes are multiplied by codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rosellm.models.quantized import FINER, AnyRows, AnyWeight, full, parts_of_rows, parts_of_weight
from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.roseinfer.kernels.draw import MAX_TEMPERATURE
from rosellm.roseinfer.kernels.linear import fitting_stages, tile_product
from rosellm.roseinfer.kernels.noise import gumbel, gumbel_noise, row_key
from rosellm.roseinfer.kernels.tile_tables import best
from rosellm.triton_or_none import cdiv, tl, triton

ROLES = {"_best_tokens_kernel": "head"}
Shape = Callable[[int, torch.dtype], tuple[int, int, int, int, int]]


def best_tokens_ref(
    *,
    hidden: AnyRows,
    weight: AnyWeight,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    sampled: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return each row's best value ``[M, 1]`` fp32 and its token ``[M, 1]`` int32 (torch reference).

    hidden: ``[M, K]``, the final hidden states, or ``QuantizedRows`` of two digits.
    weight: ``[N, K]``, the head, or a ``QuantizedWeight``, which quantised hidden states require.
    temperature: ``[M]`` fp32; 0 for a greedy row.
    seeds: ``[M]`` int64.
    positions: ``[M]`` int32, the number of tokens cached before this step; the drawn token has index
        ``positions + 1``.
    sampled: False promises that all rows are greedy.

    NaN logits count as +inf, so that ``advance`` detects them.
    """
    logits = full(hidden).float() @ full(weight).float().t()
    logits = torch.where(logits.isnan(), float("inf"), logits)
    if sampled:
        noise = gumbel_noise(seeds, positions + 1, weight.shape[0])
        temperatures = temperature.clamp_max(MAX_TEMPERATURE)[:, None]
        logits = torch.where(temperatures > 0, logits + temperatures * noise, logits)
    values, indices = logits.max(dim=1, keepdim=True)
    return values, indices.int()


@triton.jit
def tile_logits(
    hidden_ptr, hidden_scales_ptr, weight_ptr, weight_scales_ptr, first_row, rows, held_rows, columns, M, N,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    FINER: tl.constexpr,
):  # fmt: skip
    """Return the fp32 logits ``[BLOCK_M, BLOCK_N]`` of a tile of rows and tokens.

    hidden_scales_ptr, weight_scales_ptr: the scales of quantised hidden states and of a quantised head, or
        None.
    rows: indices of the tile's rows, less ``first_row``.
    held_rows: which of them exist.
    columns: the tile's tokens.
    FINER: how many times finer the second digit is than the first.
    """
    if hidden_scales_ptr is None:
        hidden_ptr += first_row.to(tl.int64) * K
        logits = tile_product(
            hidden_ptr, weight_ptr, rows, held_rows, columns, 0, N, K, K, BLOCK_M, BLOCK_N, BLOCK_K
        )
    else:
        hidden_ptr += first_row.to(tl.int64) * 2 * K
        digits = product_of_codes(
            weight_ptr, hidden_ptr, columns, N, 2 * (M - first_row), K, BLOCK_N, 2 * BLOCK_M, BLOCK_K
        )
        first, second = tl.split(tl.reshape(digits, (BLOCK_N, BLOCK_M, 2)))
        logits = tl.trans(first + second / FINER)
        logits *= tl.load(hidden_scales_ptr + first_row + rows, mask=held_rows, other=0.0)[:, None]
    if weight_scales_ptr is not None:
        logits *= tl.load(weight_scales_ptr + columns, mask=columns < N, other=0.0)[None, :]
    return logits


@triton.jit
def product_of_codes(
    weight_ptr, x_ptr, w_rows, N, M, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the products of a tile's rows of weight codes with M rows of codes: fp32 ``[ROWS, COLUMNS]``.

    The wide operand of ``wgmma`` is the weight, so that few rows of codes are not padded.
    """
    m = tl.arange(0, COLUMNS)
    acc = tl.zeros((ROWS, COLUMNS), tl.int32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        w = tl.load(
            weight_ptr + w_rows[:, None].to(tl.int64) * K + k[None, :],
            mask=(w_rows < N)[:, None] & (k < K)[None, :],
            other=0.0,
        )
        x = tl.load(x_ptr + m[None, :] * K + k[:, None], mask=(m < M)[None, :] & (k < K)[:, None], other=0.0)
        acc = tl.dot(w, x, acc, out_dtype=tl.int32)
    return acc.to(tl.float32)


@triton.jit
def with_noise(
    logits, amounts, rows, held_rows, columns, seeds_ptr, positions_ptr, seed_stride, state_stride
):
    """Add the noise of each row's next token, times ``amounts``, to a tile's logits, and return them.

    amounts: ``[BLOCK_M]``, the rows' temperatures; rows with 0 are unchanged.
    rows: indices of the rows.
    held_rows: which of the rows exist.
    columns: the tile's tokens.
    """
    if tl.max(amounts, axis=0) > 0:
        seeds = tl.load(seeds_ptr + rows * seed_stride, mask=held_rows, other=0)
        positions = tl.load(positions_ptr + rows * state_stride, mask=held_rows, other=0) + 1
        first, second = row_key(seeds, positions)
        noise = gumbel(first[:, None], second[:, None], columns[None, :].to(tl.uint32))
        logits = tl.where(amounts[:, None] > 0, logits + amounts[:, None] * noise, logits)
    return logits


@triton.jit
def store_best(values_ptr, indices_ptr, logits, rows, held_rows, tile, TILES, BLOCK_N: tl.constexpr):
    """Store each row's largest value in a tile, and the token that has it."""
    best, index = tl.max(logits, axis=1, return_indices=True)
    tl.store(values_ptr + rows * TILES + tile, best, mask=held_rows)
    tl.store(indices_ptr + rows * TILES + tile, tile * BLOCK_N + index, mask=held_rows)


@triton.jit(do_not_specialize=["M"])
def _best_tokens_kernel(
    hidden_ptr, hidden_scales_ptr, weight_ptr, weight_scales_ptr, temperature_ptr, seeds_ptr, positions_ptr,
    values_ptr, indices_ptr, state_stride, seed_stride, M, N, TILES,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    FINER: tl.constexpr, SAMPLED: tl.constexpr, MAX_TEMPERATURE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    first_row = tl.program_id(0) * BLOCK_M
    tile_rows = tl.arange(0, BLOCK_M)
    held_rows = first_row + tile_rows < M
    rows = first_row.to(tl.int64) + tile_rows
    if SAMPLED:  # before the wait: no kernel of the step writes temperatures
        temperatures = tl.load(temperature_ptr + rows * state_stride, mask=held_rows, other=0.0)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    logits = tile_logits(
        hidden_ptr, hidden_scales_ptr, weight_ptr, weight_scales_ptr, first_row, tile_rows, held_rows,
        columns, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, FINER,
    )  # fmt: skip
    logits += tl.where(columns < N, 0.0, float("-inf"))[None, :]
    logits = tl.where(logits == logits, logits, float("inf"))
    if SAMPLED:
        temperatures = tl.minimum(temperatures, MAX_TEMPERATURE)
        logits = with_noise(
            logits, temperatures, rows, held_rows, columns,
            seeds_ptr, positions_ptr, seed_stride, state_stride,
        )  # fmt: skip
    store_best(values_ptr, indices_ptr, logits, rows, held_rows, tile, TILES, BLOCK_N)


def _shape(rows: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """Return tile sizes, warps and pipeline stages for ``rows`` rows."""
    return best("head", rows=rows, bits=8 * dtype.itemsize)


def head_launch(
    hidden: AnyRows, weight: AnyWeight, shape: Shape, dependent: int, most_rows: int = 1 << 30
) -> tuple[tuple[Tensor | None, ...], dict[str, Any], dict[str, Any]]:
    """Return the first arguments, the constants and the launch options of a kernel that multiplies the head.

    shape, dependent: as in :func:`best_tokens`. most_rows: of a tile.
    """
    codes, scales, digits = parts_of_rows(hidden)
    block_m, block_n, block_k, warps, stages = shape(len(hidden), codes.dtype)
    block_m = min(block_m, most_rows)
    size, device = codes.element_size(), codes.device
    stages = fitting_stages(stages, digits * block_m, block_n, block_k, size, device)
    constants: dict[str, Any] = {
        "K": hidden.shape[1],
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
    }
    constants |= {"FINER": FINER.get(codes.dtype, 1.0), "MAX_TEMPERATURE": MAX_TEMPERATURE}
    options = {"num_warps": warps, "num_stages": stages, **launch_options(dependent)}
    return (codes, scales, *parts_of_weight(weight)), constants, options


def best_tokens(
    *, hidden, weight, temperature, seeds, positions, sampled=True,
    dependent: int = False, shape: Shape = _shape,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return each row's best value and token in each vocabulary tile, ``[M, TILES]``, by a Triton kernel.

    Arguments as in :func:`best_tokens_ref`; hidden and weight must be contiguous, and temperature and
    positions columns of one state (equal row strides).

    sampled: False compiles sampling out, for batches of greedy rows only: random numbers take registers that
        the GEMM could use.
    dependent: the launch mode, as in ``launch_options``.
    shape: maps (rows, dtype) to tile sizes, warps and pipeline stages.
    """
    rows, vocab, device = len(hidden), len(weight), hidden.device
    operands, constants, options = head_launch(hidden, weight, shape, dependent)
    tiles = cdiv(vocab, constants["BLOCK_N"])
    values = torch.empty(rows, tiles, device=device, dtype=torch.float32)
    indices = torch.empty(rows, tiles, device=device, dtype=torch.int32)
    state = temperature, seeds, positions
    strides = positions.stride(0), seeds.stride(0)
    _best_tokens_kernel[(cdiv(rows, constants["BLOCK_M"]), tiles)](
        *operands, *state, values, indices, *strides, rows, vocab, tiles, SAMPLED=sampled,
        **constants, **options,
    )  # fmt: skip
    return values, indices
