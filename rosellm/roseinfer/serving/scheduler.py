"""Schedulers: who is prefilled and who decodes in each iteration (continuous batching, Yu et al. 2022)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Literal, Protocol

from rosellm.errors import OverloadError, PromptError, RoseError, SamplingError, told
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.outputs import Done, IncrementalText, RequestMetrics, RequestOutput
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import Request, Room, WaitingQueue

POLICIES = ("fifo", "pack")
STEPS_ASSURED = 16


@dataclass(frozen=True)
class SchedulerConfig:
    """What one iteration may do.

    max_batch_size: sequences that are active together; None takes the engine's. prefill_max_batch_size and
    prefill_token_budget: prompts and prompt tokens prefilled in one iteration; the last prompt is cut where
    the budget ends, and goes on before others in the next iteration. admission_policy: "fifo" admits strictly
    in order; "pack" admits the shortest prompts among the first ``pack_lookahead`` waiting, and every
    ``fifo_every``-th round is fifo, so that nobody starves. max_in_flight: waiting and active requests
    together; None sets no limit.
    """

    max_batch_size: int | None = None
    prefill_max_batch_size: int = 256
    prefill_token_budget: int = 16384
    admission_policy: Literal["fifo", "pack"] = "fifo"
    pack_lookahead: int = 64
    fifo_every: int = 8
    max_in_flight: int | None = None

    def __post_init__(self) -> None:
        if self.admission_policy not in POLICIES:
            raise RoseError(f"admission_policy is {self.admission_policy!r}; use {' or '.join(POLICIES)}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "admission_policy" or (value is None and field.default is None):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RoseError(f"{field.name} is {value!r}; it must be a whole number, 1 or more")


class _Listeners:
    """Who of a step's sequences is still in flight, and what is done with each token.

    listed: the step's list of sequences, which mostly is the same list step after step.
    """

    __slots__ = ("listed", "note_time", "sequences", "texts")

    def __init__(self, listed: list[Sequence], requests: dict[int, Request]) -> None:
        heard = [requests[s.request_id] for s in listed if s.request_id in requests]
        self.listed = listed
        self.sequences = [request.sequence for request in heard]
        self.note_time = [request.metrics.token_times.append for request in heard]
        self.texts = [(request.sequence, request.text) for request in heard if request.text is not None]


class OnlineScheduler:
    """Continuous batching: requests may be added at any time and leave as soon as they end.

    Where the engine's steps run ahead of the host, it admits, follows texts and keeps results meanwhile.
    Where the KV cache runs dry, the prefix cache gives up its blocks first; then the youngest request is
    preempted (``preemptions`` counts them): it gives up its blocks, waits before all others, keeps its tokens
    and has their keys and values computed again. In 16 bits near-ties among its next tokens may then fall
    otherwise, unless the engine is ``deterministic``. If the engine raises in :meth:`step`, all active
    sequences give up their blocks and end as "failed", and the error goes on to the caller; waiting requests
    keep waiting. ``finished`` keeps each result until :meth:`take_result`. Not thread-safe, and the only user
    of its engine while it has active sequences.
    """

    def __init__(self, engine: Engine, config: SchedulerConfig | None = None) -> None:
        self.engine, self.config = engine, config or SchedulerConfig()
        self.max_batch_size = self.config.max_batch_size or engine.max_batch_size
        if self.max_batch_size > engine.max_batch_size:
            raise RoseError(
                f"max_batch_size is {self.max_batch_size}; the engine decodes at most "
                f"{engine.max_batch_size} sequences together"
            )
        self.finished: dict[int, RequestOutput] = {}
        self.decode_time_s = self.prefill_time_s = 0.0
        self.decode_tokens = self.decode_steps = self.preemptions = 0
        self._requests: dict[int, Request] = {}
        self._waiting = WaitingQueue(self.config)
        self._prefilling: list[Request] = []  # admitted, and not all is begun; after a step at most one
        self._active: list[Sequence] = []  # those that decode; replaced, never changed in place
        self._heard: _Listeners | None = None
        self._assured: list[Sequence] | None = None  # they have blocks for so many steps more
        self._assured_steps = self._assured_need = 0
        self._unreserved = engine.num_kv_blocks  # were all active requests to grow to their full length

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def requests(self) -> Mapping[int, Request]:
        """Those that have not ended, by id, the oldest first."""
        return self._requests

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def n_active(self) -> int:
        return len(self._active) + len(self._prefilling)

    def add_request(self, prompt_ids: list[int], params: SamplingParams) -> int:
        """Queue one request and return its id.

        Raises ``PromptError``, ``SamplingError`` or ``OverloadError``, and nothing is queued.
        """
        self._check_room(1)
        return self.submit(self._make_sequence(prompt_ids, params))

    def add_requests(
        self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
    ) -> list[int]:
        """Queue all of them, or none: every prompt is checked first. ``params``: one for all, or one each."""
        if not isinstance(prompts, (list, tuple)):
            raise PromptError(f"the prompts are {told(prompts)}; give a list of lists of token ids")
        self._check_room(len(prompts))
        sequences = []
        for index, (prompt, own) in enumerate(zip(prompts, one_each(params, len(prompts)), strict=True)):
            try:
                sequences.append(self._make_sequence(prompt, own))
            except PromptError as error:
                raise PromptError(f"prompt {index}: {error}") from error
        return [self.submit(sequence) for sequence in sequences]

    def submit(self, sequence: Sequence, text: IncrementalText | None = None) -> int:
        """Queue a sequence made by this engine; ``text``, if given, is kept up to date with its tokens."""
        if text is None and sequence.params.stop:
            text = IncrementalText(self.engine.tokenizer, sequence.params.stop)
        metrics = RequestMetrics(arrival=perf_counter())
        request = Request(sequence, metrics, text, self.engine.blocks_needed(sequence))
        self._requests[sequence.request_id] = request
        self._waiting.append(request)
        return sequence.request_id

    def step(self) -> list[Sequence]:
        """One iteration: decode, then prefill a prompt that was cut and those admitted; take what has ended.

        Returns the sequences that got tokens, each once, those that ended included.
        """
        run_ahead = self.engine.run_ahead
        try:
            got = self._make_room_to_decode()
            begun = self._begin_decode()
            got += self._collect(run_ahead)
            prefilled, ended = self._begin_prefill()
            got += ended + self._collect(run_ahead if begun + prefilled else 0)
        except BaseException:
            self._end_active("failed")
            raise
        return got[0] if len(got) == 1 else list(dict.fromkeys(chain.from_iterable(got)))

    def cancel(self, request_id: int) -> bool:
        """End a waiting or active request as "cancelled", free its blocks; False if it has ended already."""
        request = self._requests.get(request_id)
        if request is None:
            if request_id not in self.finished:
                self._raise_unknown(request_id)
            return False
        request.sequence.finish_reason = "cancelled"
        if self._waiting.remove(request):
            self._store_result(request)
        else:
            self._retire([request.sequence])
        return True

    def cancel_all(self) -> None:
        """Cancel whatever is waiting or active."""
        for request in self._waiting.clear():
            request.sequence.finish_reason = "cancelled"
            self._store_result(request)
        self._end_active("cancelled")

    def record_step(self, done: Done, n_tokens: int) -> None:
        """Add a step that has ended to the figures; for subclasses that keep more of them.

        A decode step all of whose sequences had ended before does not count.
        """
        if done.kind == "prefill":
            self.prefill_time_s += done.seconds
        elif n_tokens:
            self.decode_time_s += done.seconds
            self.decode_tokens += n_tokens
            self.decode_steps += 1

    def take_result(self, request_id: int) -> RequestOutput:
        """The result of a request that has ended, which is then forgotten."""
        if request_id in self._requests:
            raise RoseError(f"request {request_id} has not ended yet")
        if request_id not in self.finished:
            self._raise_unknown(request_id)
        return self.finished.pop(request_id)

    def _make_sequence(self, prompt_ids: list[int], params: SamplingParams) -> Sequence:
        sequence = self.engine.make_sequence(prompt_ids, params)
        if params.stop and self.engine.tokenizer is None:
            raise SamplingError("stop strings need a tokenizer, and this engine has none")
        return sequence

    def _check_room(self, n_new: int) -> None:
        limit = self.config.max_in_flight
        if limit is not None and len(self._requests) + n_new > limit:
            raise OverloadError(
                f"{n_new} more requests exceed max_in_flight {limit}: {self.n_waiting} are waiting and "
                f"{self.n_active} active; try again later"
            )

    def _raise_unknown(self, request_id: int) -> None:
        raise RoseError(f"request {request_id!r} is unknown: it was never added, or its result was taken")

    def _begin_decode(self) -> int:
        return self.engine.begin_decode(self._active) if self._active else 0

    def _begin_prefill(self) -> tuple[int, list[list[Sequence]]]:
        """The rest of a prompt that was cut, then waiting ones; how many, and who got tokens meanwhile."""
        self._prefilling += self._admit()
        if not self._prefilling:
            return 0, []
        self.engine.match_prefixes([request.sequence for request in self._prefilling])
        got = self._make_room_to_prefill()
        sequences, counts = self._next_chunks()
        if sequences:
            whole = self.engine.begin_prefill(sequences, counts)
            self._assured_steps = 0
            self._active = self._active + whole
            self._prefilling = self._prefilling[len(whole) :]
        return len(sequences), got

    def _make_room_to_decode(self) -> list[list[Sequence]]:
        """The pool has the blocks that the next step needs; who got a token meanwhile."""
        if not self._active or self._has_room_to_decode():
            return []
        got = self._collect(0)  # begun steps count, and who ends with them gives up its blocks
        needs = dict(zip(self._active, self.engine.blocks_to_decode(self._active), strict=True))
        self._preempt_until_there_are(needs)
        return got

    def _has_room_to_decode(self) -> bool:
        """Counted for some steps at once, since that takes a look at every sequence.

        What was counted then holds as long as so many blocks are free, whoever else takes some.
        """
        free = self.engine.free_blocks()
        if self._assured is self._active and self._assured_steps and free >= self._assured_need:
            self._assured_steps -= 1
            return True
        self._assured = self._active
        self._assured_need = sum(self.engine.blocks_to_decode(self._active, STEPS_ASSURED))
        self._assured_steps = STEPS_ASSURED - 1
        return free >= self._assured_need or self.engine.has_room_to_decode(self._active)

    def _make_room_to_prefill(self) -> list[list[Sequence]]:
        """The same for the next chunks of prompts."""
        sequences, counts = self._next_chunks()
        if self.engine.has_room_to_prefill(sequences, counts):
            return []
        got = self._collect(0)
        needs = {s: self.engine.blocks_to_prefill([s], [n]) for s, n in zip(sequences, counts, strict=True)}
        self._preempt_until_there_are(needs)
        return got

    def _preempt_until_there_are(self, needs: dict[Sequence, int]) -> None:
        """Preempt the youngest until there are the blocks that the others need; the oldest always stays."""
        needed = sum(needs.values())
        running = [self._requests[sequence.request_id] for sequence in self._active] + self._prefilling
        running.sort(key=lambda request: request.sequence.request_id)
        while len(running) > 1 and not self.engine.make_room(needed):
            youngest = running.pop()
            needed -= needs.get(youngest.sequence, 0)
            self._preempt(youngest)

    def _preempt(self, request: Request) -> None:
        self._leave([request.sequence])
        request.sequence.n_cached = 0
        request.metrics.preemptions += 1
        self.preemptions += 1
        self._waiting.put_back(request)

    def _next_chunks(self) -> tuple[list[Sequence], list[int]]:
        """Whose tokens are computed now, and how many of each; only the last one's may be cut.

        Where the engine cuts at multiples of some tokens, the first one may exceed the budget by that.
        """
        sequences, counts, budget = [], [], self.config.prefill_token_budget
        aligned = self.engine.prefill_alignment
        for sequence in (request.sequence for request in self._prefilling):
            rest = sequence.prefill_length - sequence.n_cached
            count = rest if rest <= budget else budget - budget % aligned
            if not count and not sequences:
                count = min(rest, aligned)
            if not count:
                break
            sequences.append(sequence)
            counts.append(count)
            budget -= count
        return sequences, counts

    def _collect(self, leave: int) -> list[list[Sequence]]:
        """Who got a token in each step that has ended."""
        return [self._take(done) for done in self.engine.collect(leave)]

    def _take(self, done: Done) -> list[Sequence]:
        """Record a step and its tokens' time, follow texts, retire who has ended; who got a token."""
        heard = self._heard
        if heard is None or heard.listed is not done.sequences:
            heard = self._heard = _Listeners(done.sequences, self._requests)
        self.record_step(done, len(heard.sequences))
        now = perf_counter()
        for note_time in heard.note_time:
            note_time(now)
        for sequence, text in heard.texts:
            if sequence.finish_reason == "stop":  # the end of sequence is no text
                continue
            text.push(sequence.tokens[-1])
            if text.stopped:
                sequence.finish_reason = "stop"
        ended = [sequence for sequence in heard.sequences if sequence.finish_reason is not None]
        if ended:
            self._retire(ended)
        return heard.sequences

    def _admit(self) -> list[Request]:
        """Waiting requests that start now, taken off the queue."""
        n_begun = len(self._prefilling)
        places = min(self.max_batch_size - self.n_active, self.config.prefill_max_batch_size - n_begun)
        rests = [r.sequence.prefill_length - r.sequence.n_cached for r in self._prefilling]
        tokens = self.config.prefill_token_budget - sum(rests)
        if not self._waiting or places < 1 or tokens < 1:
            return []
        chosen = self._waiting.admit(places, tokens, self._room())
        self._unreserved -= sum(request.blocks for request in chosen)
        return chosen

    def _room(self) -> Room:
        promised = self.engine.blocks_to_prefill([request.sequence for request in self._prefilling])
        free = self.engine.available_blocks() - promised
        return Room(free, self._unreserved, self.n_active, self.engine.block_size)

    def _end_active(self, finish_reason: str) -> None:
        active = self._active + [request.sequence for request in self._prefilling]
        for sequence in active:
            sequence.finish_reason = finish_reason
        self._retire(active)

    def _retire(self, ended: list[Sequence]) -> None:
        """Release active sequences, which have a finish reason now, and keep their results."""
        self._leave(ended)
        for sequence in ended:
            self._store_result(self._requests[sequence.request_id])

    def _leave(self, leaving: list[Sequence]) -> None:
        """Active sequences run no longer and give up their blocks."""
        gone = set(leaving)
        self._active = [sequence for sequence in self._active if sequence not in gone]
        self._prefilling = [request for request in self._prefilling if request.sequence not in gone]
        self._heard = None
        for sequence in leaving:
            self.engine.release(sequence)
            self._unreserved += self._requests[sequence.request_id].blocks

    def _store_result(self, request: Request) -> None:
        sequence = request.sequence
        del self._requests[sequence.request_id]
        decode = self._decoder(request)
        self.finished[sequence.request_id] = RequestOutput(
            request_id=sequence.request_id,
            prompt_token_ids=sequence.prompt,
            token_ids=sequence.output,
            finish_reason=sequence.finish_reason,
            metrics=request.metrics,
            decode=decode,
        )

    def _decoder(self, request: Request) -> Callable[[], str | None]:
        """What makes the text: nothing is decoded yet unless it was followed all along."""
        sequence, text = request.sequence, request.text
        if self.engine.tokenizer is None:
            return _no_text
        if text is None:
            return partial(self.engine.tokenizer.decode, _without_eos(sequence))
        if not text.stopped:
            text.finish()
            if text.stopped and sequence.finish_reason == "length":
                sequence.finish_reason = "stop"
        return lambda: text.text


class OfflineScheduler(OnlineScheduler):
    """All requests are known beforehand and run to completion."""

    def run(
        self,
        prompts: list[list[int]],
        params: SamplingParams | list[SamplingParams],
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Results in the order of ``prompts``. ``progress``, say a tqdm bar, hears of each one that ends.

        If anything raises, all requests are cancelled and forgotten, and their blocks are free again.
        """
        ids = self.add_requests(prompts, params)
        try:
            while self.has_unfinished:
                n_before = len(self.finished)
                self.step()
                if progress is not None:
                    progress.update(len(self.finished) - n_before)
        except BaseException:
            self.cancel_all()
            for request_id in ids:
                self.finished.pop(request_id, None)
            raise
        return [self.take_result(request_id) for request_id in ids]


class Progress(Protocol):
    """What of a tqdm bar is used."""

    def update(self, n: int) -> object: ...


def one_each(params: SamplingParams | list[SamplingParams], n_prompts: int) -> list[SamplingParams]:
    """Sampling parameters for every prompt, from one for all or one each."""
    if isinstance(params, SamplingParams):
        return [params] * n_prompts
    if not isinstance(params, (list, tuple)) or not all(isinstance(own, SamplingParams) for own in params):
        raise SamplingError(f"sampling parameters are {params!r}; give one SamplingParams, or a list of them")
    if len(params) != n_prompts:
        raise SamplingError(
            f"{len(params)} SamplingParams for {n_prompts} prompts; give one for all, or one each"
        )
    return list(params)


def _without_eos(sequence: Sequence) -> list[int]:
    """The output of a sequence that no stop string ended, its end-of-sequence token left out."""
    return sequence.output[:-1] if sequence.finish_reason == "stop" else sequence.output


def _no_text() -> None:
    return None
