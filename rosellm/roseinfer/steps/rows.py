"""Which sequence has which row of the device state: the host's record of the rows."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rosellm.errors import OptionError
from rosellm.roseinfer.cache.device_state import FIELDS, INERT, ROUNDS, DeviceState, row_bytes
from rosellm.roseinfer.cache.kv_blocks import KVBlockManager
from rosellm.roseinfer.cache.staging import StagingBuffer
from rosellm.roseinfer.cache.token_counts import TokenCounts
from rosellm.roseinfer.ranks.group import ALONE, Group
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.steps.cuda_graph import batch_bucket

GIVEN_UP = -1


@dataclass(slots=True, eq=False)
class Row:
    """A sequence's row of the device state; ``index`` is ``GIVEN_UP`` once it is released."""

    sequence: Sequence
    index: int


class Batch(NamedTuple):
    """Rows of one step, their sequences, and their indices ``[n]`` when it began."""

    rows: list[Row]
    sequences: list[Sequence]
    indices: np.ndarray


NO_ROWS = Batch([], [], np.zeros(0, np.int64))


def write_tables(table: np.ndarray, sequences: list[Sequence]) -> None:
    """The blocks of each sequence into its row of ``table``; what is past them stays."""
    for row, sequence in zip(table, sequences, strict=False):
        ids = sequence.block_ids[0]
        row[: len(ids)] = ids


class Rows:
    """The rows of ``state``, kept on the host as the device will have them once all begun steps have ended.

    left: tokens that a row may still be asked for; position: cached tokens; reserved: tokens with reserved KV
    slots; round: its place in the ring of tokens. Each is int64 ``[S]``.
    """

    def __init__(
        self, state: DeviceState, blocks: KVBlockManager, counts: TokenCounts, group: Group = ALONE
    ) -> None:
        self.state, self.blocks, self.counts = state, blocks, counts
        n_rows = len(state.rows)
        self.left, self.position, self.reserved, self.round = np.zeros((4, n_rows), np.int64)
        self._staging = StagingBuffer(state.rows.device, torch.int32)
        self._at: list[Row | None] = [None] * n_rows
        self._row_of: dict[Sequence, Row] = {}
        self._free = list(range(n_rows))  # a heap: the lowest index first
        self._left_behind: set[int] = set()  # released while the device may still run them
        self._running: Batch | None = None
        self._write = group.broadcast("write_rows", self._apply_write)
        self._send_inert = group.broadcast("deactivate_rows", self._apply_inert)
        self._shift = group.broadcast("move_rows", self._apply_move)

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._row_of

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that have a row."""
        return list(self._row_of)

    def check_room(self, n_more: int) -> None:
        """Raise ``OptionError`` if fewer than ``n_more`` rows are free."""
        if n_more > len(self._free):
            raise OptionError(
                f"{n_more} more sequences exceed the {len(self)} that run together at most: "
                f"{len(self._row_of)} are running"
            )

    def batch(self, sequences: list[Sequence]) -> Batch:
        """The rows of ``sequences``; each has one."""
        rows = [self._row_of[sequence] for sequence in sequences]
        return Batch(rows, sequences, np.array([row.index for row in rows], np.int64))

    def running(self) -> Batch:
        """The rows that may be asked for a token, in order; the same object until that changes."""
        if self._running is None:
            self._close_ranks()
            indices = np.flatnonzero(self.left > 0)
            rows = [row for index in indices if (row := self._at[index])]
            self._running = Batch(rows, [row.sequence for row in rows], indices)
        return self._running

    def attach(self, sequences: list[Sequence], positions: list[int]) -> Tensor:
        """Assign or renew the rows of sequences, ``positions[i]`` tokens cached; indices ``[n]`` int64.

        The token at a sequence's position is the input of its next step.
        """
        return self._send(sequences, *self.assign(sequences, positions))

    def assign(self, sequences: list[Sequence], positions: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """The part of :meth:`attach` on the host: indices ``[n]`` and fields ``[n, FIELDS]`` to be sent."""
        self.check_room(sum(sequence not in self._row_of for sequence in sequences))
        indices = np.array([self._take(sequence).index for sequence in sequences], np.int64)
        self.left[indices] = [s.max_length - p - 1 for s, p in zip(sequences, positions, strict=True)]
        self.position[indices] = positions
        self.reserved[indices] = [self.blocks.tokens_reserved(s.block_ids[0]) for s in sequences]
        self._left_behind.difference_update(indices.tolist())
        self._running = None
        rounds = self.round[indices].tolist()
        counts = self.counts.hold(sequences, positions)
        words = b"".join(map(row_bytes, sequences, positions, rounds, counts))
        return indices, np.frombuffer(words, np.int32).reshape(-1, FIELDS)

    def free(self, row: Row) -> None:
        """Free the row of a sequence that has ended on the device, too."""
        heapq.heappush(self._free, row.index)
        self._at[row.index], self.left[row.index], row.index = None, 0, GIVEN_UP
        del self._row_of[row.sequence]
        self.counts.drop(row.sequence)
        self._running = None

    def release(self, sequence: Sequence) -> None:
        """Free the sequence's row, if it has one; :meth:`deactivate` updates the device."""
        row = self._row_of.get(sequence)
        if row is not None:
            self._left_behind.add(row.index)
            self.free(row)

    def deactivate(self) -> None:
        """Make inert on the device the rows that were released and not reassigned."""
        if self._left_behind:
            host = self._staging.host(len(self._left_behind))
            host[:] = list(self._left_behind)
            self._send_inert(host)
            self._left_behind.clear()

    def grow(self, batch: Batch) -> None:
        """Reserve blocks for the rows whose next token has none.

        Raises ``KVCacheExhausted`` before the step begins; rows that got theirs keep it.
        """
        short = np.flatnonzero(self.position[batch.indices] >= self.reserved[batch.indices])
        if not short.size:
            return
        grown: list[int] = []
        try:
            for i in short.tolist():
                self._reserve(batch.sequences[i], batch.indices[i])
                grown.append(i)
        finally:
            if grown:
                sequences = [batch.sequences[i] for i in grown]
                self._send(sequences, batch.indices[grown], np.zeros((len(grown), 0), np.int32))

    def begin_step(self, batch: Batch, ran: slice | np.ndarray) -> None:
        """Record the start of a step that gives ``batch`` a token each; ``ran``: the rows that it runs."""
        self.round[ran] = (self.round[ran] + 1) % ROUNDS
        self.position[batch.indices] += 1
        self.left[batch.indices] -= 1
        if not self.left[batch.indices].all():
            self._running = None

    def last_tokens(self, batch: Batch) -> list[int]:
        """The token that the latest finished step gave each row."""
        return self.state.ring.numpy()[self.round[batch.indices] - 1, batch.indices].tolist()

    def _take(self, sequence: Sequence) -> Row:
        if sequence not in self._row_of:
            row = self._row_of[sequence] = Row(sequence, heapq.heappop(self._free))
            self._at[row.index] = row
        return self._row_of[sequence]

    def _reserve(self, sequence: Sequence, index: int) -> None:
        """Reserve the rest of the row's block, or a new block, as far as the sequence needs it."""
        reserved = int(self.reserved[index])
        room = self.blocks.block_size - reserved % self.blocks.block_size
        n_tokens = min(room, sequence.max_length - 1 - reserved)
        self.blocks.reserve_prompt(0, sequence.block_ids[0], n_tokens)
        self.reserved[index] += n_tokens

    def _send(self, sequences: list[Sequence], indices: np.ndarray, fields: np.ndarray) -> Tensor:
        """Send fields (none or all) and tables of these rows in one copy; returns indices on the device."""
        n, n_fields = fields.shape
        width = self.state.table.shape[1]
        host = self._staging.host(n, 1 + n_fields + width)
        host[:, 0] = indices
        host[:, 1 : 1 + n_fields] = fields
        write_tables(host[:, 1 + n_fields :], sequences)
        return self._write(host, n_fields)

    def _apply_write(self, host: np.ndarray, n_fields: int) -> Tensor:
        """The part of :meth:`_send` on the device."""
        sent = self._staging.put(host).send()
        index = sent[:, 0].long()
        rows = self.state.rows[:, FIELDS - n_fields : FIELDS - n_fields + host.shape[1] - 1]
        rows.index_copy_(0, index, sent[:, 1:])
        return index

    def _apply_inert(self, host: np.ndarray) -> None:
        """The part of :meth:`deactivate` on the device."""
        self.state.positions.index_fill_(0, self._staging.put(host).send().long(), INERT)

    def _close_ranks(self) -> None:
        """Move the last rows into free ones if a smaller bucket is then enough."""
        taken = np.flatnonzero(self.left > 0)
        if not taken.size or batch_bucket(int(taken[-1]) + 1) == batch_bucket(len(taken)):
            return
        free = [index for index in range(len(taken)) if self._at[index] is None]
        moves = [(old, new) for old, new in zip(taken[::-1], free, strict=False) if new < old]
        if moves:
            self._move(*np.array(moves).T)

    def _move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Move rows to other places; each place keeps its own round."""
        host = self._staging.host(2, len(sources))
        host[:] = sources, targets
        self._shift(host)
        for book in (self.left, self.position, self.reserved):
            book[targets] = book[sources]
        self.left[sources] = 0
        for old, new in zip(sources.tolist(), targets.tolist(), strict=True):
            if row := self._at[old]:
                row.index, self._at[old], self._at[new] = new, None, row
        self._left_behind.difference_update(targets.tolist())
        self._free = [index for index, row in enumerate(self._at) if row is None]  # sorted, and so a heap

    def _apply_move(self, host: np.ndarray) -> None:
        """The part of :meth:`_move` on the device."""
        source, target = self._staging.put(host).send().long()
        rounds = self.state.rounds[target]
        self.state.rows[target] = self.state.rows[source]
        self.state.rounds[target] = rounds
        self.state.positions.index_fill_(0, source, INERT)
