"""Sampling for rows with top-p only: several programs share a row and reuse the tokens the head has drawn.

The head has drawn one token from each vocabulary tile. The token with the best score (logit plus noise) is
the draw from the whole row. It is accepted if the tokens that are more probable hold less than top-p of the
mass. The programs of a row sum that mass over chunks of the tiles whose largest logit reaches the drawn
token's; the last program to finish adds up the chunks. Partial sums are per chunk, so the number of programs
does not affect the result.

After a rejection, the last program alone draws again, from the tokens that are more probable than the
rejected one. A tile whose drawn token is among them keeps that token. Any other tile is drawn from again, but
only if its best score, an upper bound for its remaining tokens, exceeds the best score of the kept tokens.
Where rejection is rare, few tiles are drawn from again, and the next draw is likely to be a kept token: the
programs sum the mass before the two likeliest next draws in advance.
"""

from __future__ import annotations

from rosellm.roseinfer.kernels.candidates import comes_before
from rosellm.roseinfer.kernels.noise import gumbel, row_key
from rosellm.triton_or_none import tl, triton


@triton.jit
def list_tiles(listed_ptr, tile, chosen):
    """Write the indices of the chosen tiles to ``listed_ptr``, in order, and return their number.

    tile and chosen: ``[WIDTH]``, all tile indices, and whether each is chosen. An earlier list is
    overwritten.
    """
    tl.debug_barrier()
    tl.store(listed_ptr + tl.cumsum(chosen.to(tl.int32), axis=0) - 1, tile, mask=chosen)
    tl.debug_barrier()
    return tl.sum(chosen.to(tl.int32), axis=0)


@triton.jit
def listed_logits(logits_ptr, listed_ptr, n_listed, chunk, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """Load one chunk of the listed tiles: logits and tokens, ``[CHUNK // TILE, TILE]`` each.

    Logits are -inf after the last listed tile.
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
    """Sum the mass of the tokens before each pivot in every ``step``-th chunk; return the number of chunks.

    A token's mass is ``exp((logit - best) / temperature)``; it comes before a pivot if it is more probable.

    row: the tuple of that name in :func:`choose_by_mass`.
    sums_ptr: receives the sums, ``[DRAWS, n_sums]``, one per pivot and chunk.
    best: the row's largest logit.
    pivots, pivot_tokens: DRAWS logits and tokens, the lowest logit first. Only tiles that reach it are read.
    first: index of the first chunk to sum.

    All programs of a row write the same list of tiles to the same memory.
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
    """Return whether a drawn token is rejected, because the mass before it is at least ``most``.

    The most probable token has mass 1, with 0 before it, and is never rejected; any other token has at least
    1 before it.

    sums_ptr: the ``n_chunks`` partial sums of the mass before the drawn token.
    tile: ``[WIDTH]``, 0, 1, 2 …, of which the first ``n_chunks`` index the sums.
    """
    mass = tl.sum(tl.load(sums_ptr + tile, mask=tile < n_chunks, other=0.0), axis=0)
    return (mass > 0) & (mass >= most)


@triton.jit
def best_scored(scores, tokens):
    """Return the token with the highest score, and that score; ties go to the lowest token."""
    best = tl.max(scores, axis=0)
    return tl.min(tl.where(scores == best, tokens, 2147483647), axis=0), best


@triton.jit
def drawn_before_pivot(row, draws, pivot, pivot_token, amount, key, sizes: tl.constexpr):
    """Return the token with the highest score among those more probable than the pivot.

    row, draws: the tuples of these names in :func:`choose_by_mass`.
    amount: factor on the noise.
    key: the two key words of the row's noise.
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
    """Return the logits and the tokens of DRAWS likely draws, as two tuples.

    The first is the best-scored of the tiles' drawn tokens; each next one is the best-scored of those that
    are more probable than the draw before.
    """
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
    """Draw one row's token with top-p, starting from the token that the head drew.

    If that token is accepted, values and indices already encode it and are left unchanged. If it is rejected,
    every index is set to the new token, and the values to 0 for tile 0 and -inf elsewhere. All pointers are
    to this row. A row with a NaN or infinite best logit has no token before its best, so the head's draw
    stands.
    """
    DRAWS: tl.constexpr = sizes.DRAWS  # in a loop, Triton 3.6 rejects an attribute as a constant
    scores = tl.load(values_ptr + tile, mask=inside, other=float("-inf"))
    tokens = tl.load(indices_ptr + tile, mask=inside, other=2147483647)
    maxima = tl.load(maxima_ptr + tile, mask=inside, other=float("-inf"))
    masses = tl.load(masses_ptr + tile, mask=inside, other=0.0)
    own = tl.load(logits_ptr + tokens, mask=inside, other=float("-inf"))
    best = tl.max(maxima, axis=0)
    most = top_p * tl.sum(masses * tl.exp((maxima - best) / temperature), axis=0)
    # draws: the logit, score and token of each tile's draw
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
