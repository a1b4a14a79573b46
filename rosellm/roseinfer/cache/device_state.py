"""Per-sequence state on the device, so that a decode step needs nothing from the host.

One row of 32-bit words per sequence: its last token, its number of cached tokens, its stopping conditions,
its sampling parameters and its block table. A row with a negative position is inert: nothing is written for
it.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from rosellm.roseinfer.request import Sequence

TOKEN, POSITION, LIMIT, STOP, ROUND, TOP_K, SEED, TEMPERATURE, TOP_P, MIN_P = 0, 1, 2, 3, 4, 5, 6, 8, 9, 10
REPETITION, PRESENCE, FREQUENCY, COUNTS, PROMPT, FIELDS = 11, 12, 13, 14, 15, 16
INERT = NO_STOP = -1
ROUNDS = 64
# Words that the advance kernel reads or writes, as its constants.
ADVANCED = {"TOKEN": TOKEN, "POSITION": POSITION, "LIMIT": LIMIT, "STOP": STOP, "ROUND": ROUND}
INT32_MAX = 2**31 - 1
FLOAT32_MAX = torch.finfo(torch.float32).max
_ROW = struct.Struct("<6iq6f2i")


class DeviceState:
    """Rows ``[S, FIELDS + W]`` int32 on the device, and the ring ``[ROUNDS, S]`` that receives the tokens.

    The ring is host memory that the device writes to (pinned if there is a GPU). The token of a row's r-th
    step, counted from 0, is at ``ring[r % ROUNDS, row]``: INERT if the row was inert, NOT_FINITE if no token
    could be chosen. S: number of rows; W: the most blocks of a sequence.

    The attributes are views: tokens, positions, limits (number of tokens at full length), stops (a token that
    ends a row, or -1), rounds (number of steps, modulo ROUNDS), top_k, counts (1 + the row's index in
    ``TokenCounts``, or 0) and prompts (prompt length), int32 ``[S]``; seeds int64 ``[S]``; temperatures,
    top_p, min_p, repetition, presence and frequency fp32 ``[S]``; table int32 ``[S, W]``. Any of stop_tokens
    ``[E]`` int32, the model's end-of-sequence tokens, ends a row that has a stop. Views that few steps need
    are created on access.
    """

    def __init__(
        self, n_rows: int, width: int, device: torch.device, stop_tokens: tuple[int, ...] = ()
    ) -> None:
        padded = -(-(FIELDS + width) // 4) * 4  # seeds are 64-bit; kernels assume 16-byte alignment
        self.rows = torch.zeros(n_rows, padded, dtype=torch.int32, device=device)
        self.rows[:, POSITION] = INERT
        self.ring = torch.full((ROUNDS, n_rows), INERT, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.stop_tokens = torch.tensor(stop_tokens or (NO_STOP,), dtype=torch.int32, device=device)
        self._view(width)

    def _view(self, width: int) -> None:
        rows, floats = self.rows, self.rows.view(torch.float32)
        self.tokens, self.positions = rows[:, TOKEN], rows[:, POSITION]
        self.limits, self.stops, self.rounds = rows[:, LIMIT], rows[:, STOP], rows[:, ROUND]
        self.top_k, self.seeds = rows[:, TOP_K], rows.view(torch.int64)[:, SEED // 2]
        self.temperatures, self.top_p = floats[:, TEMPERATURE], floats[:, TOP_P]
        self.table = rows[:, FIELDS : FIELDS + width]

    @property
    def min_p(self) -> Tensor:
        return self.rows.view(torch.float32)[:, MIN_P]

    @property
    def repetition(self) -> Tensor:
        return self.rows.view(torch.float32)[:, REPETITION]

    @property
    def presence(self) -> Tensor:
        return self.rows.view(torch.float32)[:, PRESENCE]

    @property
    def frequency(self) -> Tensor:
        return self.rows.view(torch.float32)[:, FREQUENCY]

    @property
    def counts(self) -> Tensor:
        return self.rows[:, COUNTS]

    @property
    def prompts(self) -> Tensor:
        return self.rows[:, PROMPT]

    @property
    def filtered(self) -> Tensor:
        """Whether each row is sampled with top-k, top-p or min-p, ``[S]`` bool."""
        return (self.temperatures > 0) & ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0))

    @property
    def by_mass(self) -> Tensor:
        """Whether each row is sampled with top-p but neither top-k nor min-p, ``[S]`` bool."""
        return self.filtered & (self.top_k == 0) & (self.min_p <= 0)

    def first(self, n_rows: int) -> DeviceState:
        """Return a view of the first ``n_rows`` rows; it shares the ring."""
        return self.of(self.rows[:n_rows])

    def at(self, slots: Tensor) -> DeviceState:
        """Return a copy of the rows ``slots``; it shares the ring."""
        return self.of(self.rows[slots])

    def of(self, rows: Tensor) -> DeviceState:
        """Return a state of the given rows, a tensor ``[n, FIELDS + W]`` int32; it shares the ring."""
        part = object.__new__(DeviceState)
        part.rows, part.ring, part.stop_tokens = rows, self.ring, self.stop_tokens
        part._view(self.table.shape[1])
        return part


def row_bytes(sequence: Sequence, position: int, rounds: int, counts: int = 0) -> bytes:
    """Return the first ``FIELDS`` words of a sequence's row, as little-endian bytes.

    position: its number of cached tokens; rounds: the row's number of steps, modulo ``ROUNDS``; counts: 1 +
    its index in ``TokenCounts``, or 0.
    """
    params, token = sequence.params, sequence.tokens[position]
    stop = sequence.stop_tokens[0] if sequence.stop_tokens else NO_STOP
    top_k, temperature = min(params.top_k, INT32_MAX), min(params.temperature, FLOAT32_MAX)
    numbers = position, sequence.max_length, stop, rounds
    filters = temperature, params.top_p, params.min_p
    penalties = params.repetition, params.presence_penalty, params.frequency_penalty
    return _ROW.pack(token, *numbers, top_k, sequence.seed, *filters, *penalties, counts, sequence.n_prompt)
