"""Draws under top-k, top-p and min-p without sorting the vocabulary: a torch spec and a kernel.

The head has left the logits of the rows that ask (``filtered_head.Tiles``). A program takes a row:

1. A bound below which nothing can be kept comes from the tiles' largest logits alone: k tiles hold k logits
   that are at least their k-th largest maximum, and tiles' maxima that make up the mass of top-p hold what
   top-p keeps. Only tiles that reach the bound are read; if they are few, their logits that reach it, the
   candidates, are copied together.
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

import torch

from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.roseinfer.kernels.draw import draw
from rosellm.roseinfer.kernels.filtered_head import Tiles
from rosellm.roseinfer.kernels.noise import gumbel, log2, row_key
from rosellm.triton_or_none import tl, triton

ROLES = {"_choose_filtered_kernel": "sampling"}
BLOCK, FEWER, FEW = 4096, 1024, 256  # candidates at a time: in a pass, by pivots, each with all
PIVOTS, WARPS = 16, 8
COPIED = 4  # candidates are copied if they are in at most one tile of so many


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
def ordered_bits(x):
    """int32 numbers in the order of the floats; -0.0 is made +0.0. Its own inverse on bits."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def float_of(ordered):
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def scaled_logit(x, best, temperature):
    return (x - best) / temperature


@triton.jit
def lower_bound(maxima, weights, best, goal, PIVOTS: tl.constexpr):
    """The highest ordered bits, nearly, for which the maxima that reach them weigh ``goal`` or more."""
    ordered = ordered_bits(maxima)
    low = ordered_bits(tl.full((), float("-inf"), tl.float32)).to(tl.int64)
    high = ordered_bits(best).to(tl.int64)
    for _ in range(5):
        step = (high - low + PIVOTS) // (PIVOTS + 1)
        pivots = (low + step * (1 + tl.arange(0, PIVOTS))).to(tl.int32)
        above = tl.where(ordered[None, :] >= pivots[:, None], weights[None, :], 0.0)
        low += step * tl.sum((tl.sum(above, axis=1) >= goal).to(tl.int64), axis=0)
        high = tl.minimum(high, low + step - 1)
    return low.to(tl.int32)


@triton.jit
def candidates(values_ptr, tokens_ptr, n_copied, first, n, best, temperature, floor, BLOCK: tl.constexpr):
    """Candidates from ``first`` on: logits, -inf past the end and below min-p's floor, scaled, and tokens.

    n_copied: n if they were copied with their tokens, 0 if they are the row itself.
    """
    at = first + tl.arange(0, BLOCK)
    x = tl.load(values_ptr + at, mask=at < n, other=float("-inf"))
    token = tl.load(tokens_ptr + at, mask=at < n_copied, other=0)
    token = tl.where(n_copied > 0, token, at)
    scaled = scaled_logit(x, best, temperature)
    x = tl.where(scaled >= floor, x, float("-inf"))
    return x, tl.where(scaled >= floor, scaled, float("-inf")), token


@triton.jit
def kth_largest(
    values_ptr, tokens_ptr, n_copied, n, best, temperature, floor, low, k,
    BLOCK: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """The ordered bits of the k-th largest candidate; ``low``: ordered bits that k candidates reach."""
    low, high = low.to(tl.int64), ordered_bits(best).to(tl.int64)
    while low < high:
        step = (high - low + PIVOTS) // (PIVOTS + 1)
        pivots = (low + step * (1 + tl.arange(0, PIVOTS))).to(tl.int32)
        numbers = tl.zeros((PIVOTS,), tl.int32)
        for first in range(0, n, BLOCK):
            x, _, _ = candidates(values_ptr, tokens_ptr, n_copied, first, n, best, temperature, floor, BLOCK)
            reached = ordered_bits(x)[None, :] >= pivots[:, None]
            numbers += tl.sum(reached.to(tl.int32), axis=1)
        low += step * tl.sum((numbers >= k).to(tl.int64), axis=0)
        high = tl.minimum(high, low + step - 1)
    return low.to(tl.int32)


@triton.jit
def kth_largest_of_few(values_ptr, n, k, FEW: tl.constexpr):
    """The same of at most FEW candidates, each compared with all: ``[FEW, FEW]``."""
    at = tl.arange(0, FEW)
    x = tl.load(values_ptr + at, mask=at < n, other=float("-inf"))
    numbers = tl.zeros((FEW,), tl.int32)
    for first in range(0, n, 32):
        others = first + tl.arange(0, 32)
        y = tl.load(values_ptr + others, mask=others < n, other=float("-inf"))
        numbers += tl.sum((y[None, :] > x[:, None]).to(tl.int32), axis=1)
    return ordered_bits(tl.min(tl.where(numbers < k, x, float("inf")), axis=0))


@triton.jit
def before(
    values_ptr, tokens_ptr, n_copied, n, best, temperature, floor, pivot, pivot_token, BLOCK: tl.constexpr
):
    """How many candidates come before the pivot in order of probability, and their mass."""
    number, mass = tl.zeros((), tl.int32), tl.zeros((), tl.float32)
    for first in range(0, n, BLOCK):
        x, scaled, token = candidates(
            values_ptr, tokens_ptr, n_copied, first, n, best, temperature, floor, BLOCK
        )
        ahead = (x > pivot) | ((x == pivot) & (token < pivot_token))
        number += tl.sum(ahead.to(tl.int32), axis=0)
        mass += tl.sum(tl.where(ahead, tl.exp(scaled), 0.0), axis=0)
    return number, mass


@triton.jit
def drawn_before(
    values_ptr, tokens_ptr, n_copied, n, best, temperature, floor, pivot, pivot_token, key_first, key_second,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The candidate before the pivot with the largest score: its logit and token."""
    top = tl.full((), float("-inf"), tl.float32)
    place = tl.zeros((), tl.int32)
    for first in range(0, n, BLOCK):
        x, scaled, token = candidates(
            values_ptr, tokens_ptr, n_copied, first, n, best, temperature, floor, BLOCK
        )
        ahead = (x > pivot) | ((x == pivot) & (token < pivot_token))
        scores = scaled + gumbel(key_first, key_second, token.to(tl.uint32))
        score, index = tl.max(tl.where(ahead, scores, float("-inf")), axis=0, return_indices=True)
        place = tl.where(score > top, first + index, place)
        top = tl.maximum(top, score)
    token = tl.where(n_copied > 0, tl.load(tokens_ptr + place, mask=place < n_copied, other=0), place)
    return tl.load(values_ptr + place), token


@triton.jit
def copy_candidates(
    logits_ptr, listed_ptr, n_listed, copies_ptr, tokens_ptr, bound, best, temperature, floor,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies the listed tiles' logits that reach bound and floor, with their tokens; returns their number."""
    n = tl.zeros((), tl.int32)
    for first in range(0, n_listed, BLOCK // TILE):
        which = first + tl.arange(0, BLOCK) // TILE
        inside = which < n_listed
        token = tl.load(listed_ptr + which, mask=inside, other=0) * TILE + tl.arange(0, BLOCK) % TILE
        x = tl.load(logits_ptr + token, mask=inside, other=float("-inf"))
        kept = inside & (ordered_bits(x) >= bound) & (scaled_logit(x, best, temperature) >= floor)
        place = n + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        tl.store(copies_ptr + place, x, mask=kept)
        tl.store(tokens_ptr + place, token, mask=kept)
        n += tl.sum(kept.to(tl.int32), axis=0)
    return n


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
    values_ptr, tokens_ptr, n_copied, n, best, temperature, floor, low, top_k, top_p, mass, is_left,
    key_first, key_second,
    BLOCK: tl.constexpr, FEWER: tl.constexpr, FEW: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """The token drawn; is_left: whether ``mass``, that of all tokens, is also what top-k and min-p leave."""
    if (top_p < 1) & (is_left == 0):
        mass = mass_left(
            values_ptr, tokens_ptr, n_copied, n, best, temperature, floor, low, top_k,
            BLOCK, FEWER, FEW, PIVOTS,
        )  # fmt: skip
    most = tl.where(top_p < 1, top_p * mass, float("inf"))
    return drawn(
        values_ptr, tokens_ptr, n_copied, n, best, temperature, floor, top_k, most,
        key_first, key_second, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["TILES"])
def _choose_filtered_kernel(
    logits_ptr, values_ptr, indices_ptr, masses_ptr, copies_ptr, copied_tokens_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr,
    state_stride, seed_stride, TILES,
    TILE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FEWER: tl.constexpr, FEW: tl.constexpr,
    PIVOTS: tl.constexpr, COPIED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One row per program."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row * state_stride)
    top_k = tl.load(top_k_ptr + row * state_stride)
    top_p = tl.load(top_p_ptr + row * state_stride)
    min_p = tl.load(min_p_ptr + row * state_stride)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    if (temperature <= 0) | ((top_k == 0) & (top_p >= 1) & (min_p <= 0)):
        return
    temperature = tl.maximum(temperature, 1.1754943508222875e-38)
    tile = tl.arange(0, WIDTH)
    inside = tile < TILES
    values_ptr += row * TILES
    indices_ptr += row * TILES
    maxima = tl.load(values_ptr + tile, mask=inside, other=float("-inf"))
    best = tl.max(maxima, axis=0)
    finite = (best < float("inf")) & (best > float("-inf"))
    token = tl.zeros((), tl.int32)
    if finite:
        # The tiles that can hold what is kept; their list takes the place of the row's indices.
        scaled = scaled_logit(maxima, best, temperature)
        masses = tl.load(masses_ptr + row * TILES + tile, mask=inside, other=0.0)
        mass = tl.sum(masses * tl.exp(scaled), axis=0)
        floor = tl.where(min_p > 0, log2(tl.maximum(min_p, 1e-37)) * 0.6931471805599453, float("-inf"))
        by_number = (top_k > 0) & (top_k <= TILES)
        by_mass = (top_k == 0) & (top_p < 1) & (min_p <= 0)
        nothing = ordered_bits(tl.full((), float("-inf"), tl.float32))
        bound = nothing
        if by_number | by_mass:
            weights = tl.where(by_number, 1.0, tl.exp(scaled))
            goal = tl.where(by_number, top_k.to(tl.float32), top_p * mass)
            bound = lower_bound(maxima, tl.where(inside, weights, 0.0), best, goal, PIVOTS)
        listed = inside & (ordered_bits(maxima) >= bound) & (scaled >= floor)
        n_listed = tl.sum(listed.to(tl.int32), axis=0)
        tl.store(indices_ptr + tl.cumsum(listed.to(tl.int32), axis=0) - 1, tile, mask=listed)
        tl.debug_barrier()

        # The candidates: copies of few, or else the whole row.
        source = logits_ptr + row * TILES * TILE
        tokens_ptr = copied_tokens_ptr + row * (TILES // COPIED) * TILE
        n, n_copied = TILES * TILE, tl.zeros((), tl.int32)
        if n_listed * COPIED <= TILES:
            copies = copies_ptr + row * (TILES // COPIED) * TILE
            n = copy_candidates(
                source,
                indices_ptr,
                n_listed,
                copies,
                tokens_ptr,
                bound,
                best,
                temperature,
                floor,
                TILE,
                BLOCK,
            )
            tl.debug_barrier()
            source, n_copied = copies, n

        seed, position = tl.load(seeds_ptr + row * seed_stride), tl.load(positions_ptr + row * state_stride)
        key_first, key_second = row_key(seed, position + 1)
        low = tl.where(min_p > 0, nothing, bound)
        if n <= FEWER:
            token = kept_draw(
                source, tokens_ptr, n_copied, n, best, temperature, floor, low, top_k, top_p, mass, by_mass,
                key_first, key_second, FEWER, FEWER, FEW, PIVOTS,
            )  # fmt: skip
        else:
            token = kept_draw(
                source, tokens_ptr, n_copied, n, best, temperature, floor, low, top_k, top_p, mass, by_mass,
                key_first, key_second, BLOCK, FEWER, FEW, PIVOTS,
            )  # fmt: skip
        tl.debug_barrier()
    told = tl.where(tile == 0, tl.where(finite, 0.0, float("inf")), float("-inf"))
    tl.store(values_ptr + tile, told, mask=inside)
    tl.store(indices_ptr + tile, token + tile * 0, mask=inside)


def make_choose_filtered(dependent: int = False) -> Callable[..., None]:
    """The Triton kernel, called like :func:`choose_filtered_ref`; no index of a filtered row is kept."""
    launch = launch_options(dependent)

    def choose_filtered(*, tiles: Tiles, state: DeviceState) -> None:
        rows, n_tiles = tiles.values.shape
        room = max(1, n_tiles // COPIED) * tiles.width
        copies = torch.empty(rows, room, device=tiles.values.device)
        copied_tokens = torch.empty(rows, room, device=tiles.values.device, dtype=torch.int32)
        settings = state.temperatures, state.top_k, state.top_p, state.min_p, state.seeds, state.positions
        strides = state.positions.stride(0), state.seeds.stride(0)
        widths = {"TILE": tiles.width, "WIDTH": triton.next_power_of_2(n_tiles), "BLOCK": BLOCK}
        constants = {**widths, "FEWER": FEWER, "FEW": FEW, "PIVOTS": PIVOTS, "COPIED": COPIED}
        _choose_filtered_kernel[(rows,)](
            tiles.logits, tiles.values, tiles.indices, tiles.masses, copies, copied_tokens,
            *settings, *strides, n_tiles, **constants, DEPENDENT=dependent, num_warps=WARPS, **launch,
        )  # fmt: skip

    return choose_filtered
