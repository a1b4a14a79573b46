"""Sampling for rows with top-p only, in a kernel: several programs per row, and only the head's noise.

The head has drawn one token from each vocabulary tile. The best of these tokens is the draw from the whole
row; it is accepted if the tokens before it in order of probability hold less than top-p of the mass. The
programs of a row sum that mass in chunks of the tiles that reach the token's logit; the last one to finish
adds up the chunks. Partial sums are per chunk, not per program, so the result does not depend on the number
of programs.

A rejected token bounds the next draw, which the last program makes alone. A tile's best score is an upper
bound for its tokens before the rejected one, so only tiles whose own token is not before it, and whose score
exceeds the best score of the tokens that are, are drawn from again. Where rejection is rare, such tiles are
few, and the next draw is likely to be the best of the tiles' tokens before the rejected one: the programs sum
the mass before the next two of these in advance.
"""

from __future__ import annotations

from rosellm.roseinfer.kernels.candidates import comes_before
from rosellm.roseinfer.kernels.noise import gumbel, row_key
from rosellm.triton_or_none import tl, triton


@triton.jit
def list_tiles(listed_ptr, tile, chosen):
    """Store the chosen tiles in order, overwriting any earlier list, and return their number."""
    tl.debug_barrier()
    tl.store(listed_ptr + tl.cumsum(chosen.to(tl.int32), axis=0) - 1, tile, mask=chosen)
    tl.debug_barrier()
    return tl.sum(chosen.to(tl.int32), axis=0)


@triton.jit
def listed_logits(logits_ptr, listed_ptr, n_listed, chunk, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """Load a chunk of the listed tiles ``[CHUNK // TILE, TILE]``: logits and tokens.

    Logits are -inf past the last listed tile.
    """
    place = chunk * (CHUNK // TILE) + tl.arange(0, CHUNK // TILE)
    inside = place < n_listed
    tiles = tl.load(listed_ptr + place, mask=inside, other=0)
    tokens = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    return tl.load(logits_ptr + tokens, mask=inside[:, None], other=float("-inf")), tokens


@triton.jit
def sum_before(
    row, sums_ptr, n_sums, best, temperature, pivots, pivot_tokens, first, step,
    sizes: tl.constexpr, DRAWS: tl.constexpr,
):  # fmt: skip
    """Store the mass before each pivot for every step-th chunk from ``first`` on; return the chunk count.

    row: as in :func:`choose_by_mass`. pivots and pivot_tokens: DRAWS of each, of which the first bounds the
    listed tiles; sums_ptr has n_sums entries per pivot. All programs of a row write the same list to the same
    place.
    """
    logits_ptr, listed_ptr, maxima, tile, inside = row
    TILE: tl.constexpr = sizes.TILE
    CHUNK: tl.constexpr = sizes.CHUNK
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
    """Return whether the mass before a token is ``most`` or more.

    The most probable token, with no mass before it, is never refused; before any other it is at least 1.
    """
    mass = tl.sum(tl.load(sums_ptr + tile, mask=tile < n_chunks, other=0.0), axis=0)
    return (mass > 0) & (mass >= most)


@triton.jit
def best_scored(scores, tokens):
    """Return the token with the highest score (the lowest token of a tie), and that score."""
    best = tl.max(scores, axis=0)
    return tl.min(tl.where(scores == best, tokens, 2147483647), axis=0), best


@triton.jit
def drawn_before_pivot(row, draws, pivot, pivot_token, amount, key, sizes: tl.constexpr):
    """Return the token with the highest score before the pivot.

    row and draws: as in :func:`choose_by_mass`.
    """
    logits_ptr, listed_ptr, maxima, tile, inside = row
    own, scores, tokens = draws
    TILE: tl.constexpr = sizes.TILE
    CHUNK: tl.constexpr = sizes.CHUNK
    ahead = comes_before(own, tokens, pivot, pivot_token)
    token, top = best_scored(tl.where(ahead, scores, float("-inf")), tokens)
    again = inside & (ahead == 0) & (scores > top) & (maxima >= pivot)
    n_listed = list_tiles(listed_ptr, tile, again)
    for chunk in range(0, tl.cdiv(n_listed, CHUNK // TILE)):
        x, columns = listed_logits(logits_ptr, listed_ptr, n_listed, chunk, TILE, CHUNK)
        noise = gumbel(key[0], key[1], columns.to(tl.uint32))
        fresh = tl.where(comes_before(x, columns, pivot, pivot_token), x + amount * noise, float("-inf"))
        score = tl.max(tl.max(fresh, axis=1), axis=0)
        place = tl.min(tl.min(tl.where(fresh == score, columns, 2147483647), axis=1), axis=0)
        token = tl.where(score > top, place, token)
        top = tl.maximum(top, score)
    return token


@triton.jit
def foreseen(logits_ptr, draws, DRAWS: tl.constexpr):
    """Return logits and tokens of the tiles' best draw, the best draw before it, and so on, DRAWS in all."""
    own, scores, tokens = draws
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
    sizes: tl.constexpr, MAX_TEMPERATURE: tl.constexpr,
):  # fmt: skip
    """Draw the token of one row, to which all pointers refer; values and indices stay if their best is kept.

    This includes rows without probabilities, where nothing comes before the first infinite logit. The tuple
    ``draws`` is the logit, score and token of each tile's draw.
    """
    DRAWS: tl.constexpr = sizes.DRAWS  # in a loop, Triton 3.6 does not take an attribute for a constant
    scores = tl.load(values_ptr + tile, mask=inside, other=float("-inf"))
    tokens = tl.load(indices_ptr + tile, mask=inside, other=2147483647)
    maxima = tl.load(maxima_ptr + tile, mask=inside, other=float("-inf"))
    masses = tl.load(masses_ptr + tile, mask=inside, other=0.0)
    own = tl.load(logits_ptr + tokens, mask=inside, other=float("-inf"))
    best = tl.max(maxima, axis=0)
    most = top_p * tl.sum(masses * tl.exp((maxima - best) / temperature), axis=0)
    row, draws = (logits_ptr, listed_ptr, maxima, tile, inside), (own, scores, tokens)
    pivots, pivot_tokens = foreseen(logits_ptr, draws, DRAWS)
    n_chunks = sum_before(
        row, sums_ptr, n_sums, best, temperature, pivots, pivot_tokens,
        tl.program_id(1), tl.num_programs(1), sizes, DRAWS,
    )  # fmt: skip
    tl.debug_barrier()
    arrived = tl.atomic_add(arrived_ptr, 1, sem="acq_rel")
    if arrived == tl.num_programs(1) - 1:
        refused = is_refused(sums_ptr, n_chunks, tile, most)
        if refused:
            key = row_key(tl.load(seed_ptr), tl.load(position_ptr) + 1)
            amount = tl.minimum(temperature, MAX_TEMPERATURE)
            pivot, token = pivots[0], pivot_tokens[0]
            while refused:
                token = drawn_before_pivot(row, draws, pivot, token, amount, key, sizes)
                pivot = tl.load(logits_ptr + token)
                known = tl.zeros((), tl.int32)
                for i in tl.static_range(1, DRAWS):
                    known = tl.where(token == pivot_tokens[i], i, known)
                n_summed = n_chunks
                if known == 0:
                    n_summed = sum_before(
                        row, sums_ptr, n_sums, best, temperature, (pivot,), (token,), 0, 1, sizes, 1
                    )
                    tl.debug_barrier()
                refused = is_refused(sums_ptr + known * n_sums, n_summed, tile, most)
            tl.store(values_ptr + tile, tl.where(tile == 0, 0.0, float("-inf")), mask=inside)
            tl.store(indices_ptr + tile, token + tile * 0, mask=inside)
