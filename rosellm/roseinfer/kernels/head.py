"""LM head fused with token selection, so that logits never reach memory: torch reference and kernel.

Each program multiplies the hidden states by one tile of the vocabulary and keeps each row's best value and
its index; ``advance.advance`` picks the best of the ``[M, TILES]`` results. A sampled row's value is
``logit + temperature * gumbel noise``, whose argmax is an exact draw from ``softmax(logits / temperature)``
(Gumbel 1954), with the noise of ``noise.gumbel``. Logits are compared in fp32: rounded to 16 bits, many of a
large vocabulary would tie.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

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
    hidden: Tensor,
    weight: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    sampled: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return each row's best value ``[M, 1]`` fp32 and its token ``[M, 1]`` int32 (torch reference).

    hidden: ``[M, K]``, the final hidden states.
    weight: ``[N, K]``, the head.
    temperature: ``[M]`` fp32; 0 for a greedy row.
    seeds: ``[M]`` int64.
    positions: ``[M]`` int32, the number of tokens cached before this step; the drawn token has index
        ``positions + 1``.
    sampled: False promises that all rows are greedy.

    NaN logits count as +inf, so that ``advance`` detects them.
    """
    logits = hidden.float() @ weight.float().t()
    logits = torch.where(logits.isnan(), float("inf"), logits)
    if sampled:
        noise = gumbel_noise(seeds, positions + 1, weight.shape[0])
        temperatures = temperature.clamp_max(MAX_TEMPERATURE)[:, None]
        logits = torch.where(temperatures > 0, logits + temperatures * noise, logits)
    values, indices = logits.max(dim=1, keepdim=True)
    return values, indices.int()


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
    hidden_ptr, weight_ptr, temperature_ptr, seeds_ptr, positions_ptr, values_ptr, indices_ptr,
    state_stride, seed_stride, M, N, TILES,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SAMPLED: tl.constexpr, MAX_TEMPERATURE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    first_row = tl.program_id(0) * BLOCK_M
    tile_rows = tl.arange(0, BLOCK_M)
    held_rows = first_row + tile_rows < M
    hidden_ptr += first_row.to(tl.int64) * K
    rows = first_row.to(tl.int64) + tile_rows
    if SAMPLED:  # before the wait: no kernel of the step writes temperatures
        temperatures = tl.load(temperature_ptr + rows * state_stride, mask=held_rows, other=0.0)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    acc = tile_product(
        hidden_ptr, weight_ptr, tile_rows, held_rows, columns, 0, N, K, K, BLOCK_M, BLOCK_N, BLOCK_K
    )
    logits = acc + tl.where(columns < N, 0.0, float("-inf"))[None, :]
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
    rows, width = hidden.shape
    vocab = weight.shape[0]
    block_m, block_n, block_k, warps, stages = shape(rows, hidden.dtype)
    size, device = hidden.element_size(), hidden.device
    stages = fitting_stages(stages, block_m, block_n, block_k, size, device)
    tiles = cdiv(vocab, block_n)
    values = torch.empty(rows, tiles, device=hidden.device)
    indices = torch.empty(rows, tiles, device=hidden.device, dtype=torch.int32)
    state = temperature, seeds, positions
    strides = positions.stride(0), seeds.stride(0)
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k}
    options = {"num_warps": warps, "num_stages": stages, **launch_options(dependent)}
    constants = {"K": width, "SAMPLED": sampled, "MAX_TEMPERATURE": MAX_TEMPERATURE, **blocks}
    _best_tokens_kernel[(cdiv(rows, block_m), tiles)](
        hidden, weight, *state, values, indices, *strides, rows, vocab, tiles, **constants, **options
    )
    return values, indices
