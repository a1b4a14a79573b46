"""Per-sequence state on the device, so that a decode step needs no input from the host.

A state row holds, in 32-bit integers, a sequence's last token, its number of cached tokens, its stopping
conditions, its sampling parameters and its block table. A row with a negative position is inert: it belongs
to no running sequence, and steps write nothing for it.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from rosellm.roseinfer.request import Sequence

ROUND, TOKEN, POSITION, LIMIT, STOP, TOP_K, SEED, TEMPERATURE, TOP_P, MIN_P = 0, 1, 2, 3, 4, 5, 6, 8, 9, 10
REPETITION, PRESENCE, FREQUENCY, COUNTS, PROMPT, FIELDS = 11, 12, 13, 14, 15, 16
INERT = NO_STOP = -1
ROUNDS = 64
# Fields that the advance kernel reads or writes, passed to it as constants.
ADVANCED = {"TOKEN": TOKEN, "POSITION": POSITION, "LIMIT": LIMIT, "STOP": STOP, "ROUND": ROUND}
INT32_MAX = 2**31 - 1
FLOAT32_MAX = torch.finfo(torch.float32).max
_ROW = struct.Struct("<6iq6f2i")


class DeviceState:
    """The state rows of all sequences on the device, and the ring that receives their new tokens.

    S is the number of rows, W the maximum number of blocks of a sequence.

    rows: int32 ``[S, R]``, R = ``FIELDS + W`` rounded up to a multiple of 4.
    ring: int32 ``[ROUNDS, S]`` in host memory that the device writes to (pinned if there is a GPU). The token
        of a row's r-th step, counted from 0, is at ``ring[r % ROUNDS, row]``: INERT if the row was inert,
        NOT_FINITE if no token could be chosen.
    planes: ``[P, ROUNDS, S]``, of which ``ring`` is the first. A step that gives a row several tokens writes
        the last of them to the ring, the one before it to the second plane, and so on.
    stop_tokens: int32 ``[E]``, the model's end-of-sequence tokens, which end any row whose stop is not -1.

    The other attributes are views of ``rows``, created on access if few steps need them. Int32 ``[S]``:

    tokens: the last token, the input of the next step.
    positions: number of cached tokens; negative if the row is inert.
    limits: number of tokens at full length.
    stops: a token that ends the row, or -1 if no token does.
    rounds: number of steps that have run on the row, inert or not, modulo ROUNDS.
    top_k: 0 keeps all tokens.
    counts: 1 + the sequence's row in the table of ``TokenCounts``, or 0 if it has none.
    prompts: length of the prompt.

    Other types:

    seeds: int64 ``[S]``.
    temperatures, top_p, min_p, repetition, presence, frequency: fp32 ``[S]``.
    table: int32 ``[S, W]``, the block ids.
    """

    def __init__(
        self,
        n_rows: int,
        width: int,
        device: torch.device,
        stop_tokens: tuple[int, ...] = (),
        n_planes: int = 1,
    ) -> None:
        padded = -(-(FIELDS + width) // 4) * 4  # seeds are 64-bit; kernels assume 16-byte alignment
        self.rows = torch.zeros(n_rows, padded, dtype=torch.int32, device=device)
        self.rows[:, POSITION] = INERT
        is_pinned = device.type == "cuda"
        sizes = n_planes, ROUNDS, n_rows
        self.planes = torch.full(sizes, INERT, dtype=torch.int32, device="cpu", pin_memory=is_pinned)
        self.ring = self.planes[0]
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
        """Whether each row is sampled with top-k, top-p or min-p: ``[S]`` bool."""
        return (self.temperatures > 0) & ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0))

    @property
    def by_mass(self) -> Tensor:
        """Whether each row is sampled with top-p but with neither top-k nor min-p: ``[S]`` bool."""
        return self.filtered & (self.top_k == 0) & (self.min_p <= 0)

    def first(self, n_rows: int) -> DeviceState:
        """Return a view of the first ``n_rows`` rows, with the same ring."""
        return self.of(self.rows[:n_rows])

    def at(self, slots: Tensor) -> DeviceState:
        """Return a copy of the rows ``slots`` ``[n]``, with the same ring."""
        return self.of(self.rows[slots])

    def of(self, rows: Tensor) -> DeviceState:
        """Return a state with the given rows, int32 ``[n, R]``, and the same ring."""
        part = object.__new__(DeviceState)
        part.rows, part.stop_tokens = rows, self.stop_tokens
        part.planes, part.ring = self.planes, self.ring
        part._view(self.table.shape[1])
        return part


def row_bytes(sequence: Sequence, position: int, rounds: int, counts: int = 0) -> bytes:
    """Return the ``FIELDS`` fields of a sequence's state row, as little-endian 32-bit integers.

    position: number of cached tokens; the token at this position is the row's last token.
    rounds: number of steps that have run on the row, modulo ``ROUNDS``.
    counts: 1 + the sequence's row in the table of ``TokenCounts``, or 0 if it has none.
    """
    params, token = sequence.params, sequence.tokens[position]
    stop = sequence.eos_tokens[0] if sequence.eos_tokens else NO_STOP
    top_k, temperature = min(params.top_k, INT32_MAX), min(params.temperature, FLOAT32_MAX)
    numbers = rounds, token, position, sequence.max_length, stop
    filters = temperature, params.top_p, params.min_p
    penalties = params.repetition, params.presence_penalty, params.frequency_penalty
    return _ROW.pack(*numbers, top_k, sequence.seed, *filters, *penalties, counts, sequence.n_prompt)
