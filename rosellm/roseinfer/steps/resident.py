"""The GPU-resident decode step: tokens, positions, appends, sampling and stops stay on the device.

One graph, captured per padded batch size, advances every running sequence by one token. The host admits
sequences, grows their block tables ahead of need, starts steps and, some steps later, reads their tokens from
pinned memory. A row whose sequence has ended is inert until it is reassigned. ``ladder.dense.Dense`` is the
host-driven form of this step, and its specification.

Blocks may change owners while steps are in flight: device work is ordered, so an earlier step's writes land
before a later owner's prefill, and a released row is made inert before any later step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, Self

import numpy as np
from torch import Tensor

from rosellm.errors import RoseError
from rosellm.models.model import Transformer
from rosellm.roseinfer.cache.device_state import ROUNDS
from rosellm.roseinfer.layers.logprobs import add_likely
from rosellm.roseinfer.outputs import Done
from rosellm.roseinfer.ranks.group import ALONE, Call, Group
from rosellm.roseinfer.request import Sequence, commit_tokens
from rosellm.roseinfer.steps.planner import NO_ROWS, RELEASED, Batch, Planner, Row, batch_bucket
from rosellm.roseinfer.steps.prompts import PackedPrompts, Prompts
from rosellm.roseinfer.steps.step import STEP_RANGE, profile_range
from rosellm.roseinfer.steps.worker import Clock, Worker

RUN_AHEAD = 3
Kind = Literal["prefill", "decode"]
NO_ASKING = np.zeros((3, 0), np.int64)


class SamplingPlan(NamedTuple):
    """How a batch is sampled.

    batch: the rows to sample.
    mode: the chooser's mode.
    asking: the result of :func:`asking_of`.
    """

    batch: Batch
    mode: str
    asking: np.ndarray


def asking_of(batch: Batch, places: np.ndarray) -> np.ndarray:
    """Return the arguments of ``LogprobRing.begin`` for the sequences of a batch that request logprobs.

    places: for each sequence of the batch, its row of the hidden states ``[n]``.
    """
    if all([s.logprobs is None for s in batch.sequences]):
        return NO_ASKING
    rows = zip(places.tolist(), batch.indices.tolist(), batch.sequences, strict=True)
    asking = [(place, slot, s.params.logprobs) for place, slot, s in rows if s.logprobs is not None]
    return np.array(asking, np.int64).T.copy()


@dataclass(slots=True)
class Begun:
    """A step in flight.

    rounds: the round of each row of ``batch`` when the step began.
    since: the time from which the step counts: the end of the previous step, or its start if none was in
        flight.
    clock: the time at which the step ends.
    has_logprobs: whether any sequence of the batch requests logprobs.
    n_drafts: number of draft tokens that the step verifies per row.
    n_rows: the captured batch size of a decode step.
    """

    kind: Kind
    batch: Batch
    rounds: np.ndarray
    since: Clock
    clock: Clock
    has_logprobs: bool
    n_drafts: int = 0
    n_rows: int = 0


class ResidentStep:
    """A step that is planned on the host, runs on the device, and delivers its tokens later.

    It serves one engine, in one thread.

    planner: assigns rows and blocks to sequences.
    worker: runs on the device of this rank.
    prompts: caches prompts and chooses their first tokens.
    call: ``worker.call``, on every rank.
    group: the ranks; ``group.check`` is called after each wait for the device.
    """

    run_ahead = RUN_AHEAD

    def __init__(
        self, planner: Planner, worker: Worker, prompts: Prompts, call: Call, group: Group = ALONE
    ) -> None:
        self.planner, self.worker, self.prompts = planner, worker, prompts
        self._call, self._check = call, group.check
        self._ring = worker.state.ring.numpy()
        self._begun: deque[Begun] = deque()
        self._ended: deque[Done] = deque()
        self._clock = worker.clock()
        self._may_be_edited = False  # whether last tokens must be compared with the device's
        self._listed: list[Sequence] | None = None  # the list that rows were last reconciled with
        self._plan = self._plan_of(NO_ROWS, NO_ROWS.indices)
        self._latest: tuple[list[Sequence], Batch] | None = None  # sequences; their rows of ``hidden``

    @classmethod
    def on(cls, worker: Worker, model: Transformer, group: Group = ALONE) -> Self:
        """Build the step that plans for ``worker`` and for the workers of all other ranks of ``group``."""
        call = group.on_all(worker.call)
        ring, (n_rows, width) = worker.state.ring.numpy(), worker.state.table.shape
        planner = Planner(n_rows, width, ring, worker.blocks, call, len(worker.state.planes) - 1)
        if group is not ALONE:
            worker.blocks.copy_everywhere = partial(call, "copy_block")
        return cls(planner, worker, PackedPrompts(model.config, planner, worker, call), call, group)

    def begin_prefill(self, sequences: list[Sequence], counts: list[int]) -> None:
        """Begin to cache ``counts[i]`` more tokens of sequence i; its ``num_cached_tokens`` advances at once.

        A sequence that is fully cached afterwards is given a row and, when the step is collected, its next
        token. Raises ``OptionError``, and begins nothing, if there are too few free rows.
        """
        whole = [s for s, n in zip(sequences, counts, strict=True) if s.completes_prefill(n)]
        self.planner.check_room(len(whole))
        self._start()
        batch = self.prompts.run(sequences, counts)
        for sequence, n in zip(sequences, counts, strict=True):
            sequence.num_cached_tokens += n
        if whole:
            self._listed = None
            self._latest = whole, batch._replace(indices=np.arange(len(whole)))
        plan = self._plan_of(batch, np.arange(len(batch.rows)))
        self._find_logprobs(plan.asking)
        self._note("prefill", plan)
        self.planner.advance(batch, batch.indices)

    def begin_decode(self, sequences: list[Sequence]) -> int:
        """Begin a decode step; return the number of rows it advances, 0 if all last tokens are in flight."""
        batch = self._to_run(sequences)
        if batch.rows:
            self._begin_step(sequences, batch)
        return len(batch.rows)

    def collect(self, leave: int = 0) -> Iterator[Done]:
        """Wait until at most ``leave`` steps are in flight; commit and yield all ended steps, in order.

        If ``leave`` is 0, the caller may then change a sequence's last token before the next step; after any
        other call, such changes are ignored.
        """
        self._may_be_edited |= not leave
        while True:
            while self._ended:
                yield self._ended.popleft()
            if not self._begun:
                return
            if len(self._begun) > leave:
                self._settle(leave=len(self._begun) - 1)
            elif self._begun[0].clock.has_ended():
                self._commit_first()
            else:
                return

    def release(self, sequence: Sequence) -> None:
        """Free the sequence's state row, if it has one."""
        self.planner.release(sequence)
        self._listed = None

    def last_logits(self) -> Tensor:
        """Return logits ``[B, V]`` of the latest step begun, recomputed from its final hidden states.

        Raises ``RoseError`` if no step has begun.
        """
        if self._latest is None:
            raise RoseError("no step has been begun; there are no logits yet")
        self._may_be_edited = True
        sequences, batch = self._latest
        place = dict(zip(batch.sequences, batch.indices.tolist(), strict=True))
        return self._call("logits", np.array([place[s] for s in sequences if s in place]))

    def warm_up(self, rows: int | None, n_tokens: int, is_compiled: bool) -> None:
        """Compile the kernels and capture the graphs on every rank, as :func:`step.warm_up` does."""
        self._call("warm_up", rows, n_tokens, is_compiled)

    def captures(self, rows: int | None = None) -> list[Callable[[], object]]:
        """Return functions that each capture a missing graph on this rank.

        rows: if given, only the graphs of decode steps that serve this many sequences.
        """
        return self.worker.captures(rows)

    def warm_ups(self, rows: int | None = None) -> list[Callable[[], object]]:
        """Return functions that run each kernel once, on padding only, to compile it before its capture.

        rows: if given, only the kernels of decode steps that serve this many sequences.
        """
        return self.worker.warm_ups(rows)

    def largest_captures(self) -> list[Callable[[], object]]:
        """Return those functions of :meth:`captures` that need the most memory."""
        return self.worker.largest_captures()

    def rehearsals(self, n_tokens: int) -> list[Callable[[], object]]:
        """Return functions that run a prefill of ``n_tokens`` padding tokens, to compile its kernels."""
        return self.worker.rehearsals(n_tokens)

    @property
    def n_captured(self) -> int:
        """The number of CUDA graphs captured so far."""
        return self.worker.n_captured

    def _to_run(self, sequences: list[Sequence]) -> Batch:
        """Update the rows of ``sequences``, and return the batch that the next step advances."""
        if sequences is not self._listed:
            self._reconcile(sequences)
        if self._may_be_edited and not self._begun:
            self._send_edited()
            self._may_be_edited = False
        return self.planner.running()

    def _begin_step(self, sequences: list[Sequence], batch: Batch) -> None:
        planner = self.planner
        with profile_range(STEP_RANGE):
            rows = min(batch_bucket(int(batch.indices[-1]) + 1), len(planner))
            n_drafts = self._n_drafts(rows, batch)
            with profile_range(f"{STEP_RANGE}.reserve"):
                cached = planner.grow(batch, n_drafts)
                planner.deactivate()
                planner.allow_stops()
            self._start()
            with profile_range(f"{STEP_RANGE}.model"):
                if batch is not self._plan.batch:
                    self._plan = self._plan_of(batch, batch.indices)
                self._launch(rows, batch, n_drafts, cached)
                self._find_logprobs(self._plan.asking, n_drafts)
            self._note("decode", self._plan, n_drafts, rows)
            planner.begin_step(batch, n_drafts)
            self._latest = sequences, batch

    def _n_drafts(self, rows: int, batch: Batch) -> int:
        """Return how many draft tokens the next step verifies per row: none."""
        return 0

    def _launch(self, rows: int, batch: Batch, n_drafts: int, cached: tuple[int, float]) -> None:
        """Run the step. cached: the result of ``Planner.grow``."""
        variant = self.worker.variant(rows, *cached)
        self._call("decode", rows, self._plan.mode, variant)

    def _plan_of(self, batch: Batch, places: np.ndarray) -> SamplingPlan:
        mode = self.worker.next_tokens.chooser.mode([s.params for s in batch.sequences])
        return SamplingPlan(batch, mode, asking_of(batch, places))

    def _find_logprobs(self, asking: np.ndarray, n_drafts: int = 0) -> None:
        """Start computing the log-probabilities of the latest step's tokens for the sequences that ask."""
        if asking.size:
            self._call("find_logprobs", asking)

    def _reconcile(self, sequences: list[Sequence]) -> None:
        """Release the rows of sequences not in ``sequences``, and give rows to sequences that have none."""
        wanted, planner = set(sequences), self.planner
        others = [s for s in planner.sequences if s not in wanted]
        if others:
            self._settle()  # the host must know the latest tokens of these sequences
        for sequence in others:
            planner.release(sequence)
        missing = [s for s in sequences if s not in planner and s.finish_reason is None]
        if missing:
            planner.attach(missing, [s.num_cached_tokens for s in missing])
        self._listed = sequences

    def _send_edited(self) -> None:
        """Resend the rows of sequences whose last token differs from the token that the device chose."""
        batch = self.planner.unmoved()
        chosen = zip(batch.sequences, self.planner.last_tokens(batch), strict=True)
        edited = [s for s, token in chosen if s.tokens[s.num_cached_tokens] != token]
        if edited:
            self.planner.attach(edited, [s.num_cached_tokens for s in edited])

    # Steps in flight: begun, then committed once they have ended, then collected.

    def _start(self) -> None:
        """Prepare to submit a step: start its timer if no step is in flight, and keep the ring from overflow.

        The ring holds the tokens of ``ROUNDS`` steps, so the oldest steps are committed before it is full.
        """
        if not self._begun:
            self._clock = self.worker.clock()
        elif len(self._begun) >= ROUNDS - 1:
            self._settle(leave=ROUNDS // 2)

    def _note(self, kind: Kind, plan: SamplingPlan, n_drafts: int = 0, n_rows: int = 0) -> None:
        """Record a step that has just been submitted to the device as being in flight."""
        since, self._clock = self._clock, self.worker.clock()
        rounds = self.planner.rounds_of(plan.batch)
        asks = bool(plan.asking.size)
        self._begun.append(Begun(kind, plan.batch, rounds, since, self._clock, asks, n_drafts, n_rows))

    def _settle(self, leave: int = 0) -> None:
        """Wait until at most ``leave`` steps are in flight, and commit the tokens of the ended steps."""
        while len(self._begun) > leave:
            self._begun[0].clock.wait()
            self._commit_first()

    def _commit_first(self) -> None:
        self._check()
        self._ended.append(self._commit(self._begun.popleft()))

    def _commit(self, begun: Begun) -> Done:
        """Copy a step's tokens from the ring to its sequences, except those released since it began."""
        rows, sequences, indices, _ = begun.batch
        tokens = self._ring[begun.rounds, indices].tolist()
        live = [i for i, row in enumerate(rows) if row.index != RELEASED]
        if len(live) < len(rows):
            rows, sequences = [rows[i] for i in live], [sequences[i] for i in live]
            tokens = [tokens[i] for i in live]
        got, failed = commit_tokens(sequences, tokens, num_newly_cached=int(begun.kind == "decode"))
        if begun.has_logprobs:
            self._give_logprobs(begun, live, set(got))
        self._free_ended(rows)
        return Done(begun.kind, got, begun.clock.seconds_since(begun.since), failed)

    def _free_ended(self, rows: list[Row]) -> None:
        for row in [row for row in rows if row.sequence.finish_reason is not None]:
            if row.sequence.stop_reason is None:
                self.planner.free(row)
            else:  # ended by a token that the device does not know
                self.planner.release(row.sequence)

    def _give_logprobs(self, begun: Begun, live: list[int], got: set[Sequence]) -> None:
        """Give sequences in ``got`` the log-probabilities that they request.

        live: positions within the batch of the rows not released.
        got: the sequences that received a new token.
        """
        sequences = begun.batch.sequences
        there = [i for i in live if sequences[i] in got and sequences[i].logprobs is not None]
        words = self.worker.logprobs.read(begun.rounds[there], begun.batch.indices[there])
        add_likely([sequences[i] for i in there], words)
