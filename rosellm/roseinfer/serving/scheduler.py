"""The scheduler: which requests run in each iteration (continuous batching: Orca, Yu et al. 2022)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import chain
from time import perf_counter
from typing import Any, Protocol

from rosellm.errors import OverloadError, RoseError, describe
from rosellm.frozen_heap import frozen_heap
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.outputs import Done, RequestOutput
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import (
    Room,
    SchedulerConfig,
    WaitingQueue,
    batch_size_of,
    config_or_default,
)
from rosellm.roseinfer.serving.held_interrupt import held_interrupt
from rosellm.roseinfer.serving.prompts import check_prompts, each_made


class Progress(Protocol):
    """The part of tqdm's interface that schedulers use."""

    total: Any

    def update(self, n: int) -> object: ...


class Scheduler(ABC):
    """The requests of a scheduler, and their results; subclasses decide which requests run when.

    engine: an ``Engine``, or the engines in other processes (``cluster.replicas.Replicas``).
    requests: the requests that have not ended, by id.
    finished: each result, until :meth:`take_result`.
    n_tokens: number of tokens generated so far.
    n_spared: total number of ``max_tokens`` that ended requests have not used.
    """

    def __init__(self, engine: Any) -> None:
        engine.check_owner(self)
        self.engine = engine
        self.requests: dict[int, Sequence] = {}
        self.finished: dict[int, RequestOutput] = {}
        self.n_tokens = self.n_spared = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def add_requests(
        self,
        prompts: list[list[int]],
        params: SamplingParams | list[SamplingParams],
        firsts: list[int] | None = None,
    ) -> list[int]:
        """Queue all prompts and return their ids; if any prompt is invalid, queue none.

        prompts: token ids.
        params: one for all prompts, or a list of one per prompt.
        firsts: for each prompt, the index of the first equal one, whose prefill it shares; None if none does.

        Raises ``PromptError`` or ``SamplingError``.
        """
        check_prompts(prompts)
        sequences = each_made(self.engine.make_sequence, prompts, params)
        for sequence, first in zip(sequences, firsts or [], strict=False):
            sequence.share_prefill(sequences[first])
        for sequence in sorted(sequences, key=lambda one: one.parent is not None):  # siblings last
            self.submit(sequence)
        return [sequence.request_id for sequence in sequences]

    def submit(self, sequence: Sequence) -> int:
        """Queue a sequence made by this engine, and return its request id. :meth:`step` updates it."""
        sequence.metrics.arrival = perf_counter()
        self._queue(sequence)
        self.requests[sequence.request_id] = sequence
        return sequence.request_id

    def cancel(self, request_id: int) -> bool:
        """End a request as "cancelled"; return False if it had already ended.

        Raises ``RoseError`` for an unknown id.
        """
        request = self.requests.get(request_id)
        if request is None:
            if request_id not in self.finished:
                self._raise_unknown(request_id)
            return False
        request.cancel()
        self._withdraw(request)
        return True

    def take_result(self, request_id: int) -> RequestOutput:
        """Return and forget the result of an ended request; raise ``RoseError`` if there is none."""
        if request_id in self.requests:
            raise RoseError(f"request {request_id} has not ended yet")
        if request_id not in self.finished:
            self._raise_unknown(request_id)
        return self.finished.pop(request_id)

    def _raise_unknown(self, request_id: int) -> None:
        raise RoseError(
            f"request {describe(request_id)} is unknown: it was never added, or its result was taken"
        )

    def _store_result(self, sequence: Sequence) -> None:
        del self.requests[sequence.request_id]
        self.finished[sequence.request_id] = RequestOutput.of(sequence, self.engine.tokenizer)
        self.n_spared += sequence.max_length - len(sequence.tokens)

    @abstractmethod
    def step(self) -> list[Sequence]:
        """Advance the requests; return those that received tokens or ended, each once."""

    @abstractmethod
    def cancel_all(self) -> None:
        """Cancel all requests."""

    @abstractmethod
    def _queue(self, sequence: Sequence) -> None:
        """Queue a sequence, which joins ``requests`` afterwards."""

    @abstractmethod
    def _withdraw(self, request: Sequence) -> None:
        """Stop a request that was cancelled, and store its result."""


def run_all(
    scheduler: Scheduler,
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams],
    progress: Progress | None = None,
    firsts: list[int] | None = None,
) -> list[RequestOutput]:
    """Run all prompts and return their results in order, as ``OfflineScheduler.run`` does."""
    with frozen_heap(), scheduler.engine.selected(), held_interrupt() as let_interrupt_through:
        ids = scheduler.add_requests(prompts, params, firsts)
        try:
            while scheduler.has_unfinished:
                n_tokens, n_spared = scheduler.n_tokens, scheduler.n_spared
                scheduler.step()
                let_interrupt_through()
                if progress is not None:
                    progress.total -= scheduler.n_spared - n_spared
                    progress.update(scheduler.n_tokens - n_tokens)
        except BaseException:
            scheduler.cancel_all()
            for request_id in ids:
                scheduler.finished.pop(request_id, None)
            raise
        return [scheduler.take_result(request_id) for request_id in ids]


class ActiveView:
    """The sequences of a step whose requests have not ended, prepared for recording their new tokens.

    step_sequences: the step's list of sequences, usually the same object step after step.
    sequences: the sequences of the step whose requests have not ended.
    note_time: for each of ``sequences``, a function that records the time of a token.
    followed: the members of ``sequences`` whose text is decoded token by token, because of stop strings.
    """

    __slots__ = ("followed", "step_sequences", "note_time", "sequences")

    def __init__(self, step_sequences: list[Sequence], requests: dict[int, Sequence]) -> None:
        self.step_sequences = step_sequences
        self.sequences = [s for s in step_sequences if s.request_id in requests]
        self.note_time = [s.metrics.token_times.append for s in self.sequences]
        self.followed = [s for s in self.sequences if s.text is not None]


class OnlineScheduler(Scheduler):
    """A scheduler with continuous batching: requests join at any time and leave as soon as they end.

    If the engine's steps run ahead of the host, the host admits requests, decodes text and stores results
    while the steps run. When the KV cache runs out of blocks, cached prefixes are evicted first. Then the
    youngest request is preempted: its blocks are freed, it moves to the head of the queue, and its tokens are
    recomputed later. In fp32 a preempted request generates the same tokens; in 16 bits, near-ties may resolve
    differently, unless the engine is deterministic.

    A request whose logits allow no choice of a token ends as "failed", without affecting other requests. If
    the engine raises in :meth:`step`, all active requests free their blocks and end as "failed", and the
    error propagates to the caller; waiting requests keep waiting. The scheduler is not thread-safe, and must
    be the only user of its engine while it has active requests.

    preemptions: number of preemptions so far.
    prefill_time_s, decode_time_s: seconds taken by all prefills and decode steps.
    decode_steps, decode_tokens: number of decode steps and of the tokens that they generated.
    """

    def __init__(self, engine: Engine, config: SchedulerConfig | None = None) -> None:
        super().__init__(engine)
        self.engine: Engine = engine
        self.config = config_or_default(config)
        self.max_batch_size = batch_size_of(self.config, engine.max_batch_size)
        self.decode_time_s = self.prefill_time_s = 0.0
        self.decode_tokens = self.decode_steps = self.preemptions = 0
        self._waiting = WaitingQueue(self.config)
        self._prefilling: list[Sequence] = []  # admitted, prefill not fully begun; at most one after a step
        self._active: list[Sequence] = []  # decoding; replaced, never mutated
        self._view: ActiveView | None = None
        self._stepped: list[list[Sequence]] = []  # per step, sequences with a token or failed

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def n_active(self) -> int:
        return len(self._active) + len(self._prefilling)

    def add_request(self, prompt_ids: list[int], params: SamplingParams) -> int:
        """Queue one request and return its id; raise the errors of :meth:`add_requests`."""
        return self.add_requests([prompt_ids], params)[0]

    def add_requests(
        self,
        prompts: list[list[int]],
        params: SamplingParams | list[SamplingParams],
        firsts: list[int] | None = None,
    ) -> list[int]:
        """Queue all prompts, as ``Scheduler`` does; raise ``OverloadError`` above ``max_in_flight``."""
        check_prompts(prompts)
        limit = self.config.max_in_flight
        if limit is not None and len(self.requests) + len(prompts) > limit:
            raise OverloadError(
                f"{len(prompts)} more requests exceed max_in_flight {limit}: {self.n_waiting} are waiting "
                f"and {self.n_active} active; try again later"
            )
        return super().add_requests(prompts, params, firsts)

    def submit(self, sequence: Sequence) -> int:
        self.engine.check_owner(self)
        return super().submit(sequence)

    def _queue(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def step(self) -> list[Sequence]:
        """Run one iteration: begin a decode step, begin a prefill, and collect the steps that have ended.

        Returns the sequences that received tokens or failed, each once, including those that ended.
        """
        run_ahead, self._stepped = self.engine.step.run_ahead, []
        try:
            n_begun = self._decode(self._schedule_decode())
            self._postprocess(run_ahead)
            n_prefilled = self._prefill(*self._schedule_prefill())
            n_begun += n_prefilled
            if n_prefilled or not (n_begun and self._stepped):
                self._postprocess(run_ahead if n_begun else 0)
        except BaseException as error:
            self._fail_active(error)
            raise
        stepped = self._stepped
        return stepped[0] if len(stepped) == 1 else list(dict.fromkeys(chain.from_iterable(stepped)))

    def _withdraw(self, request: Sequence) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
            self._store_result(request)
        else:
            self._finish([request])

    def cancel_all(self) -> None:
        """Cancel all waiting and active requests."""
        waiting, active = list(self._waiting), self._active + self._prefilling
        self._waiting.clear()
        for sequence in waiting + active:
            sequence.cancel()
        for sequence in waiting:
            self._store_result(sequence)
        self._finish(active)

    def record_step(self, done: Done, n_tokens: int) -> None:
        """Add a finished step, which generated ``n_tokens`` tokens, to the statistics.

        A decode step whose sequences had all ended before it does not count. Subclasses may override this
        method to keep more statistics.
        """
        self.n_tokens += n_tokens
        if done.kind == "prefill":
            self.prefill_time_s += done.seconds
        elif n_tokens:
            self.decode_time_s += done.seconds
            self.decode_tokens += n_tokens
            self.decode_steps += 1

    def _schedule_decode(self) -> list[Sequence]:
        """Return the sequences to decode, after preempting the youngest ones if there are too few blocks."""
        budget = self.engine.budget
        if self._active and not budget.ensure_decode(self._active):
            self._postprocess(0)  # sequences that end in the begun steps free their blocks
            needs = dict(zip(self._active, budget.blocks_to_decode(self._active), strict=True))
            self._preempt_for(needs)
        return self._active

    def _decode(self, sequences: list[Sequence]) -> int:
        """Begin a decode step; return the number of rows that it advances."""
        return self.engine.begin_decode(sequences) if sequences else 0

    def _schedule_prefill(self) -> tuple[list[Sequence], list[int]]:
        """Return the sequences to prefill and how many tokens of each; a partly prefilled one is first."""
        self._prefilling += self._admit()
        if not self._prefilling:
            return [], []
        self.engine.match_prefixes(self._prefilling)
        budget = self.engine.budget
        sequences, counts = self._next_chunks()
        if not budget.make_room_to_prefill(sequences, counts):
            self._postprocess(0)
            needs = {s: budget.blocks_to_prefill([s], [n]) for s, n in zip(sequences, counts, strict=True)}
            self._preempt_for(needs)
            sequences, counts = self._next_chunks()
        return sequences, counts

    def _prefill(self, sequences: list[Sequence], counts: list[int]) -> int:
        """Begin prefilling; return the number of sequences."""
        if sequences:
            whole = self.engine.begin_prefill(sequences, counts)
            self._active = self._active + whole
            self._prefilling = self._prefilling[len(whole) :]
        return len(sequences)

    def _preempt_for(self, needs: dict[Sequence, int]) -> None:
        """Preempt the youngest sequences until the rest have the blocks they need; never preempt the oldest.

        needs: maps a sequence to the number of blocks it needs.
        """
        needed = sum(needs.values())
        running = sorted(self._active + self._prefilling, key=lambda sequence: sequence.request_id)
        while len(running) > 1 and not self.engine.budget.make_room(needed):
            youngest = running.pop()
            needed -= needs.get(youngest, 0)
            self._preempt(youngest)

    def _preempt(self, sequence: Sequence) -> None:
        self._free([sequence])
        sequence.metrics.preemptions += 1
        self.preemptions += 1
        self._waiting.appendleft(sequence)

    def _next_chunks(self) -> tuple[list[Sequence], list[int]]:
        """Return the sequences to prefill now, and how many tokens of each; only the last one may be cut.

        If the engine cuts prompts only at multiples of an alignment, the first chunk may exceed the budget,
        by less than one such multiple.
        """
        sequences: list[Sequence] = []
        counts: list[int] = []
        budget = self._prefill_budget
        aligned = self.engine.prefill_alignment
        for sequence in self._prefilling:
            rest = sequence.n_to_prefill
            count = rest if rest <= budget else budget - budget % aligned
            if not count and not sequences:
                count = min(rest, aligned)
            if not count:
                break
            sequences.append(sequence)
            counts.append(count)
            budget -= count
        return sequences, counts

    @property
    def _prefill_budget(self) -> int:
        """The number of prompt tokens that this iteration may prefill."""
        whole, chunk = self.config.prefill_token_budget, self.config.prefill_chunk
        return min(whole, chunk) if self._active and chunk is not None else whole

    def _postprocess(self, leave: int) -> None:
        """Record the steps that have ended, and finish the requests that ended in them.

        leave: number of steps that may stay unfinished; the host waits for all earlier ones.
        """
        for done in self.engine.step.collect(leave):
            view = self._view
            if view is None or view.step_sequences is not done.sequences:
                view = self._view = ActiveView(done.sequences, self.requests)
            if done.counts is None:
                self.record_step(done, len(view.sequences))
                now = perf_counter()
                for note_time in view.note_time:
                    note_time(now)
                for sequence in view.followed:
                    sequence.follow_text()
            else:
                self._record_several(done, done.counts)
            failed = [s for s in done.failed if s.request_id in self.requests and s not in view.sequences]
            ended = [s for s in view.sequences if s.finish_reason is not None] + failed
            if ended:
                self._finish(ended)
            self._stepped.append(view.sequences + failed if failed else view.sequences)

    def _record_several(self, done: Done, counts: list[int]) -> None:
        """Record a step that may have given a sequence several tokens before it failed."""
        now, n_tokens = perf_counter(), 0
        for sequence, count in zip(done.sequences, counts, strict=True):
            if sequence.request_id in self.requests:
                kept = count if sequence.text is None else sequence.follow_text(count)
                sequence.metrics.token_times += [now] * kept
                n_tokens += kept
        self.record_step(done, n_tokens)

    def _admit(self) -> list[Sequence]:
        """Remove and return the waiting requests that start now."""
        if not self._waiting:
            return []
        n_begun = len(self._prefilling)
        places = min(self.max_batch_size - self.n_active, self.config.prefill_max_batch_size - n_begun)
        tokens = self._prefill_budget - sum(s.n_to_prefill for s in self._prefilling)
        if places < 1 or tokens < 1:
            return []
        room = Room(self.engine.budget, self.n_active, self._prefilling, self.engine.prefix_cache)
        return self._waiting.admit(places, tokens, room)

    def _fail_active(self, error: BaseException) -> None:
        active = self._active + self._prefilling
        for sequence in active:
            sequence.fail(describe(error))
        self._finish(active)

    def _finish(self, ended: list[Sequence]) -> None:
        """Free active sequences that have a finish reason, and store their results."""
        self._free(ended)
        for sequence in ended:
            self._store_result(sequence)

    def _free(self, leaving: list[Sequence]) -> None:
        """Remove sequences from the active ones, and free their blocks."""
        gone = set(leaving)
        self._active = [sequence for sequence in self._active if sequence not in gone]
        self._prefilling = [sequence for sequence in self._prefilling if sequence not in gone]
        self._view = None
        for sequence in leaving:
            self.engine.release(sequence)
            self.engine.budget.unreserve(sequence)


class OfflineScheduler(OnlineScheduler):
    """A scheduler for requests that are all known in advance and run to completion."""

    def run(
        self,
        prompts: list[list[int]],
        params: SamplingParams | list[SamplingParams],
        progress: Progress | None = None,
        firsts: list[int] | None = None,
    ) -> list[RequestOutput]:
        """Run all prompts and return their results in order; the engine is reserved until then.

        prompts: token ids.
        params: one for all prompts, or a list of one per prompt.
        progress: for example a tqdm bar; it is updated as tokens arrive, and its total is reduced by the
            ``max_tokens`` that ended requests have not used.
        firsts: as in :meth:`add_requests`.

        If anything raises, all requests are cancelled and forgotten, and their blocks are freed. Ctrl-C takes
        effect at the end of a step.
        """
        self.engine.own(self, "LLM.generate")
        try:
            return run_all(self, prompts, params, progress, firsts)
        finally:
            self.engine.disown(self)
