"""What the device keeps of every running sequence, so that a decode step needs nothing from the host.

One row of 32-bit words a sequence: its last token, how many of its tokens are cached, when it stops, how its
tokens are chosen, and its block table. A row with a negative position is inert: nothing is written for it.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosellm.roseinfer.dependent_launch import launch_dependents, launch_options, wait_for_predecessor
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import NOT_FINITE

TOKEN, POSITION, LIMIT, STOP, ROUND, TOP_K, SEED, TEMPERATURE, TOP_P, FIELDS = 0, 1, 2, 3, 4, 5, 6, 8, 9, 10
INERT = NO_STOP = -1
ROUNDS = 64
INT32_MAX = 2**31 - 1
FLOAT32_MAX = torch.finfo(torch.float32).max
_ROW = struct.Struct("<6iq2f")


class DeviceState:
    """Rows ``[S, FIELDS + W]`` int32 on the device, and the ring ``[ROUNDS, S]`` in which tokens come out.

    The ring is host memory that the device writes to (pinned, where there is a GPU): a row's token of its
    round r stands at ``ring[r % ROUNDS, row]``, INERT where the row was inert, NOT_FINITE where none could be
    chosen. S: rows; W: blocks a sequence may hold. The attributes are views: tokens, positions, limits
    (tokens at which a sequence has its full length), stops (the token that ends it, or -1), top_k int32,
    seeds int64, temperatures and top_p fp32 ``[S]``, table ``[S, W]``.
    """

    def __init__(self, n_rows: int, width: int, device: torch.device) -> None:
        padded = FIELDS + width + width % 2  # seeds are read as 64-bit words
        self.rows = torch.zeros(n_rows, padded, dtype=torch.int32, device=device)
        self.rows[:, POSITION] = INERT
        self.ring = torch.full((ROUNDS, n_rows), INERT, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._view(width)

    def _view(self, width: int) -> None:
        rows, floats = self.rows, self.rows.view(torch.float32)
        self.tokens, self.positions = rows[:, TOKEN], rows[:, POSITION]
        self.limits, self.stops, self.rounds = rows[:, LIMIT], rows[:, STOP], rows[:, ROUND]
        self.top_k, self.seeds = rows[:, TOP_K], rows.view(torch.int64)[:, SEED // 2]
        self.temperatures, self.top_p = floats[:, TEMPERATURE], floats[:, TOP_P]
        self.table = rows[:, FIELDS : FIELDS + width]

    def first(self, n_rows: int) -> DeviceState:
        """A view of the first rows, with the same ring."""
        return self._part(self.rows[:n_rows])

    def at(self, slots: Tensor) -> DeviceState:
        """A copy of some rows, with the same ring."""
        return self._part(self.rows[slots])

    def _part(self, rows: Tensor) -> DeviceState:
        part = object.__new__(DeviceState)
        part.rows, part.ring = rows, self.ring
        part._view(self.table.shape[1])
        return part


def row_bytes(sequence: Sequence, position: int, rounds: int) -> bytes:
    """The FIELDS words of a sequence's row, little-endian."""
    params, stop = sequence.params, sequence.stop_token
    return _ROW.pack(
        sequence.tokens[position],
        position,
        sequence.max_length,
        NO_STOP if stop is None else stop,
        rounds,
        min(params.top_k, INT32_MAX),
        sequence.seed,
        min(params.temperature, FLOAT32_MAX),
        params.top_p,
    )


def advance_ref(*, state: DeviceState, slots: Tensor, values: Tensor | None, indices: Tensor) -> None:
    """The specification: each row takes its new token, puts it into the ring, and goes on or becomes inert.

    slots ``[n]`` int64: the rows. indices ``[n, TILES]`` int32 with values ``[n, TILES]`` fp32: the token is
    the lowest index of the highest value, NOT_FINITE where that is infinite; without values, ``[n, 1]``, the
    token itself. A row ends with its stop token, at its full length, or without a token.
    """
    tokens = indices[:, 0]
    if values is not None:
        best = values.max(dim=1, keepdim=True).values
        tokens = torch.where(values == best, indices, INT32_MAX).min(dim=1).values
        tokens = torch.where(best[:, 0].isinf(), NOT_FINITE, tokens)
    positions, rounds = state.positions[slots], state.rounds[slots]
    live = positions >= 0
    ended = (tokens == state.stops[slots]) | (positions + 2 >= state.limits[slots]) | (tokens < 0)
    told = torch.where(live, tokens, INERT).to(torch.int32)
    state.ring[rounds.long().cpu() % ROUNDS, slots.cpu()] = told.to(state.ring.device)
    state.rounds[slots] = rounds + 1
    state.tokens[slots] = torch.where(live & (tokens >= 0), tokens, state.tokens[slots])
    state.positions[slots] = torch.where(live & ~ended, positions + 1, INERT)


@triton.jit
def _advance_kernel(
    rows_ptr,
    slots_ptr,
    values_ptr,
    indices_ptr,
    ring_ptr,
    row_words,
    ring_row,
    TILES,
    WIDTH: tl.constexpr,
    CHOOSE: tl.constexpr,
    TOKEN: tl.constexpr,
    POSITION: tl.constexpr,
    LIMIT: tl.constexpr,
    STOP: tl.constexpr,
    ROUND: tl.constexpr,
    ROUNDS: tl.constexpr,
    NOT_FINITE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One row a program."""
    program = tl.program_id(0)
    slot = tl.load(slots_ptr + program)
    row = rows_ptr + slot * row_words
    position = tl.load(row + POSITION)
    limit = tl.load(row + LIMIT)
    stop = tl.load(row + STOP)
    count = tl.load(row + ROUND)
    wait_for_predecessor(DEPENDENT)
    launch_dependents(DEPENDENT)
    if CHOOSE:
        tile = tl.arange(0, WIDTH)
        inside = tile < TILES
        values = tl.load(values_ptr + program * TILES + tile, mask=inside, other=float("-inf"))
        indices = tl.load(indices_ptr + program * TILES + tile, mask=inside, other=2147483647)
        best = tl.max(values, axis=0)
        token = tl.min(tl.where(values == best, indices, 2147483647), axis=0)
        token = tl.where((best == float("inf")) | (best == float("-inf")), NOT_FINITE, token)
    else:
        token = tl.load(indices_ptr + program)
    live = position >= 0
    ended = (token == stop) | (position + 2 >= limit) | (token < 0)
    tl.store(ring_ptr + (count % ROUNDS) * ring_row + slot, tl.where(live, token, -1))
    tl.store(row + ROUND, count + 1)
    tl.store(row + TOKEN, token, mask=live & (token >= 0))
    tl.store(row + POSITION, tl.where(live & (ended == 0), position + 1, -1))


def make_advance(dependent: bool = False):
    """The Triton kernel, to be called as :func:`advance_ref`. values and indices contiguous."""
    launch = launch_options(dependent)

    def advance(*, state: DeviceState, slots: Tensor, values: Tensor | None, indices: Tensor) -> None:
        tiles = indices.shape[1]
        _advance_kernel[(len(slots),)](
            state.rows,
            slots,
            indices if values is None else values,
            indices,
            state.ring,
            state.rows.stride(0),
            state.ring.stride(0),
            tiles,
            WIDTH=triton.next_power_of_2(tiles),
            CHOOSE=values is not None,
            TOKEN=TOKEN,
            POSITION=POSITION,
            LIMIT=LIMIT,
            STOP=STOP,
            ROUND=ROUND,
            ROUNDS=ROUNDS,
            NOT_FINITE=NOT_FINITE,
            DEPENDENT=dependent,
            num_warps=4 if values is not None else 1,
            **launch,
        )

    return advance
