"""Sampling with top-k, top-p and min-p without sorting the vocabulary: torch reference and kernel.

The head has stored the logits of filtered rows (``filtered_head.Tiles``). Rows with top-p only are handled by
``by_mass``. For any other row, one program works as follows:

1. With top-k, the tiles' maxima alone bound what can be kept: k tiles hold k logits at or above the k-th
   largest maximum. Only tiles that reach the bound are read. If they are few, the logits in them that reach
   the bound, the candidates, are copied to one buffer.
2. If both top-k and top-p apply, top-p is a share of the mass of the k largest logits. A search over the bits
   of the k-th largest logit, 16 pivots at a time, finds that mass.
3. The candidate with the largest logit plus noise is drawn. It is accepted if fewer than k candidates, with
   less than top-p of the mass, are more probable. If it is rejected, the next draw is from the candidates
   that are more probable. A draw from all tokens is seldom rejected: if the kept tokens have mass p, about 1
   + ln(1/p) draws are needed (rejection with a rising pivot, as in FlashInfer's sorting-free sampling, Xing
   et al. 2025; here the result is the one token that the noise selects among the kept ones, whatever was
   rejected before).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

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
from rosellm.roseinfer.kernels.filtered_head import Tiles, settings_of
from rosellm.roseinfer.kernels.head import MAX_TEMPERATURE
from rosellm.roseinfer.kernels.noise import log2, row_key
from rosellm.triton_or_none import cdiv, next_power_of_2, tl, triton

ROLES = {"_choose_filtered_kernel": "sampling"}
WARPS = 8
PROGRAMS_PER_SM, MOST_SPLITS = 2, 16  # programs of all rows; maximum number of programs per row
REGISTERS = 128  # maximum number of registers per thread, so that two programs fit on an SM
Splits = Callable[[int, int, torch.device], int]


class Sizes(NamedTuple):
    """Compile-time constants of the kernel.

    TILE: tokens per tile.
    WIDTH: number of tiles, rounded up to a power of two.
    BLOCK: candidates loaded at once.
    FEWER: candidates loaded at once in pivot searches, and for pools of at most that size.
    FEW: maximum number of candidates that are ranked by comparing each with all others.
    PIVOTS: pivots per pass of a search.
    COPIED: candidates are copied if at most one tile in COPIED has any.
    CHUNK: for rows with top-p only, tokens per partial sum of mass.
    DRAWS: for rows with top-p only, number of likely draws for which a row's programs together sum the mass
        before the drawn token.
    """

    TILE: int
    WIDTH: int
    BLOCK: int = 4096
    FEWER: int = 1024
    FEW: int = 256
    PIVOTS: int = 16
    COPIED: int = 4
    CHUNK: int = 8192
    DRAWS: int = 3


def choose_filtered_ref(*, tiles: Tiles, state: DeviceState) -> None:
    """Overwrite values and indices of filtered rows, to encode their sampled tokens (torch reference).

    The token becomes the row's first index. The row's first value becomes 0, or +inf in a row without
    probabilities (with NaN, with +inf, or all −inf); other values become −inf. Other rows are unchanged.
    """
    rows = state.filtered
    own = state.at(rows.nonzero()[:, 0])
    filters = own.temperatures, own.top_k, own.top_p, own.min_p
    tokens = draw(tiles.logits[rows], *filters, own.seeds, own.positions + 1)
    tiles.values[rows], tiles.indices[rows] = -math.inf, 0
    tiles.values[rows, 0] = torch.where(tokens >= 0, 0.0, math.inf).float()
    tiles.indices[rows, 0] = tokens


@triton.jit
def mass_left(pool, low, k, BLOCK: tl.constexpr, sizes: tl.constexpr):
    """Return the total mass of the candidates that top-k and min-p keep.

    low: a lower bound on the k-th largest logit, in ordered bits.
    k: top-k; 0 if it is off.
    BLOCK: candidates loaded at once.
    """
    values_ptr, _, n_copied, n, best, temperature, _ = pool
    least = ordered_bits(tl.full((), float("-inf"), tl.float32))
    cut = (k > 0) & (k < n)
    if cut:
        if (n_copied > 0) & (n <= sizes.FEW):
            least = kth_largest_of_few(values_ptr, n, k, sizes.FEW)
        else:
            least = kth_largest(pool, low, k, sizes.FEWER, sizes.PIVOTS)
    edge = float_of(least)
    above, mass = before(pool, edge, -1, BLOCK)
    equals = tl.where(cut, k - above, 0).to(tl.float32)
    return mass + equals * tl.exp(scaled_logit(edge, best, temperature))


@triton.jit
def drawn(pool, k, most, key, BLOCK: tl.constexpr):
    """Draw from the pool until a token is accepted, and return it.

    A token is accepted if the candidates that are more probable are fewer than k (any number if k is 0) and
    have less mass than ``most`` together.
    """
    pivot, token = tl.full((), float("-inf"), tl.float32), tl.full((), 2147483647, tl.int32)
    refused = tl.full((), 1, tl.int1)
    while refused:
        pivot, token = drawn_before(pool, pivot, token, key, BLOCK)
        number, mass = before(pool, pivot, token, BLOCK)
        refused = (number > 0) & (((k > 0) & (number >= k)) | (mass >= most))
    return token


@triton.jit
def kept_draw(pool, low, top_k, top_p, key, BLOCK: tl.constexpr, sizes: tl.constexpr):
    """Return a token drawn under top-k, top-p and min-p.

    low: a lower bound on the top_k-th largest logit, in ordered bits.
    """
    most = tl.full((), float("inf"), tl.float32)
    if top_p < 1:
        most = top_p * mass_left(pool, low, top_k, BLOCK, sizes)
    return drawn(pool, top_k, most, key, BLOCK)


@triton.jit
def choose_among_candidates(
    logits_ptr, maxima, scratch, seed_ptr, position_ptr, temperature, top_k, top_p, min_p, best, tile, inside,
    TILES, sizes: tl.constexpr,
):  # fmt: skip
    """Return the sampled token of one row with top-k or min-p; all pointers are to this row.

    maxima: ``[WIDTH]``, the largest logit of each tile.
    scratch: pointers to buffers for the indices of listed tiles, copied logits, and copied tokens.
    best: the row's largest logit, which is finite.
    tile, inside: ``[WIDTH]``, all tile indices, and whether each is below TILES.
    """
    listed_ptr, copies_ptr, copied_tokens_ptr = scratch
    # List the tiles that may hold kept tokens.
    floor = tl.where(min_p > 0, log2(tl.maximum(min_p, 1e-37)) * 0.6931471805599453, float("-inf"))
    nothing = ordered_bits(tl.full((), float("-inf"), tl.float32))
    bound = nothing
    if (top_k > 0) & (top_k <= TILES):
        bound = lower_bound(maxima, inside, best, top_k, sizes.PIVOTS)
    scaled = scaled_logit(maxima, best, temperature)
    n_listed = list_tiles(listed_ptr, tile, inside & (ordered_bits(maxima) >= bound) & (scaled >= floor))

    # Copy the candidates if they are few; otherwise they are the whole row.
    source, n, n_copied = logits_ptr, TILES * sizes.TILE, tl.zeros((), tl.int32)
    if n_listed * sizes.COPIED <= TILES:
        n = copy_candidates(
            logits_ptr, listed_ptr, n_listed, copies_ptr, copied_tokens_ptr, bound, best, temperature, floor,
            sizes.TILE, sizes.BLOCK,
        )  # fmt: skip
        tl.debug_barrier()
        source, n_copied = copies_ptr, n
    pool = (source, copied_tokens_ptr, n_copied, n, best, temperature, floor)

    key = row_key(tl.load(seed_ptr), tl.load(position_ptr) + 1)
    low = tl.where(min_p > 0, nothing, bound)
    token = tl.zeros((), tl.int32)
    if n <= sizes.FEWER:
        token = kept_draw(pool, low, top_k, top_p, key, sizes.FEWER, sizes)
    else:
        token = kept_draw(pool, low, top_k, top_p, key, sizes.BLOCK, sizes)
    return token


@triton.jit(do_not_specialize=["TILES"])
def _choose_filtered_kernel(
    tiles, listed_ptr, sums_ptr, copies_ptr, copied_tokens_ptr, settings, TILES,
    sizes: tl.constexpr, MAX_TEMPERATURE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Sample one row: by all of its programs together if it has top-p only, otherwise by its first program.

    tiles: pointers to the tensors of :class:`filtered_head.Tiles`. The other pointers are to scratch memory.
    """
    values_ptr, indices_ptr, maxima_ptr, masses_ptr, logits_ptr, arrived_ptr = tiles
    row = tl.program_id(0).to(tl.int64)
    at = row * settings.stride
    temperature, top_k = tl.load(settings.temperature + at), tl.load(settings.top_k + at)
    top_p, min_p = tl.load(settings.top_p + at), tl.load(settings.min_p + at)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    by_mass = (top_k == 0) & (min_p <= 0)
    if (temperature <= 0) | (by_mass & (top_p >= 1)) | ((by_mass == 0) & (tl.program_id(1) > 0)):
        return
    temperature = tl.maximum(temperature, 1.1754943508222875e-38)
    tile = tl.arange(0, sizes.WIDTH)
    inside = tile < TILES
    first = row * TILES
    logits_ptr, listed_ptr = logits_ptr + first * sizes.TILE, listed_ptr + first
    values_ptr, indices_ptr, maxima_ptr = values_ptr + first, indices_ptr + first, maxima_ptr + first
    seed_ptr, position_ptr = settings.seeds + row * settings.seed_stride, settings.positions + at
    if by_mass:
        n_sums = tl.cdiv(TILES, sizes.CHUNK // sizes.TILE)
        choose_by_mass(
            logits_ptr, values_ptr, indices_ptr, maxima_ptr, masses_ptr + first, listed_ptr,
            sums_ptr + row * n_sums * sizes.DRAWS, n_sums, arrived_ptr + row, seed_ptr, position_ptr,
            temperature, top_p, tile, inside, sizes, MAX_TEMPERATURE,
        )  # fmt: skip
    else:
        maxima = tl.load(maxima_ptr + tile, mask=inside, other=float("-inf"))
        best = tl.max(maxima, axis=0)
        finite = (best < float("inf")) & (best > float("-inf"))
        token = tl.zeros((), tl.int32)
        if finite:
            room = row * (TILES // sizes.COPIED) * sizes.TILE
            scratch = (listed_ptr, copies_ptr + room, copied_tokens_ptr + room)
            token = choose_among_candidates(
                logits_ptr, maxima, scratch, seed_ptr, position_ptr, temperature, top_k, top_p, min_p, best,
                tile, inside, TILES, sizes,
            )  # fmt: skip
        value = tl.where(tile == 0, tl.where(finite, 0.0, float("inf")), float("-inf"))
        tl.store(values_ptr + tile, value, mask=inside)
        tl.store(indices_ptr + tile, token + tile * 0, mask=inside)


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of SMs of a GPU; 1 for a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def splits_for(rows: int, n_chunks: int, device: torch.device) -> int:
    """Return the number of programs that share a row with top-p only.

    rows: rows of the batch. n_chunks: partial sums of mass per row.
    """
    return max(1, min(PROGRAMS_PER_SM * multiprocessors(device) // rows, MOST_SPLITS, n_chunks))


def choose_filtered(
    *, tiles: Tiles, state: DeviceState, dependent: int = False, splits: Splits = splits_for
) -> None:
    """Sample a token for each filtered row as :func:`choose_filtered_ref` does, in Triton.

    Call it only once per result of ``filtered_tiles``, because it increments the counters ``arrived``. A row
    with top-p only whose drawn token is accepted stays as it is; in other filtered rows all indices are
    overwritten.

    dependent: the launch mode, as in ``launch_options``.
    splits: maps (rows, chunks per row, device) to the number of programs per row with top-p only.
    """
    (rows, n_tiles), device = tiles.values.shape, tiles.values.device
    sizes = Sizes(tiles.width, next_power_of_2(n_tiles))
    n_chunks = cdiv(n_tiles, sizes.CHUNK // tiles.width)
    room = max(1, n_tiles // sizes.COPIED) * tiles.width
    sums, copies = (
        torch.empty(rows, n, device=device, dtype=torch.float32) for n in (sizes.DRAWS * n_chunks, room)
    )
    listed, copied = (torch.empty(rows, n, device=device, dtype=torch.int32) for n in (n_tiles, room))
    _choose_filtered_kernel[(rows, splits(rows, n_chunks, device))](
        tiles[:6], listed, sums, copies, copied, settings_of(state), n_tiles, sizes,
        MAX_TEMPERATURE, num_warps=WARPS, maxnreg=REGISTERS, **launch_options(dependent),
    )  # fmt: skip
