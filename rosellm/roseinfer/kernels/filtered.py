"""Draws under top-k, top-p and min-p without sorting the vocabulary: a torch spec and a kernel.

The head has left the logits of the rows that ask (``filtered_head.Tiles``). Rows with top-p alone are
``by_mass``'s. A program takes another row:

1. With top-k, a bound below which nothing can be kept comes from the tiles' largest logits alone: k tiles
   hold k logits that are at least their k-th largest maximum. Only tiles that reach the bound are read; if
   they are few, their logits that reach it, the candidates, are copied together.
2. If both top-k and top-p apply, the k-th largest logit is searched for (by its bits, 16 pivots at a time),
   for the mass that top-p is a share of.
3. The candidate of the largest logit plus noise is drawn, and verified by what comes before it in order of
   probability: its number must be below k, its mass below top-p's. If it is not, it bounds the next draw. A
   draw of all tokens is seldom refused: about 1 + ln(1/p) draws find a token of mass p (rejection with a
   rising pivot, as sampling without sorting does in FlashInfer, Ye et al. 2025; here the result is the one
   token that noise gives the kept ones, whatever was refused before).
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
BLOCK, FEWER, FEW = 4096, 1024, 256  # candidates at a time: in a pass, by pivots, each with all
PIVOTS, WARPS = 16, 8
COPIED = 4  # candidates are copied if they are in at most one tile of so many
CHUNK = 8192  # tokens whose mass is summed at a time for rows by mass
DRAWS = 3  # a row's programs sum up the mass before so many together
PROGRAMS_PER_SM, MOST_SPLITS = 2, 16  # programs of all rows, and of one
REGISTERS = 128  # a thread, at most: two programs fit an SM
Splits = Callable[[int, int, torch.device], int]


def choose_filtered_ref(*, tiles: Tiles, state: DeviceState) -> None:
    """The specification: overwrites the values and indices of filtered rows with their one token.

    Their values become −inf, but for the first, which is 0 beside the token's index; +inf in a row without
    probabilities. Other rows stay as they are.
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
    """The mass of what top-k and min-p leave; ``low``: ordered bits that k candidates reach, if so many."""
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
    """Draws until a token is among the first k (0: any), with less than the mass ``most`` before it."""
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
    """The token drawn."""
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
    """The token of a row, whose pointers these are, with top-k or min-p; best: its largest logit, finite."""
    # The tiles that can hold what is kept.
    floor = tl.where(min_p > 0, log2(tl.maximum(min_p, 1e-37)) * 0.6931471805599453, float("-inf"))
    nothing = ordered_bits(tl.full((), float("-inf"), tl.float32))
    bound = nothing
    if (top_k > 0) & (top_k <= TILES):
        bound = lower_bound(maxima, inside, best, top_k, PIVOTS)
    scaled = scaled_logit(maxima, best, temperature)
    n_listed = list_tiles(listed_ptr, tile, inside & (ordered_bits(maxima) >= bound) & (scaled >= floor))

    # The candidates: copies of few, or else the whole row.
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
    """All programs of a row by mass share it; another row is the first one's."""
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
    """Of a GPU; a CPU counts as one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def splits_for(rows: int, n_chunks: int, device: torch.device) -> int:
    """Programs a row by mass."""
    return max(1, min(PROGRAMS_PER_SM * multiprocessors(device) // rows, MOST_SPLITS, n_chunks))


def make_choose_filtered(dependent: int = False, splits: Splits = splits_for) -> Callable[..., None]:
    """The Triton kernel, called like :func:`choose_filtered_ref`; once for each result of the head.

    A row by mass whose drawn token is kept stays as it is. No index of another filtered row is kept.
    splits: rows, chunks of a row and device → programs a row by mass.
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
