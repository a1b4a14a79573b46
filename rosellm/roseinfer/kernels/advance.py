"""Advance each row of the device state by its new token, or make the row inert: torch reference and kernel.

An inert row has a negative position and receives no more tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rosellm.roseinfer.cache.device_state import ADVANCED, INERT, INT32_MAX, ROUNDS, DeviceState
from rosellm.roseinfer.kernels.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.roseinfer.sampling import NOT_FINITE
from rosellm.triton_or_none import next_power_of_2, tl, triton

ROLES = {"_advance_kernel": "sampling"}


def advance_ref(
    *, state: DeviceState, slots: Tensor, values: Tensor | None, indices: Tensor, texts: Tensor | None = None
) -> None:
    """Write each row's new token to the ring, then advance the row or make it inert (torch reference).

    state: updated in place.
    slots: ``[n]`` int64, the rows of ``state`` to advance.
    values: ``[n, TILES]`` fp32, the best value of each vocabulary tile; None if ``indices`` are the new
        tokens.
    indices: ``[n, TILES]`` int32, the token of each value; ``[n, 1]`` if ``values`` is None.
    texts: int32 ``[S, L]``, receives the last token and the new one of each row, at their positions; or None.

    The new token is the one with the highest value (ties go to the lowest token), or NOT_FINITE if that value
    is infinite. A row with a stop token ends at it or at any of ``state.stop_tokens``; every row ends at its
    length limit and at a negative token. A row that ends becomes inert; from the next step on, INERT is
    written to the ring for it.
    """
    tokens = indices[:, 0]
    if values is not None:
        best = values.max(dim=1, keepdim=True).values
        tokens = torch.where(values == best, indices, INT32_MAX).min(dim=1).values
        tokens = torch.where(best[:, 0].isinf(), NOT_FINITE, tokens)
    positions, rounds = state.positions[slots], state.rounds[slots]
    live = positions >= 0
    stops = state.stops[slots]
    stopped = (tokens == stops) | ((stops >= 0) & torch.isin(tokens, state.stop_tokens))
    ended = stopped | (positions + 2 >= state.limits[slots]) | (tokens < 0)
    given = torch.where(live, tokens, INERT).to(torch.int32)
    state.ring[rounds.long().cpu(), slots.cpu()] = given.to(state.ring.device)
    if texts is not None:
        rows, at = slots[live], positions[live].long()
        texts[rows, at] = state.tokens[rows]
        texts[rows, at + 1] = torch.where(tokens >= 0, tokens, 0)[live].to(texts.dtype)
    state.rounds[slots] = (rounds + 1) % ROUNDS
    state.tokens[slots] = torch.where(live & (tokens >= 0), tokens, state.tokens[slots])
    state.positions[slots] = torch.where(live & ~ended, positions + 1, INERT)


@triton.jit
def chosen_token(values_ptr, indices_ptr, place, TILES, WIDTH: tl.constexpr, NOT_FINITE: tl.constexpr):
    """Return the token with the highest value of all tiles in row ``place``, or NOT_FINITE."""
    tile = tl.arange(0, WIDTH)
    inside = tile < TILES
    values = tl.load(values_ptr + place * TILES + tile, mask=inside, other=float("-inf"))
    indices = tl.load(indices_ptr + place * TILES + tile, mask=inside, other=2147483647)
    best = tl.max(values, axis=0)
    token = tl.min(tl.where(values == best, indices, 2147483647), axis=0)
    return tl.where((best == float("inf")) | (best == float("-inf")), NOT_FINITE, token)


@triton.jit
def ends_row(token, position, limit, stop, stops_ptr, N_STOPS: tl.constexpr):
    """Return whether a token ends its row, given the number of tokens cached before it was chosen."""
    ended = (token == stop) | (position + 2 >= limit) | (token < 0)
    for i in tl.static_range(N_STOPS):
        ended = ended | ((stop >= 0) & (token == tl.load(stops_ptr + i)))
    return ended


@triton.jit
def _advance_kernel(
    rows_ptr, slots_ptr, values_ptr, indices_ptr, ring_ptr, stops_ptr, text_ptr, row_stride, ring_stride,
    text_stride, TILES, N_STOPS: tl.constexpr, WIDTH: tl.constexpr, CHOOSE: tl.constexpr, TOKEN: tl.constexpr,
    POSITION: tl.constexpr, LIMIT: tl.constexpr, STOP: tl.constexpr, ROUND: tl.constexpr,
    ROUNDS: tl.constexpr, NOT_FINITE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Advance one state row per program by its new token, which is chosen from all tiles if CHOOSE.

    text_ptr: None if there are no texts.
    """
    program = tl.program_id(0)
    slot = tl.load(slots_ptr + program)
    row = rows_ptr + slot * row_stride
    position = tl.load(row + POSITION)
    limit = tl.load(row + LIMIT)
    stop = tl.load(row + STOP)
    count = tl.load(row + ROUND)
    last = tl.load(row + TOKEN)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    if CHOOSE:
        token = chosen_token(values_ptr, indices_ptr, program, TILES, WIDTH, NOT_FINITE)
    else:
        token = tl.load(indices_ptr + program)
    live = position >= 0
    ended = ends_row(token, position, limit, stop, stops_ptr, N_STOPS)
    tl.store(ring_ptr + count * ring_stride + slot, tl.where(live, token, -1))
    if text_ptr is not None:
        text = text_ptr + slot * text_stride + position
        tl.store(text, last, mask=live)
        tl.store(text + 1, tl.maximum(token, 0), mask=live)
    tl.store(row + ROUND, (count + 1) % ROUNDS)
    tl.store(row + TOKEN, token, mask=live & (token >= 0))
    tl.store(row + POSITION, tl.where(live & (ended == 0), position + 1, -1))


def advance(
    *, state: DeviceState, slots: Tensor, values: Tensor | None, indices: Tensor, texts: Tensor | None = None,
    dependent: int = False,
) -> None:  # fmt: skip
    """Advance rows as :func:`advance_ref` does, in Triton.

    values and indices must be contiguous. dependent: the launch mode, as in ``launch_options``.
    """
    constants = {**ADVANCED, "ROUNDS": ROUNDS, "NOT_FINITE": NOT_FINITE, **launch_options(dependent)}
    tiles = indices.shape[1]
    strides = state.rows.stride(0), state.ring.stride(0), 0 if texts is None else texts.stride(0)
    compared, choose = indices if values is None else values, values is not None
    options = {"WIDTH": next_power_of_2(tiles), "CHOOSE": choose, "num_warps": 4 if choose else 1}
    _advance_kernel[(len(slots),)](
        state.rows, slots, compared, indices, state.ring, state.stop_tokens, texts, *strides, tiles,
        N_STOPS=len(state.stop_tokens), **options, **constants,
    )  # fmt: skip
