"""Draws under top-p alone, in a kernel: several programs a row, and no noise but the head's.

The head has drawn from each tile. The best of these tokens is the draw from the whole row; it is kept if what
comes before it in order of probability has less than top-p's share of the mass. Each program of a row sums
that mass in some chunks of the tiles that reach the token's logit; who arrives last adds up the chunks. A sum
is of a chunk, never of a program's share: it doesn't depend on the number of programs.

A refused token bounds the next draw, which the last program makes alone. The tiles' best scores are bounds of
what they hold before that token: only tiles whose own token is not before it, and whose score is above that
of all that are, are drawn from again. They are few where a token is refused seldom, and the next draw then is
likely the best of the tiles' tokens before it: the programs sum up the mass before two of these, too.
"""

from __future__ import annotations

from rosellm.roseinfer.kernels.candidates import comes_before
from rosellm.roseinfer.kernels.noise import gumbel, row_key
from rosellm.triton_or_none import tl, triton


@triton.jit
def list_tiles(listed_ptr, tile, chosen):
    """Lists the chosen tiles, in order, where an earlier list may be; returns their number."""
    tl.debug_barrier()
    tl.store(listed_ptr + tl.cumsum(chosen.to(tl.int32), axis=0) - 1, tile, mask=chosen)
    tl.debug_barrier()
    return tl.sum(chosen.to(tl.int32), axis=0)


@triton.jit
def listed_logits(logits_ptr, listed_ptr, n_listed, chunk, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """A chunk of the listed tiles ``[CHUNK // TILE, TILE]``: logits, -inf past the last tile, and tokens."""
    place = chunk * (CHUNK // TILE) + tl.arange(0, CHUNK // TILE)
    inside = place < n_listed
    tiles = tl.load(listed_ptr + place, mask=inside, other=0)
    tokens = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    return tl.load(logits_ptr + tokens, mask=inside[:, None], other=float("-inf")), tokens


@triton.jit
def sum_before(
    logits_ptr, listed_ptr, sums_ptr, n_sums, maxima, tile, inside, best, temperature, pivots, pivot_tokens,
    first, step, TILE: tl.constexpr, CHUNK: tl.constexpr, DRAWS: tl.constexpr,
):  # fmt: skip
    """Stores the mass before each pivot in every step-th chunk from ``first`` on; returns the chunks' number.

    pivots, and their tokens: DRAWS of them, of which the first bounds what is listed; each has room for
    n_sums. All programs of a row list the same tiles in the same place.
    """
    n_listed = list_tiles(listed_ptr, tile, inside & (maxima >= pivots[0]))
    n_chunks = tl.cdiv(n_listed, CHUNK // TILE)
    inverse = 1 / temperature
    for chunk in range(first, n_chunks, step):
        x, tokens = listed_logits(logits_ptr, listed_ptr, n_listed, chunk, TILE, CHUNK)
        shares = tl.exp((x - best) * inverse)
        for i in tl.static_range(DRAWS):
            ahead = comes_before(x, tokens, pivots[i], pivot_tokens[i])
            tl.store(sums_ptr + i * n_sums + chunk, tl.sum(tl.where(ahead, shares, 0.0)))
    return n_chunks


@triton.jit
def is_refused(sums_ptr, n_chunks, tile, most):
    """Whether the mass before a token is ``most`` or more. Before all but the first it is at least 1."""
    mass = tl.sum(tl.load(sums_ptr + tile, mask=tile < n_chunks, other=0.0), axis=0)
    return (mass > 0) & (mass >= most)


@triton.jit
def best_scored(scores, tokens):
    """The token of the highest score, the first of equals, and its score."""
    best = tl.max(scores, axis=0)
    return tl.min(tl.where(scores == best, tokens, 2147483647), axis=0), best


@triton.jit
def drawn_before_pivot(
    logits_ptr, listed_ptr, own, scores, tokens, maxima, tile, inside, pivot, pivot_token, amount,
    key_first, key_second, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The token of the highest score before the pivot; own, scores and tokens: of each tile's draw."""
    ahead = comes_before(own, tokens, pivot, pivot_token)
    token, top = best_scored(tl.where(ahead, scores, float("-inf")), tokens)
    again = inside & (ahead == 0) & (scores > top) & (maxima >= pivot)
    n_listed = list_tiles(listed_ptr, tile, again)
    for chunk in range(0, tl.cdiv(n_listed, CHUNK // TILE)):
        x, columns = listed_logits(logits_ptr, listed_ptr, n_listed, chunk, TILE, CHUNK)
        noise = gumbel(key_first, key_second, columns.to(tl.uint32))
        fresh = tl.where(comes_before(x, columns, pivot, pivot_token), x + amount * noise, float("-inf"))
        score = tl.max(tl.max(fresh, axis=1), axis=0)
        place = tl.min(tl.min(tl.where(fresh == score, columns, 2147483647), axis=1), axis=0)
        token = tl.where(score > top, place, token)
        top = tl.maximum(top, score)
    return token


@triton.jit
def foreseen(logits_ptr, own, scores, tokens, DRAWS: tl.constexpr):
    """The best of the tiles' draws, the best of those before it, and so on: their logits and tokens."""
    token, _ = best_scored(scores, tokens)
    pivot = tl.load(logits_ptr + token)
    pivots, pivot_tokens = (pivot,), (token,)  # type: tuple, tuple
    for _ in tl.static_range(1, DRAWS):
        ahead = comes_before(own, tokens, pivot, token)
        token, _ = best_scored(tl.where(ahead, scores, float("-inf")), tokens)
        pivot = tl.load(logits_ptr + token)
        pivots, pivot_tokens = pivots + (pivot,), pivot_tokens + (token,)
    return pivots, pivot_tokens


@triton.jit
def choose_by_mass(
    logits_ptr, values_ptr, indices_ptr, maxima_ptr, masses_ptr, listed_ptr, sums_ptr, n_sums, arrived_ptr,
    seed_ptr, position_ptr, temperature, top_p, tile, inside,
    TILE: tl.constexpr, CHUNK: tl.constexpr, DRAWS: tl.constexpr, MAX_TEMPERATURE: tl.constexpr,
):  # fmt: skip
    """Of a row, whose pointers these are. Leaves the head's values and indices if their best token is kept.

    In a row without probabilities it is: nothing comes before the first infinite logit.
    """
    scores = tl.load(values_ptr + tile, mask=inside, other=float("-inf"))
    tokens = tl.load(indices_ptr + tile, mask=inside, other=2147483647)
    maxima = tl.load(maxima_ptr + tile, mask=inside, other=float("-inf"))
    masses = tl.load(masses_ptr + tile, mask=inside, other=0.0)
    own = tl.load(logits_ptr + tokens, mask=inside, other=float("-inf"))
    best = tl.max(maxima, axis=0)
    most = top_p * tl.sum(masses * tl.exp((maxima - best) / temperature), axis=0)
    pivots, pivot_tokens = foreseen(logits_ptr, own, scores, tokens, DRAWS)
    n_chunks = sum_before(
        logits_ptr, listed_ptr, sums_ptr, n_sums, maxima, tile, inside, best, temperature,
        pivots, pivot_tokens, tl.program_id(1), tl.num_programs(1), TILE, CHUNK, DRAWS,
    )  # fmt: skip
    tl.debug_barrier()
    arrived = tl.atomic_add(arrived_ptr, 1, sem="acq_rel")
    if arrived == tl.num_programs(1) - 1:
        refused = is_refused(sums_ptr, n_chunks, tile, most)
        if refused:
            key_first, key_second = row_key(tl.load(seed_ptr), tl.load(position_ptr) + 1)
            amount = tl.minimum(temperature, MAX_TEMPERATURE)
            pivot, token = pivots[0], pivot_tokens[0]
            while refused:
                token = drawn_before_pivot(
                    logits_ptr, listed_ptr, own, scores, tokens, maxima, tile, inside, pivot, token, amount,
                    key_first, key_second, TILE, CHUNK,
                )  # fmt: skip
                pivot = tl.load(logits_ptr + token)
                known = tl.zeros((), tl.int32)
                for i in tl.static_range(1, DRAWS):
                    known = tl.where(token == pivot_tokens[i], i, known)
                n_summed = n_chunks
                if known == 0:
                    n_summed = sum_before(
                        logits_ptr, listed_ptr, sums_ptr, n_sums, maxima, tile, inside, best, temperature,
                        (pivot,), (token,), 0, 1, TILE, CHUNK, 1,
                    )  # fmt: skip
                    tl.debug_barrier()
                refused = is_refused(sums_ptr + known * n_sums, n_summed, tile, most)
            tl.store(values_ptr + tile, tl.where(tile == 0, 0.0, float("-inf")), mask=inside)
            tl.store(indices_ptr + tile, token + tile * 0, mask=inside)
