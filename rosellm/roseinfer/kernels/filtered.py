"""Sampling with top-k, top-p and min-p without sorting the vocabulary: torch reference and kernel.

The head has stored the logits of filtered rows (``filtered_head.Tiles``). Rows with top-p only are handled by
``by_mass``. For any other row, one program works as follows:

1. With top-k, the tiles' maxima alone bound what can be kept: k tiles hold k logits at or above the k-th
   largest maximum. Only tiles that reach the bound are read; if they are few, their logits that reach it,
   the candidates, are copied to one place.
2. If both top-k and top-p apply, a search over the k-th largest logit's bits, 16 pivots at a time, finds the
   mass that top-p is a share of.
3. The candidate with the largest logit plus noise is drawn, and checked by what comes before it in order of
   probability: fewer than k candidates, with less than top-p's mass. If it is rejected, it bounds the next
   draw. A draw from all tokens is seldom rejected: if the kept tokens have mass p, about 1 + ln(1/p) draws
   are needed (rejection with a rising pivot, as in FlashInfer's sorting-free sampling, Ye et al. 2025; here
   the result is the one token that the noise selects among the kept ones, whatever was rejected before).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch

from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.kernels.by_mass import choose_by_mass, list_tiles
from rosellm.roseinfer.kernels.candidates import (
    before,
    copy_candidates,
    drawn_before,
    float_of,
    kth_largest,
    kth_largest_of_few,
    lower_bound,
    ordered_bits,
    scaled_logit,
)
from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.roseinfer.kernels.draw import draw
from rosellm.roseinfer.kernels.filtered_head import Tiles
from rosellm.roseinfer.kernels.head import MAX_TEMPERATURE
from rosellm.roseinfer.kernels.noise import log2, row_key
from rosellm.triton_or_none import tl, triton

ROLES = {"_choose_filtered_kernel": "sampling"}
BLOCK, FEWER, FEW = 4096, 1024, 256  # candidates at a time: per pass, per pivot search, all with all
PIVOTS, WARPS = 16, 8
COPIED = 4  # candidates are copied if at most one in COPIED tiles has any
CHUNK = 8192  # tokens per partial sum of mass, in rows with top-p only
DRAWS = 3  # likely draws before which a row's programs sum the mass together
PROGRAMS_PER_SM, MOST_SPLITS = 2, 16  # for all rows together; programs per row
REGISTERS = 128  # per thread, at most, so that two programs fit an SM
Splits = Callable[[int, int, torch.device], int]


def choose_filtered_ref(*, tiles: Tiles, state: DeviceState) -> None:
    """Reference: overwrite the values and indices of filtered rows with their one sampled token.

    Values become −inf, except the first, which is 0, or +inf in a row without probabilities; the first index
    is the token. Other rows are unchanged.
    """
    rows = state.filtered
    own = state.at(rows.nonzero()[:, 0])
    filters = own.temperatures, own.top_k, own.top_p, own.min_p
    tokens = draw(tiles.logits[rows], *filters, own.seeds, own.positions + 1)
    tiles.values[rows], tiles.indices[rows] = -math.inf, 0
    tiles.values[rows, 0] = torch.where(tokens >= 0, 0.0, math.inf)
    tiles.indices[rows, 0] = tokens


@triton.jit
def mass_left(
    values_ptr, tokens_ptr, n_copied, n, best, temperature, floor, low, k,
    BLOCK: tl.constexpr, FEWER: tl.constexpr, FEW: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """Return the mass that top-k and min-p leave; k candidates, if there are k, must reach ``low``."""
    least = ordered_bits(tl.full((), float("-inf"), tl.float32))
    cut = (k > 0) & (k < n)
    if cut:
        if (n_copied > 0) & (n <= FEW):
            least = kth_largest_of_few(values_ptr, n, k, FEW)
        else:
            least = kth_largest(
                values_ptr, tokens_ptr, n_copied, n, best, temperature, floor, low, k, FEWER, PIVOTS
            )
    edge = float_of(least)
    above, mass = before(values_ptr, tokens_ptr, n_copied, n, best, temperature, floor, edge, -1, BLOCK)
    equals = tl.where(cut, k - above, 0).to(tl.float32)
    return mass + equals * tl.exp(scaled_logit(edge, best, temperature))


@triton.jit
def drawn(
    values_ptr, tokens_ptr, n_copied, n, best, temperature, floor, k, most, key_first, key_second,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw until a token is among the first k (0: any), with less than the mass ``most`` before it."""
    pivot, token = tl.full((), float("-inf"), tl.float32), tl.full((), 2147483647, tl.int32)
    refused = tl.full((), 1, tl.int1)
    while refused:
        pivot, token = drawn_before(
            values_ptr, tokens_ptr, n_copied, n, best, temperature, floor, pivot, token,
            key_first, key_second, BLOCK,
        )  # fmt: skip
        number, mass = before(
            values_ptr, tokens_ptr, n_copied, n, best, temperature, floor, pivot, token, BLOCK
        )
        refused = (number > 0) & (((k > 0) & (number >= k)) | (mass >= most))
    return token


@triton.jit
def kept_draw(
    values_ptr, tokens_ptr, n_copied, n, best, temperature, floor, low, top_k, top_p, key_first, key_second,
    BLOCK: tl.constexpr, FEWER: tl.constexpr, FEW: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """Return a token drawn under top-k, top-p and min-p."""
    most = tl.full((), float("inf"), tl.float32)
    if top_p < 1:
        most = top_p * mass_left(
            values_ptr, tokens_ptr, n_copied, n, best, temperature, floor, low, top_k,
            BLOCK, FEWER, FEW, PIVOTS,
        )  # fmt: skip
    return drawn(
        values_ptr, tokens_ptr, n_copied, n, best, temperature, floor, top_k, most,
        key_first, key_second, BLOCK,
    )  # fmt: skip


@triton.jit
def choose_among_candidates(
    logits_ptr, maxima, listed_ptr, copies_ptr, copied_tokens_ptr, seed_ptr, position_ptr,
    temperature, top_k, top_p, min_p, best, tile, inside, TILES,
    TILE: tl.constexpr, BLOCK: tl.constexpr, FEWER: tl.constexpr, FEW: tl.constexpr, PIVOTS: tl.constexpr,
    COPIED: tl.constexpr,
):  # fmt: skip
    """Return the token of one row with top-k or min-p, to which all pointers refer.

    best: the row's largest logit, which must be finite.
    """
    # The tiles that may hold kept tokens.
    floor = tl.where(min_p > 0, log2(tl.maximum(min_p, 1e-37)) * 0.6931471805599453, float("-inf"))
    nothing = ordered_bits(tl.full((), float("-inf"), tl.float32))
    bound = nothing
    if (top_k > 0) & (top_k <= TILES):
        bound = lower_bound(maxima, inside, best, top_k, PIVOTS)
    scaled = scaled_logit(maxima, best, temperature)
    n_listed = list_tiles(listed_ptr, tile, inside & (ordered_bits(maxima) >= bound) & (scaled >= floor))

    # The candidates: copies if they are few, otherwise the whole row.
    source, n, n_copied = logits_ptr, TILES * TILE, tl.zeros((), tl.int32)
    if n_listed * COPIED <= TILES:
        n = copy_candidates(
            logits_ptr, listed_ptr, n_listed, copies_ptr, copied_tokens_ptr, bound, best, temperature, floor,
            TILE, BLOCK,
        )  # fmt: skip
        tl.debug_barrier()
        source, n_copied = copies_ptr, n

    key_first, key_second = row_key(tl.load(seed_ptr), tl.load(position_ptr) + 1)
    low = tl.where(min_p > 0, nothing, bound)
    token = tl.zeros((), tl.int32)
    if n <= FEWER:
        token = kept_draw(
            source, copied_tokens_ptr, n_copied, n, best, temperature, floor, low, top_k, top_p,
            key_first, key_second, FEWER, FEWER, FEW, PIVOTS,
        )  # fmt: skip
    else:
        token = kept_draw(
            source, copied_tokens_ptr, n_copied, n, best, temperature, floor, low, top_k, top_p,
            key_first, key_second, BLOCK, FEWER, FEW, PIVOTS,
        )  # fmt: skip
    return token


@triton.jit(do_not_specialize=["TILES"])
def _choose_filtered_kernel(
    logits_ptr, values_ptr, indices_ptr, maxima_ptr, masses_ptr, arrived_ptr,
    listed_ptr, sums_ptr, copies_ptr, copied_tokens_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr,
    state_stride, seed_stride, TILES,
    TILE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FEWER: tl.constexpr, FEW: tl.constexpr,
    PIVOTS: tl.constexpr, COPIED: tl.constexpr, CHUNK: tl.constexpr, DRAWS: tl.constexpr,
    MAX_TEMPERATURE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """All programs of a row with top-p only share it; any other row is handled by its first program."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row * state_stride)
    top_k = tl.load(top_k_ptr + row * state_stride)
    top_p = tl.load(top_p_ptr + row * state_stride)
    min_p = tl.load(min_p_ptr + row * state_stride)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    by_mass = (top_k == 0) & (min_p <= 0)
    if (temperature <= 0) | (by_mass & (top_p >= 1)) | ((by_mass == 0) & (tl.program_id(1) > 0)):
        return
    temperature = tl.maximum(temperature, 1.1754943508222875e-38)
    tile = tl.arange(0, WIDTH)
    inside = tile < TILES
    logits_ptr += row * TILES * TILE
    values_ptr += row * TILES
    indices_ptr += row * TILES
    maxima_ptr += row * TILES
    listed_ptr += row * TILES
    seed_ptr, position_ptr = seeds_ptr + row * seed_stride, positions_ptr + row * state_stride
    if by_mass:
        n_sums = tl.cdiv(TILES, CHUNK // TILE)
        choose_by_mass(
            logits_ptr, values_ptr, indices_ptr, maxima_ptr, masses_ptr + row * TILES, listed_ptr,
            sums_ptr + row * n_sums * DRAWS, n_sums, arrived_ptr + row, seed_ptr, position_ptr,
            temperature, top_p, tile, inside, TILE, CHUNK, DRAWS, MAX_TEMPERATURE,
        )  # fmt: skip
    else:
        maxima = tl.load(maxima_ptr + tile, mask=inside, other=float("-inf"))
        best = tl.max(maxima, axis=0)
        finite = (best < float("inf")) & (best > float("-inf"))
        token = tl.zeros((), tl.int32)
        if finite:
            room = row * (TILES // COPIED) * TILE
            token = choose_among_candidates(
                logits_ptr, maxima, listed_ptr, copies_ptr + room, copied_tokens_ptr + room,
                seed_ptr, position_ptr, temperature, top_k, top_p, min_p, best, tile, inside, TILES,
                TILE, BLOCK, FEWER, FEW, PIVOTS, COPIED,
            )  # fmt: skip
        told = tl.where(tile == 0, tl.where(finite, 0.0, float("inf")), float("-inf"))
        tl.store(values_ptr + tile, told, mask=inside)
        tl.store(indices_ptr + tile, token + tile * 0, mask=inside)


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of SMs of a GPU; 1 for a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def splits_for(rows: int, n_chunks: int, device: torch.device) -> int:
    """Return the number of programs per row with top-p only."""
    return max(1, min(PROGRAMS_PER_SM * multiprocessors(device) // rows, MOST_SPLITS, n_chunks))


def make_choose_filtered(dependent: int = False, splits: Splits = splits_for) -> Callable[..., None]:
    """Return the Triton version of :func:`choose_filtered_ref`; call it once per result of the head.

    A row with top-p only whose drawn token is accepted stays as it is; in other filtered rows all indices are
    overwritten. splits: (rows, chunks per row, device) → programs per row with top-p only.
    """
    launch = launch_options(dependent)

    def choose_filtered(*, tiles: Tiles, state: DeviceState) -> None:
        (rows, n_tiles), device = tiles.values.shape, tiles.values.device
        n_chunks = triton.cdiv(n_tiles, CHUNK // tiles.width)
        room = max(1, n_tiles // COPIED) * tiles.width
        sums, copies = (torch.empty(rows, n, device=device) for n in (DRAWS * n_chunks, room))
        listed, copied = (torch.empty(rows, n, device=device, dtype=torch.int32) for n in (n_tiles, room))
        settings = state.temperatures, state.top_k, state.top_p, state.min_p, state.seeds, state.positions
        strides = state.positions.stride(0), state.seeds.stride(0)
        widths = {"TILE": tiles.width, "WIDTH": triton.next_power_of_2(n_tiles), "BLOCK": BLOCK}
        constants = {**widths, "FEWER": FEWER, "FEW": FEW, "PIVOTS": PIVOTS, "COPIED": COPIED}
        constants |= {
            "CHUNK": CHUNK,
            "DRAWS": DRAWS,
            "MAX_TEMPERATURE": MAX_TEMPERATURE,
            "DEPENDENT": dependent,
        }
        _choose_filtered_kernel[(rows, splits(rows, n_chunks, device))](
            tiles.logits, tiles.values, tiles.indices, tiles.maxima, tiles.masses, tiles.arrived,
            listed, sums, copies, copied, *settings, *strides, n_tiles,
            **constants, num_warps=WARPS, maxnreg=REGISTERS, **launch,
        )  # fmt: skip

    return choose_filtered
