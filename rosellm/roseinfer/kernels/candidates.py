"""Device functions on the candidate tokens of a filtered row: rank, count, draw and copy them.

A pool of candidates is a tuple of seven:

values_ptr, tokens_ptr: pointers to the candidates' logits and tokens.
n_copied: number of copied candidates; 0 if the pool is the row of logits itself, and tokens_ptr is not read.
n: number of candidates.
best: the row's largest logit.
temperature: the row's temperature.
floor: the lowest scaled logit, ``(logit - best) / temperature``, that min-p keeps.

Searches for a logit run over ordered bits: integers that sort like the logits (:func:`ordered_bits`).
"""

from __future__ import annotations

from rosellm.roseinfer.kernels.noise import gumbel
from rosellm.triton_or_none import tl, triton


@triton.jit
def ordered_bits(x):
    """Map fp32 numbers to int32 in the same order (-0.0 equals +0.0); :func:`float_of` is the inverse."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def float_of(ordered):
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def scaled_logit(x, best, temperature):
    return (x - best) / temperature


@triton.jit
def comes_before(x, token, pivot, pivot_token):
    """Return whether a token is more probable than the pivot; of equal logits, lower tokens come first."""
    return (x > pivot) | ((x == pivot) & (token < pivot_token))


@triton.jit
def lower_bound(maxima, inside, best, k, PIVOTS: tl.constexpr):
    """Return a close lower bound on the k-th largest of ``maxima``, in ordered bits.

    maxima: ``[WIDTH]``, the largest logit of each tile; only those where ``inside`` count.
    best: the largest of them.
    PIVOTS: number of values that each pass of the search compares with all maxima.
    """
    ordered = ordered_bits(maxima)
    low = ordered_bits(tl.full((), float("-inf"), tl.float32)).to(tl.int64)
    high = ordered_bits(best).to(tl.int64)
    for _ in range(5):
        step = (high - low + PIVOTS) // (PIVOTS + 1)
        pivots = (low + step * (1 + tl.arange(0, PIVOTS))).to(tl.int32)
        reached = (ordered[None, :] >= pivots[:, None]) & inside[None, :]
        low += step * tl.sum((tl.sum(reached.to(tl.int32), axis=1) >= k).to(tl.int64), axis=0)
        high = tl.minimum(high, low + step - 1)
    return low.to(tl.int32)


@triton.jit
def candidates(pool, first, BLOCK: tl.constexpr):
    """Load BLOCK candidates, starting at index ``first``: their logits, scaled logits and tokens.

    Both kinds of logits are -inf past the last candidate and below min-p's floor.
    """
    values_ptr, tokens_ptr, n_copied, n, best, temperature, floor = pool
    at = first + tl.arange(0, BLOCK)
    x = tl.load(values_ptr + at, mask=at < n, other=float("-inf"))
    token = tl.load(tokens_ptr + at, mask=at < n_copied, other=0)
    token = tl.where(n_copied > 0, token, at)
    scaled = scaled_logit(x, best, temperature)
    x = tl.where(scaled >= floor, x, float("-inf"))
    return x, tl.where(scaled >= floor, scaled, float("-inf")), token


@triton.jit
def kth_largest(pool, low, k, BLOCK: tl.constexpr, PIVOTS: tl.constexpr):
    """Return the k-th largest logit of the pool, in ordered bits.

    low: a lower bound on it, also in ordered bits.
    BLOCK: candidates loaded at once.
    PIVOTS: number of values that each pass of the search compares with all candidates.
    """
    n, best = pool[3], pool[4]
    low, high = low.to(tl.int64), ordered_bits(best).to(tl.int64)
    while low < high:
        step = (high - low + PIVOTS) // (PIVOTS + 1)
        pivots = (low + step * (1 + tl.arange(0, PIVOTS))).to(tl.int32)
        numbers = tl.zeros((PIVOTS,), tl.int32)
        for first in range(0, n, BLOCK):
            x, _, _ = candidates(pool, first, BLOCK)
            reached = ordered_bits(x)[None, :] >= pivots[:, None]
            numbers += tl.sum(reached.to(tl.int32), axis=1)
        low += step * tl.sum((numbers >= k).to(tl.int64), axis=0)
        high = tl.minimum(high, low + step - 1)
    return low.to(tl.int32)


@triton.jit
def kth_largest_of_few(values_ptr, n, k, FEW: tl.constexpr):
    """Return the k-th largest of n logits (at most FEW), in ordered bits, comparing each with all others."""
    at = tl.arange(0, FEW)
    x = tl.load(values_ptr + at, mask=at < n, other=float("-inf"))
    numbers = tl.zeros((FEW,), tl.int32)
    for first in range(0, n, 32):
        others = first + tl.arange(0, 32)
        y = tl.load(values_ptr + others, mask=others < n, other=float("-inf"))
        numbers += tl.sum((y[None, :] > x[:, None]).to(tl.int32), axis=1)
    return ordered_bits(tl.min(tl.where(numbers < k, x, float("inf")), axis=0))


@triton.jit
def before(pool, pivot, pivot_token, BLOCK: tl.constexpr):
    """Return the number and the total mass of the candidates that are more probable than the pivot.

    A candidate's mass is the exponential of its scaled logit.
    """
    number, mass = tl.zeros((), tl.int32), tl.zeros((), tl.float32)
    for first in range(0, pool[3], BLOCK):
        x, scaled, token = candidates(pool, first, BLOCK)
        ahead = comes_before(x, token, pivot, pivot_token)
        number += tl.sum(ahead.to(tl.int32), axis=0)
        mass += tl.sum(tl.where(ahead, tl.exp(scaled), 0.0), axis=0)
    return number, mass


@triton.jit
def drawn_before(pool, pivot, pivot_token, key, BLOCK: tl.constexpr):
    """Draw one of the candidates that are more probable than the pivot; return its logit and token.

    key: the two key words of the row's noise.
    """
    values_ptr, tokens_ptr, n_copied, n = pool[0], pool[1], pool[2], pool[3]
    top = tl.full((), float("-inf"), tl.float32)
    place = tl.zeros((), tl.int32)
    for first in range(0, n, BLOCK):
        x, scaled, token = candidates(pool, first, BLOCK)
        ahead = comes_before(x, token, pivot, pivot_token)
        scores = scaled + gumbel(key[0], key[1], token.to(tl.uint32))
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
    """Copy the logits and tokens of listed tiles that reach ``bound`` and ``floor``; return their number.

    listed_ptr: indices of ``n_listed`` tiles.
    copies_ptr, tokens_ptr: receive the logits and tokens.
    bound: the lowest logit to copy, in ordered bits.
    floor: the lowest scaled logit to copy.
    """
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
