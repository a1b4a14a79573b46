"""The host's plan of the resident step: which sequence has which row, and how many tokens it has cached.

The plan holds only integers on the host; all device work is done by calls of :class:`worker.Worker`.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from operator import sub
from typing import NamedTuple

import numpy as np

from rosellm.errors import OptionError
from rosellm.roseinfer.cache.device_state import FIELDS, ROUNDS, row_bytes
from rosellm.roseinfer.cache.kv_blocks import KVBlocks, blocks_for
from rosellm.roseinfer.cache.token_counts import TokenCounts
from rosellm.roseinfer.ranks.group import Call
from rosellm.roseinfer.request import Sequence

RELEASED = -1
# Weight of the latest step in the mean number of accepted drafts: of a row; of all rows; of all, in a probe
SMOOTHING, OF_ALL, OF_PROBES = 0.1, 0.02, 0.05
AHEAD, FEW_AHEAD = 1024, 128  # tokens for which slots are reserved early, if there are blocks to spare
NEVER = 1 << 40  # tokens
STEPS = np.arange(ROUNDS)[:, None]


@dataclass(slots=True, eq=False)
class Row:
    """A sequence's row of the device state; ``index`` is ``RELEASED`` once the sequence has given it up."""

    sequence: Sequence
    index: int


class Batch(NamedTuple):
    """The rows that a step advances.

    rows, sequences: the rows and their sequences, in the same order.
    indices: the rows' indices in the device state when the step began, int64 ``[n]``.
    at: an index of the same rows; a slice, which is faster, if they are rows 0 to n - 1.
    """

    rows: list[Row]
    sequences: list[Sequence]
    indices: np.ndarray
    at: np.ndarray | slice


NO_ROWS = Batch([], [], np.zeros(0, np.int64), slice(0))


class Pending:
    """What the steps begun since the planner's arrays were up to date change in them.

    All these steps run on one batch; drafts of earlier batches may end among them. Most steps change only
    these few numbers: to change arrays takes the host several times as long.

    n_steps, n_drafting: number of steps begun; of those that verify drafts, less those that have ended. Steps
        of earlier batches count when they end, so it may be negative.
    drafts: how many drafts such a step verifies for each row, ``[n]``: ``n_drafts``, or fewer for some rows
        unless they ``are_alike``.
    given: number of drafts accepted for each row, in ``n_ended`` steps that have ended.
    accepted: the recent mean of accepted drafts per step, of each row.
    behind: number of plain steps since the last one that drafted, or since the arrays were up to date.
    lefts: how many tokens each row had left when this object was made.
    room: a lower bound on the slots that any row has left.
    left: the fewest tokens that any row has left.
    longest, mean: upper bounds on the maximum and the mean of the rows' cached tokens, and ``most`` of both.
    rounds: the rows' rounds after n steps, ``[ROUNDS, n]``.
    """

    def __init__(self, batch: Batch, planner: Planner) -> None:
        at, n = batch.at, len(batch.indices)
        position, longest, reserved = planner.position[at], planner.longest[at], planner.reserved[at]
        self.batch, self.given, self.drafts = batch, [0] * n, planner.n_drafts[at]
        self.n_steps = self.n_drafting = self.n_drafts = self.n_ended = self.behind = 0
        self.has_drafted = self.are_alike = False
        self.room = int(np.where(reserved < longest - 1, reserved - position, NEVER).min())
        self.lefts, self.most = planner.left[at].tolist(), int(longest.max()) - 2
        self.left = min(self.lefts)
        self.longest, self.mean = int(position.max()), int(position.sum()) / n
        self.accepted = np.minimum(planner.accepted[at], self.drafts).tolist()
        self.rounds = (planner.round[batch.indices] + STEPS) & (ROUNDS - 1)  # faster than %

    def begin(self, n_drafts: int) -> None:
        """Add a step."""
        self.n_steps += 1
        self.n_drafting += n_drafts > 0
        self.has_drafted |= n_drafts > 0
        self.behind = 0 if n_drafts else self.behind + 1
        self.left -= 1
        self._cache(1 + n_drafts, 1 + n_drafts)

    def accept(self, counts: list[int]) -> None:
        """Add that a step with drafts has ended, which gave each row that many tokens."""
        most, mean = max(counts), sum(counts) / len(counts)
        self.given = [given + n - 1 for given, n in zip(self.given, counts, strict=True)]
        self.n_drafting -= 1
        self.n_ended += 1
        pairs = zip(self.accepted, counts, strict=True)
        self.accepted = [old + SMOOTHING * (n - 1 - old) for old, n in pairs]
        self.left = min(map(sub, self.lefts, self.given)) - self.n_steps
        if self.are_alike:  # else the longest row may have had no drafts
            self._cache(most - 1 - self.n_drafts, mean - 1 - self.n_drafts)

    def _cache(self, most: int, mean: float) -> None:
        self.room -= most
        self.longest += most
        self.mean += mean


def batch_bucket(batch: int) -> int:
    """Return the captured batch size to which a batch of ``batch`` state rows is padded.

    The captured sizes are powers of two up to 64, then multiples of 64 up to 256, and of 128 beyond: kernels
    compute tiles of 16 to 64 rows, so that padding takes little time.
    """
    for limit, step in ((64, None), (256, 64)):
        if batch <= limit:
            return 1 << (batch - 1).bit_length() if step is None else -(-batch // step) * step
    return -(-batch // 128) * 128


def batch_buckets(most: int) -> list[int]:
    """Return the captured batch sizes needed for 1 to ``most`` state rows, from smallest to largest."""
    buckets = [1]
    while buckets[-1] < most:
        buckets.append(batch_bucket(buckets[-1] + 1))
    return buckets


def write_tables(table: np.ndarray, sequences: list[Sequence]) -> None:
    """Write each sequence's block ids to the front of its row of ``table``; the rest of the row is kept."""
    for row, sequence in zip(table, sequences, strict=False):
        ids = sequence.block_ids
        row[: len(ids)] = ids


def _of_rows(running: Batch, batch: Batch, counts: list[int]) -> list[int]:
    """Return the counts of a step for the rows of ``running``; [] if any of them was not in ``batch``."""
    if batch is running:
        return counts
    count_of = dict(zip(batch.rows, counts, strict=True))
    own = [count_of.get(row, 0) for row in running.rows]
    return own if all(own) else []


class Planner:
    """The host's view of the rows of the device state, as they will be once all begun steps have ended.

    width: length of a row's block table.
    n_drafts: maximum number of draft tokens per row and step; 0 if no step drafts.
    ring: the ring of ``DeviceState``, as an array.
    call: ``Worker.call``, on every rank.

    Each of these attributes is int64 ``[S]``, with one entry per state row:

    left: number of tokens the sequence may still generate.
    position: number of its tokens that are cached; with draft tokens in flight, the most that may be.
    reserved: number of its tokens that have slots in the KV cache.
    longest: its maximum number of tokens.
    n_drafts: number of draft tokens that a step may verify for it.
    behind: number of its cached tokens that a draft model has not cached.
    accepted: mean number of its draft tokens that a step accepts, of late; NaN if unknown. Float64.
    usual: recent mean of accepted draft tokens per row and step, over all rows; NaN before any step has
        drafted. A float.
    round: number of steps that have run on the row, inert or not, modulo ``ROUNDS``.

    The arrays lack what is :class:`Pending` until :meth:`settle`.
    """

    def __init__(
        self, n_rows: int, width: int, ring: np.ndarray, blocks: KVBlocks, call: Call, n_drafts: int = 0
    ) -> None:
        self.width, self.blocks, self._ring, self._call = width, blocks, ring, call
        self._most_drafts = n_drafts
        self._n_drafting = self._n_ended = 0  # steps that verify drafts: in flight, and ended
        self._without_text: set[Sequence] = set()  # sequences whose text has not been sent
        self.counts = TokenCounts(n_rows, call)
        self.accepted, self.usual, self._weight = np.zeros(n_rows), math.nan, OF_ALL
        self.round = np.zeros(n_rows, np.int64)
        self._columns = np.zeros((6, n_rows), np.int64)
        self.position, self.behind, self.left, self.reserved, self.longest, self.n_drafts = self._columns
        self._at: list[Row | None] = [None] * n_rows
        self._row_of: dict[Sequence, Row] = {}
        self._free = list(range(n_rows))  # min-heap
        self._left_behind: set[int] = set()  # released rows that the device may still run
        self._running: Batch | None = None
        self._pending: Pending | None = None

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._row_of

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that have a state row."""
        return list(self._row_of)

    def check_room(self, n_more: int) -> None:
        """Raise ``OptionError`` if fewer than ``n_more`` state rows are free."""
        if n_more > len(self._free):
            raise OptionError(
                f"{n_more} more sequences exceed the {len(self)} that run together at most: "
                f"{len(self._row_of)} are running"
            )

    def batch(self, sequences: list[Sequence]) -> Batch:
        """Return the batch of ``sequences``, each of which must have a state row."""
        rows = [self._row_of[sequence] for sequence in sequences]
        indices = np.array([row.index for row in rows], np.int64)
        return Batch(rows, sequences, indices, indices)

    def running(self) -> Batch:
        """Return the rows that may generate a token, by index; the same object while the set is unchanged."""
        if self._running is None:
            indices = self._compact()
            rows, n = [row for index in indices if (row := self._at[index])], len(indices)
            at = slice(n) if n and indices[-1] == n - 1 else indices
            self._running = Batch(rows, [row.sequence for row in rows], indices, at)
        return self._running

    def unmoved(self) -> Batch:
        """Return the rows of the latest step, or all rows if that set has changed; no row is moved."""
        return self.batch(self.sequences) if self._running is None else self._running

    def attach(self, sequences: list[Sequence], positions: list[int]) -> np.ndarray:
        """Give each sequence a state row, and send the rows to the device; return their indices ``[n]``.

        positions: number of cached tokens of each sequence; the token at that position is the input of the
            next step.
        """
        indices, fields = self.assign(sequences, positions)
        self._send(sequences, indices, fields)
        return indices

    def assign(
        self, sequences: list[Sequence], positions: list[int], starts: list[int] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Give each sequence a state row, without sending it to the device.

        positions: number of cached tokens of each sequence.
        starts: if a prefill caches them and the next one, for a draft model, too: how many it does not cache.
            If 0, it also writes the row's text.

        Returns the rows' indices int64 ``[n]`` and fields int32 ``[n, FIELDS]``. Raises ``OptionError``,
        changing nothing, if too few rows are free.
        """
        self.check_room(sum(sequence not in self._row_of for sequence in sequences))
        self._stop_running()
        indices = [self._take(sequence).index for sequence in sequences]
        for index, sequence, position in zip(indices, sequences, positions, strict=True):
            self.left[index], self.position[index] = sequence.max_length - position - 1, position
            self.reserved[index] = self.blocks.tokens_reserved(sequence.block_ids)
            self.longest[index], self.accepted[index] = sequence.max_length, np.nan
        self._left_behind.difference_update(indices)
        if self._most_drafts and sequences:
            # With min_tokens, the host lifts bans between steps, one token at a time.
            drafts = [0 if s.params.min_tokens else self._most_drafts for s in sequences]
            self.n_drafts[indices] = drafts
            given = [-1] * len(drafts) if starts is None else starts
            triples = zip(sequences, drafts, given, strict=True)
            self._without_text.update(s for s, most, start in triples if start or not most)
            pairs = zip(sequences, positions, strict=True)
            self.behind[indices] = [max(0, n - s.n_prompt) if starts is None else -1 for s, n in pairs]
        rounds = [int(self.round[index]) for index in indices]
        counts = self.counts.hold(sequences, positions)
        words = b"".join(map(row_bytes, sequences, positions, rounds, counts))
        return np.array(indices, np.int64), np.frombuffer(words, np.int32).reshape(-1, FIELDS)

    def free(self, row: Row) -> None:
        """Free the row of an ended sequence on the host; the device has already made the row inert."""
        self._stop_running()
        heapq.heappush(self._free, row.index)
        self._at[row.index], self.left[row.index], row.index = None, 0, RELEASED
        del self._row_of[row.sequence]
        self.counts.drop(row.sequence)
        self._without_text.discard(row.sequence)

    def release(self, sequence: Sequence) -> None:
        """Free the sequence's row, if it has one, on the host; :meth:`deactivate` updates the device."""
        row = self._row_of.get(sequence)
        if row is not None:
            self._left_behind.add(row.index)
            self.free(row)

    def deactivate(self) -> None:
        """Make the released rows inert on the device, except those that have been assigned again."""
        if self._left_behind:
            self._call("deactivate_rows", np.array(list(self._left_behind), np.int32))
            self._left_behind.clear()

    def cached_at_most(self, batch: Batch, n_drafts: int = 0) -> np.ndarray:
        """Return the highest position at which the next step may cache a token of each row, ``[n]``.

        n_drafts: number of draft tokens that the step verifies per row.
        """
        self.settle()
        position = self.position[batch.at]
        if not (n_drafts or self._n_drafting):
            return position
        return np.minimum(position + self._drafts_of(batch, n_drafts), self.longest[batch.at] - 2)

    def _drafts_of(self, batch: Batch, n_drafts: int) -> np.ndarray:
        """Return how many of ``n_drafts`` draft tokens the next step can verify for each row, ``[n]``."""
        return np.minimum(self.n_drafts[batch.at], n_drafts)

    def most_drafts(self, batch: Batch, n_drafts: int) -> int:
        """Return how many of ``n_drafts`` draft tokens the next step can verify per row, at most."""
        return int(self._drafts_of(batch, n_drafts).max())

    def settle(self) -> None:
        """Bring the arrays up to date."""
        pending, self._pending = self._pending, None
        if pending is None or not (pending.n_steps or pending.n_ended):
            return
        at, given = pending.batch.at, np.array(pending.given)
        self.position[at] += pending.n_steps + given + pending.n_drafting * pending.drafts
        self.left[at] = np.maximum(self.left[at] - pending.n_steps - given, 0)
        self.behind[at] = pending.behind if pending.has_drafted else self.behind[at] + pending.behind
        ran = slice(batch_bucket(int(pending.batch.indices[-1]) + 1))
        self.round[ran] = (self.round[ran] + pending.n_steps) % ROUNDS
        if pending.n_ended:
            self.accepted[at] = pending.accepted

    def _pending_of(self, batch: Batch, n_drafts: int = 0) -> Pending:
        """Return what is pending for a batch; a step with that many drafts may be added."""
        pending = self._pending
        is_other = n_drafts and (pending is None or pending.n_drafts != n_drafts)
        if is_other and pending is not None and (pending.n_steps or pending.n_ended):
            self.settle()
            pending = None
        if pending is None:
            pending = self._pending = Pending(batch, self)
        if is_other:
            pending.n_drafts, pending.drafts = n_drafts, self._drafts_of(batch, n_drafts)
            pending.are_alike = int(pending.drafts.min()) == n_drafts
        return pending

    def grow(self, batch: Batch, n_drafts: int = 0) -> tuple[int, float]:
        """Reserve slots in the KV cache for rows whose next tokens have none, and send their block tables.

        Sending the tables takes the host longer than a step. So if there are blocks to spare, every row gets
        slots for many more tokens at once.

        n_drafts: number of draft tokens that the next step verifies per row.

        Returns upper bounds on the maximum and the mean of the positions at which the step may cache a token.
        Raises ``KVCacheExhausted`` if blocks run out; slots reserved until then are kept, and no step has
        begun.
        """
        if self._pending_of(batch, n_drafts).room <= n_drafts:
            self._grow(batch, n_drafts)
        pending = self._pending_of(batch, n_drafts)
        return min(pending.longest + n_drafts, pending.most), min(pending.mean + n_drafts, pending.most)

    def _grow(self, batch: Batch, n_drafts: int) -> None:
        needed = self.cached_at_most(batch, n_drafts)
        if not np.count_nonzero(needed >= self.reserved[batch.at]):
            return
        until = needed
        each = blocks_for(FEW_AHEAD, self.blocks.block_size) + 1
        has_some = self.blocks.num_free_blocks() > 2 * each * len(needed)
        if ahead := self.tokens_ahead() or FEW_AHEAD * has_some:
            until = np.minimum(needed + ahead, self.longest[batch.at] - 2)
        (short,) = (until >= self.reserved[batch.at]).nonzero()
        grown: list[int] = []
        try:
            for i in short.tolist():
                self._reserve(batch.sequences[i], batch.indices[i], int(until[i]) + 1)
                grown.append(i)
        finally:
            if grown:
                sequences = [batch.sequences[i] for i in grown]
                self._send(sequences, batch.indices[grown], np.zeros((len(grown), 0), np.int32))

    def tokens_ahead(self) -> int:
        """Return for how many tokens each row may get slots early, so that no sequence will lack blocks.

        This is ``AHEAD`` if the free blocks suffice for sequences of full length in all rows, otherwise 0.
        """
        self.settle()
        without_slots = np.maximum(self.longest - 1 - self.reserved, 0)[self.left > 0]
        needed = int((-(-without_slots // self.blocks.block_size)).sum())
        return AHEAD if self.blocks.num_free_blocks() >= needed + len(self._free) * self.width else 0

    def allow_stops(self) -> None:
        """Let the step that is about to begin choose stop tokens where ``min_tokens`` no longer bans them."""
        self.counts.allow_stops(self._position_of)

    def _position_of(self, sequence: Sequence) -> int:
        self.settle()
        return int(self.position[self._row_of[sequence].index])

    def rounds_of(self, batch: Batch) -> np.ndarray:
        """Return the rounds of a batch's rows before its next step, ``[n]``."""
        if batch is not self._running:
            self.settle()
            return self.round[batch.indices]
        pending = self._pending_of(batch)
        return pending.rounds[pending.n_steps % ROUNDS]

    def advance(self, batch: Batch, ran: np.ndarray) -> None:
        """Record the start of any work that gives each row of ``batch`` one token.

        ran: indices of all state rows that it runs on, including inert ones; their rounds advance.
        """
        self.settle()
        self.round[ran] = (self.round[ran] + 1) % ROUNDS
        at = batch.indices
        self.position[at] += 1
        self.behind[at] += 1
        self.left[at] -= 1
        self._drop_ended(at)

    def begin_step(self, batch: Batch, n_drafts: int = 0) -> None:
        """Record the start of a step that gives each running row one token, and one more per draft.

        n_drafts: number of draft tokens that the step verifies per row. :meth:`accept` subtracts those that
            were not accepted.
        """
        pending = self._pending_of(batch, n_drafts)
        pending.begin(n_drafts)
        self._n_drafting += n_drafts > 0
        if pending.left <= 0:
            self._drop_ended(batch.at)

    def accept(self, batch: Batch, counts: list[int], n_drafts: int) -> None:
        """Record that a step that verified ``n_drafts`` drafts per row has ended.

        counts: how many tokens it gave each row; ignored for rows released since.
        """
        self._n_drafting -= 1
        self._n_ended += 1
        usual = 0.0 if math.isnan(self.usual) else self.usual
        weight, self._weight = max(self._weight, 1 / self._n_ended), OF_ALL
        self.usual = usual + weight * (sum(counts) / len(counts) - 1 - usual)
        running = self._running
        if running is not None and (own := _of_rows(running, batch, counts)):
            pending = self._pending_of(running, n_drafts)
            pending.accept(own)
            if pending.left <= 0:
                self._drop_ended(running.at)
            return
        self.settle()
        now = np.array([row.index for row in batch.rows])
        at, accepted = now[now != RELEASED], np.array(counts)[now != RELEASED] - 1
        self.position[at] -= np.minimum(self.n_drafts[at], n_drafts) - accepted
        self.accepted[at] += SMOOTHING * (accepted - self.accepted[at])
        self.left[at] = np.maximum(self.left[at] - accepted, 0)
        self._drop_ended(at)

    def _drop_ended(self, at: np.ndarray | slice) -> None:
        """Let the next step run without those of the rows that have no tokens left."""
        self.settle()
        left = self.left[at]
        if np.count_nonzero(left) < len(left):  # quicker than ``all``
            self._running = None

    def _stop_running(self) -> None:
        """Let the next step find its rows."""
        self.settle()
        self._running = None

    def n_behind(self, batch: Batch) -> int:
        """Return the most tokens of a row that the draft model has not cached."""
        pending = self._pending_of(batch)
        return pending.behind + (0 if pending.has_drafted else int(self.behind[batch.at].max()))

    def guess(self, batch: Batch, accepted: float) -> bool:
        """Expect ``accepted`` draft tokens of rows about which nothing is known; return whether any are."""
        self.settle()
        new = batch.indices[np.isnan(self.accepted[batch.indices])]
        self.accepted[new] = accepted
        return bool(new.size)

    def accepted_by(self, batch: Batch) -> float:
        """Return the harmonic mean of the rows' recent tokens per step that drafts, minus 1.

        With the arithmetic mean, one fast row would outweigh many that gain nothing.
        """
        accepted = self._pending_of(batch).accepted
        return len(accepted) / sum([1 / (1 + n) for n in accepted]) - 1

    def expect(self, batch: Batch, accepted: float) -> None:
        """Before a probe, raise each row's expected number of accepted drafts to at least ``accepted``."""
        self.settle()
        self._weight = OF_PROBES
        self.accepted[batch.at] = np.maximum(self.accepted[batch.at], accepted)

    def last_tokens(self, batch: Batch) -> list[int]:
        """Return the token that each row received in its latest step, which must have ended."""
        self.settle()
        return self._ring[self.round[batch.indices] - 1, batch.indices].tolist()

    def _take(self, sequence: Sequence) -> Row:
        if sequence not in self._row_of:
            row = self._row_of[sequence] = Row(sequence, heapq.heappop(self._free))
            self._at[row.index] = row
        return self._row_of[sequence]

    def send_texts(self, batch: Batch) -> None:
        """Send the known tokens of rows whose texts no prefill wrote; the device adds those in flight."""
        if self._without_text.isdisjoint(batch.sequences):
            return
        self.settle()
        pairs = zip(batch.sequences, batch.indices.tolist(), strict=True)
        new = [pair for pair in pairs if pair[0] in self._without_text]
        self._without_text.difference_update(s for s, _ in new)
        rows, length = np.array([index for _, index in new]), self.width * self.blocks.block_size
        places = [index * length + np.arange(len(s.tokens)) for s, index in new]
        numbers = len(self) * length + rows, len(self) * (length + 1) + rows
        values = self.n_drafts[rows] > 0, self.position[rows] - self.behind[rows]
        words = np.concatenate((*places, *numbers, *(s.tokens for s, _ in new), *values)).astype(np.int32)
        self._call("write_texts", words.reshape(2, -1))

    def _reserve(self, sequence: Sequence, index: int, length: int) -> None:
        """Reserve slots for ``length`` tokens and the rest of the last block, up to the maximum length."""
        reserved, size = int(self.reserved[index]), self.blocks.block_size
        n_tokens = min(blocks_for(length, size) * size, sequence.max_length - 1) - reserved
        self.blocks.reserve_prompt(sequence.block_ids, n_tokens)
        self.reserved[index] += n_tokens

    def _send(self, sequences: list[Sequence], indices: np.ndarray, fields: np.ndarray) -> None:
        """Send these rows in one copy: block tables and fields, ``[n, FIELDS]``, or ``[n, 0]`` for none."""
        n, n_fields = fields.shape
        words = np.zeros((n, 1 + n_fields + self.width), np.int32)
        words[:, 0] = indices
        words[:, 1 : 1 + n_fields] = fields
        write_tables(words[:, 1 + n_fields :], sequences)
        self._call("write_rows", words, n_fields)

    def _compact(self) -> np.ndarray:
        """Move the last rows to lower free indices if a smaller captured batch size then suffices.

        Returns the indices of the rows that may generate a token, ``[n]``.
        """
        taken = np.flatnonzero(self.left > 0)
        n = len(taken)
        if not n or taken[-1] < n or batch_bucket(int(taken[-1]) + 1) == batch_bucket(n):
            return taken
        free = [index for index in range(n) if self._at[index] is None]
        moves = [(old, new) for old, new in zip(taken[::-1], free, strict=False) if new < old]
        if moves:
            self._move(*np.array(moves).T)
        return np.flatnonzero(self.left > 0)

    def _move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Move rows to other indices on host and device; each index keeps its own round."""
        self._call("move_rows", np.stack((sources, targets)).astype(np.int32))
        self._columns[:, targets] = self._columns[:, sources]
        self.accepted[targets] = self.accepted[sources]
        self.left[sources] = 0
        for old, new in zip(sources.tolist(), targets.tolist(), strict=True):
            if row := self._at[old]:
                row.index, self._at[old], self._at[new] = new, None, row
        self._left_behind.difference_update(targets.tolist())
        self._free = [index for index, row in enumerate(self._at) if row is None]  # sorted, and so a heap
