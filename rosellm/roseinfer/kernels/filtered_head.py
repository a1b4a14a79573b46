"""LM head for batches with top-k, top-p, min-p or penalties: torch reference and kernel.

Besides the work of ``head.best_tokens``, it applies penalties, and stores the logits of filtered rows, those
that are sampled from a subset of the vocabulary, for ``filtered.choose_filtered``. For rows with top-p only,
called rows by mass, it draws from all tokens as for unfiltered rows, because that draw is seldom rejected.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rosellm.models.quantized import AnyRows, AnyWeight, full
from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, wait_for_predecessor
from rosellm.roseinfer.kernels.draw import FLOAT32, penalised_ref
from rosellm.roseinfer.kernels.head import (
    MAX_TEMPERATURE,
    Shape,
    head_launch,
    store_best,
    tile_logits,
    with_noise,
)
from rosellm.roseinfer.kernels.noise import gumbel_noise
from rosellm.roseinfer.kernels.tile_tables import best
from rosellm.triton_or_none import cdiv, tl, triton

ROLES = {"_filtered_tiles_kernel": "head"}
PENALISED_ROWS = 64  # most rows of a tile with penalties, which take registers


class Tiles(NamedTuple):
    """The head's results for each vocabulary tile, from which filtered rows are sampled.

    values: ``[M, TILES]`` fp32, the best value of each tile, as from ``head.best_tokens``; without noise for
        filtered rows, except for those with top-p only.
    indices: ``[M, TILES]`` int32, the token of each value.
    maxima: ``[M, TILES]`` fp32, the largest logit of each tile, for filtered rows.
    masses: ``[M, TILES]`` fp32, the sum of ``exp((logit - largest) / temperature)`` per tile, for filtered
        rows.
    logits: ``[M, TILES * width]`` fp32, −inf past the vocabulary, for filtered rows.
    arrived: ``[M]`` int32, counters of each row's finished programs, zero at first.
    width: tokens per tile.
    """

    values: Tensor
    indices: Tensor
    maxima: Tensor
    masses: Tensor
    logits: Tensor
    arrived: Tensor
    width: int


class Settings(NamedTuple):
    """The columns of a device state that a draw reads, ``[M]`` each, and their row strides in elements.

    stride: the row stride of all columns but seeds.
    seed_stride: the row stride of seeds, which are int64.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor
    stride: int
    seed_stride: int


def settings_of(state: DeviceState) -> Settings:
    filters = state.temperatures, state.top_k, state.top_p, state.min_p
    return Settings(*filters, state.seeds, state.positions, state.positions.stride(0), state.seeds.stride(0))


def filtered_tiles_ref(
    *, hidden: AnyRows, weight: AnyWeight, state: DeviceState, counts: Tensor | None = None
) -> Tiles:
    """Compute the head of a batch with filtered rows, as a single tile (torch reference).

    hidden, weight: as in ``head.best_tokens_ref``.
    state: a device state of M rows.
    counts: int32 ``[S, N]`` or wider, the table of ``TokenCounts`` with the penalised rows' tokens; None if
        no row is penalised.
    """
    logits = full(hidden).float() @ full(weight).float().t()
    if counts is not None:
        logits = penalised_rows_ref(logits, state, counts)
    logits = torch.where(logits.isnan(), float("inf"), logits)
    without = state.filtered & ~state.by_mass
    amounts = torch.where(without, 0.0, state.temperatures.clamp_max(MAX_TEMPERATURE))[:, None]
    noise = gumbel_noise(state.seeds, state.positions + 1, weight.shape[0])
    values, indices = torch.where(amounts > 0, logits + amounts * noise, logits).max(dim=1, keepdim=True)
    maxima = logits.amax(dim=1, keepdim=True)
    below = logits - maxima
    masses = (below / state.temperatures[:, None].clamp_min(FLOAT32.tiny)).exp().sum(dim=1, keepdim=True)
    arrived = torch.zeros_like(indices[:, 0], dtype=torch.int32)
    return Tiles(values, indices.int(), maxima, masses, logits, arrived, weight.shape[0])


def penalised_rows_ref(logits: Tensor, state: DeviceState, counts: Tensor) -> Tensor:
    """Return logits ``[M, V]`` in fp32 after the penalties of the rows that have counts (torch reference).

    state: a device state of M rows. counts: as in :func:`filtered_tiles_ref`.
    """
    own, counts = state.counts, counts[:, : logits.shape[1]]
    entries = torch.where(own[:, None] > 0, counts[(own - 1).clamp_min(0).long()], 0)
    repetition = torch.where(own > 0, state.repetition, 1.0)
    return penalised_ref(logits, entries, repetition, state.presence, state.frequency)


@triton.jit
def penalised(logits, entries, repetition, presence, frequency):
    """Apply the biases and penalties of ``draw.penalised_ref`` to a tile.

    repetition, presence and frequency broadcast with the tile.
    """
    logits += (entries >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    logits = tl.where((entries & 0x8000) > 0, float("-inf"), logits)
    seen = entries & 0x7FFF
    times = seen >> 1
    repeated = tl.where(logits > 0, logits / repetition, logits * repetition)
    logits = tl.where(seen > 0, repeated, logits)
    return logits - frequency * times.to(tl.float32) - tl.where(times > 0, presence, 0.0)


@triton.jit
def penalised_rows(logits, penalties, counts_ptr, counts_stride, at, held_rows, columns, N):
    """Apply :func:`penalised` to a tile's rows that have counts.

    penalties: pointers to the state's columns counts, repetition, presence and frequency.
    at: offsets of the tile's rows in these columns, in elements.
    held_rows: which of the tile's rows exist.
    columns: the tile's tokens.
    N: size of the vocabulary.
    """
    counts_column, repetition_ptr, presence_ptr, frequency_ptr = penalties
    own = tl.load(counts_column + at, mask=held_rows, other=0)
    if tl.max(own, axis=0) > 0:
        repetition = tl.load(repetition_ptr + at, mask=own > 0, other=1.0)
        presence = tl.load(presence_ptr + at, mask=own > 0, other=0.0)
        frequency = tl.load(frequency_ptr + at, mask=own > 0, other=0.0)
        counted = (own > 0)[:, None] & (columns < N)[None, :]
        counts_of = counts_ptr + (own - 1).to(tl.int64) * counts_stride
        entries = tl.load(counts_of[:, None] + columns[None, :], mask=counted, other=0)
        logits = penalised(logits, entries, repetition[:, None], presence[:, None], frequency[:, None])
    return logits


@triton.jit(do_not_specialize=["M"])
def _filtered_tiles_kernel(
    hidden_ptr, hidden_scales_ptr, weight_ptr, weight_scales_ptr, tiles, settings, penalties,
    counts_ptr, counts_stride, M, N, TILES,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    FINER: tl.constexpr, PENALISED: tl.constexpr, MAX_TEMPERATURE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute one vocabulary tile for BLOCK_M rows per program.

    tiles: pointers to the tensors of :class:`Tiles`.
    penalties: pointers to the state's columns counts, repetition, presence and frequency.
    """
    values_ptr, indices_ptr, maxima_ptr, masses_ptr, logits_ptr, arrived_ptr = tiles
    tile = tl.program_id(1)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    first_row = tl.program_id(0) * BLOCK_M
    tile_rows = tl.arange(0, BLOCK_M)
    held_rows = first_row + tile_rows < M
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    logits = tile_logits(
        hidden_ptr, hidden_scales_ptr, weight_ptr, weight_scales_ptr, first_row, tile_rows, held_rows,
        columns, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, FINER,
    )  # fmt: skip
    rows = first_row.to(tl.int64) + tile_rows
    at = rows * settings.stride
    if PENALISED:
        logits = penalised_rows(logits, penalties, counts_ptr, counts_stride, at, held_rows, columns, N)
    logits = logits + tl.where(columns < N, 0.0, float("-inf"))[None, :]
    logits = tl.where(logits == logits, logits, float("inf"))
    temperatures = tl.load(settings.temperature + at, mask=held_rows, other=0.0)
    top_k = tl.load(settings.top_k + at, mask=held_rows, other=0)
    top_p = tl.load(settings.top_p + at, mask=held_rows, other=1.0)
    min_p = tl.load(settings.min_p + at, mask=held_rows, other=0.0)
    by_mass = (top_k == 0) & (min_p <= 0)
    kept = (temperatures > 0) & ((by_mass == 0) | (top_p < 1))
    amounts = tl.where(by_mass, tl.minimum(temperatures, MAX_TEMPERATURE), 0.0)
    # The padding's -inf is stored, too, so that readers of whole tiles need no mask.
    logits_ptr += first_row.to(tl.int64) * TILES * BLOCK_N
    target = logits_ptr + (tile_rows * TILES * BLOCK_N)[:, None] + columns[None, :]
    tl.store(target, logits, mask=kept[:, None])
    largest = tl.max(logits, axis=1)
    tl.store(maxima_ptr + rows * TILES + tile, largest, mask=kept)
    if tile == 0:
        tl.store(arrived_ptr + rows, tl.zeros((BLOCK_M,), tl.int32), mask=held_rows)
    largest = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)
    temperatures = tl.where(kept, tl.maximum(temperatures, 1.1754943508222875e-38), 1.0)
    shares = tl.exp((logits - largest[:, None]) / temperatures[:, None])
    tl.store(masses_ptr + rows * TILES + tile, tl.sum(shares, axis=1), mask=kept)
    logits = with_noise(
        logits, amounts, rows, held_rows, columns, settings.seeds, settings.positions, settings.seed_stride,
        settings.stride,
    )  # fmt: skip
    store_best(values_ptr, indices_ptr, logits, rows, held_rows, tile, TILES, BLOCK_N)


def filtered_shape(rows: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """Return tile sizes, warps and pipeline stages; a tile's width does not depend on the number of rows."""
    return best("filtered_head", rows=rows, bits=8 * dtype.itemsize)


def filtered_tiles(
    *, hidden, weight, state: DeviceState, counts=None, dependent: int = False, shape: Shape = filtered_shape
) -> Tiles:
    """Compute the head of a batch with filtered rows in Triton, with many tiles per row.

    Arguments as in :func:`filtered_tiles_ref`; hidden, weight and counts must be contiguous. In unfiltered
    rows, maxima, masses and logits stay uninitialised.

    dependent: the launch mode, as in ``launch_options``.
    shape: maps (rows, dtype) to tile sizes, warps and pipeline stages.
    """
    rows, vocab, device = len(hidden), len(weight), hidden.device
    most_rows = {} if counts is None else {"most_rows": PENALISED_ROWS}
    operands, constants, options = head_launch(hidden, weight, shape, dependent, **most_rows)
    block_m, block_n = constants["BLOCK_M"], constants["BLOCK_N"]
    n_tiles = cdiv(vocab, block_n)
    values, maxima, masses = (
        torch.empty(rows, n_tiles, device=device, dtype=torch.float32) for _ in range(3)
    )
    indices = torch.empty(rows, n_tiles, device=device, dtype=torch.int32)
    arrived = torch.empty(rows, device=device, dtype=torch.int32)
    logits = torch.empty(rows, n_tiles * block_n, device=device, dtype=torch.float32)
    tiles = values, indices, maxima, masses, logits, arrived
    penalties = state.counts, state.repetition, state.presence, state.frequency
    table = indices if counts is None else counts
    _filtered_tiles_kernel[(cdiv(rows, block_m), n_tiles)](
        *operands, tiles, settings_of(state), penalties, table, table.stride(0), rows, vocab, n_tiles,
        PENALISED=counts is not None, **constants, **options,
    )  # fmt: skip
    return Tiles(*tiles, block_n)
