"""Schedulers: who is prefilled and who decodes in each iteration (continuous batching, Yu et al. 2022)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Literal, Protocol

from rosellm.errors import OverloadError, PromptError, RoseError, SamplingError
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.outputs import IncrementalText, RequestMetrics, RequestOutput
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import SamplingParams

POLICIES = ("fifo", "pack")


@dataclass(frozen=True)
class SchedulerConfig:
    """What one iteration may do.

    max_batch_size: sequences that are active together; None takes the engine's. prefill_max_batch_size and
    prefill_token_budget: prompts and prompt tokens prefilled in one iteration; a prompt longer than the
    budget runs alone. admission_policy: "fifo" admits strictly in order; "pack" admits the shortest prompts
    among the first ``pack_lookahead`` waiting, and every ``fifo_every``-th round is fifo, so that nobody
    starves. max_in_flight: waiting and active requests together; None sets no limit.
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


@dataclass(slots=True, eq=False)
class _Request:
    """A request in flight, with the KV blocks a layer that it may come to hold."""

    sequence: Sequence
    metrics: RequestMetrics
    text: IncrementalText | None
    blocks: int


class OnlineScheduler:
    """Continuous batching: requests may be added at any time and leave as soon as they end.

    The KV blocks that a sequence may come to need are reserved at its admission, so one that runs is never
    short of them. If the engine raises in :meth:`step`, all active sequences give up their blocks and end as
    "failed", and the error goes on to the caller; waiting requests keep waiting. ``finished`` keeps each
    result until :meth:`take_result`. Not thread-safe, and the only user of its engine while it has active
    sequences.
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
        self.decode_tokens = self.decode_steps = 0
        self._requests: dict[int, _Request] = {}
        self._waiting: deque[_Request] = deque()
        self._active: list[Sequence] = []  # replaced, never changed in place
        self._token_times: list[list[float]] = []  # of the active sequences, in their order
        self._texts: list[_Request] = []  # active ones that are decoded to text as they go
        self._free_blocks = engine.num_kv_blocks
        self._packed_rounds = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def n_active(self) -> int:
        return len(self._active)

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
        request = _Request(sequence, metrics, text, self.engine.blocks_needed(sequence))
        self._requests[sequence.request_id] = request
        self._waiting.append(request)
        return sequence.request_id

    def step(self) -> list[Sequence]:
        """One iteration: decode all active sequences, then admit and prefill waiting ones.

        Returns the sequences that got a token, those that it finished included.
        """
        try:
            return self._decode() + self._prefill()
        except BaseException:
            self._end_active("failed")
            raise

    def cancel(self, request_id: int) -> bool:
        """End a waiting or active request as "cancelled", free its blocks; False if it has ended already."""
        request = self._requests.get(request_id)
        if request is None:
            if request_id not in self.finished:
                self._raise_unknown(request_id)
            return False
        request.sequence.finish_reason = "cancelled"
        if request in self._waiting:
            self._waiting.remove(request)
            self._store_result(request)
        else:
            self._retire()
        return True

    def cancel_all(self) -> None:
        """Cancel whatever is waiting or active."""
        while self._waiting:
            request = self._waiting.popleft()
            request.sequence.finish_reason = "cancelled"
            self._store_result(request)
        self._end_active("cancelled")

    def take_result(self, request_id: int) -> RequestOutput:
        """The result of a request that has ended, which is then forgotten."""
        if request_id in self._requests:
            raise RoseError(f"request {request_id} has not ended yet")
        if request_id not in self.finished:
            self._raise_unknown(request_id)
        return self.finished.pop(request_id)

    def _make_sequence(self, prompt_ids: list[int], params: SamplingParams) -> Sequence:
        if params.stop and self.engine.tokenizer is None:
            raise SamplingError("stop strings need a tokenizer, and this engine has none")
        return self.engine.make_sequence(prompt_ids, params)

    def _check_room(self, n_new: int) -> None:
        limit = self.config.max_in_flight
        if limit is not None and len(self._requests) + n_new > limit:
            raise OverloadError(
                f"{n_new} more requests exceed max_in_flight {limit}: {self.n_waiting} are waiting and "
                f"{self.n_active} active; try again later"
            )

    def _raise_unknown(self, request_id: int) -> None:
        raise RoseError(f"request {request_id!r} is unknown: it was never added, or its result was taken")

    def _decode(self) -> list[Sequence]:
        active = self._active
        if not active:
            return active
        start = perf_counter()
        self.engine.decode(active)
        now = perf_counter()
        self.decode_time_s += now - start
        self.decode_tokens += len(active)
        self.decode_steps += 1
        for times in self._token_times:
            times.append(now)
        for request in self._texts:
            _follow(request)
        self._retire()
        return active

    def _prefill(self) -> list[Sequence]:
        requests = self._admit()
        if not requests:
            return []
        sequences = [request.sequence for request in requests]
        self._active = self._active + sequences
        self._token_times += [request.metrics.token_times for request in requests]
        self._texts += [request for request in requests if request.text is not None]
        self._free_blocks -= sum(request.blocks for request in requests)
        start = perf_counter()
        self.engine.prefill(sequences)
        now = perf_counter()
        self.prefill_time_s += now - start
        for request in requests:
            request.metrics.token_times.append(now)
            if request.text is not None:
                _follow(request)
        self._retire()
        return sequences

    def _admit(self) -> list[_Request]:
        """Waiting requests that start now, taken off the queue."""
        places = min(self.max_batch_size - len(self._active), self.config.prefill_max_batch_size)
        if not self._waiting or places < 1:
            return []
        if self.config.admission_policy == "fifo":
            return self._admit_in_order(places)
        if self._packed_rounds < self.config.fifo_every - 1:
            chosen = self._admit_shortest(places)
            self._packed_rounds += bool(chosen)
            return chosen
        chosen = self._admit_in_order(places)
        if chosen:  # a forced round lasts until the head of the queue fits: nobody overtakes it any more
            self._packed_rounds = 0
        return chosen

    def _admit_in_order(self, places: int) -> list[_Request]:
        chosen = []
        tokens, blocks = self.config.prefill_token_budget, self._free_blocks
        for request in islice(self._waiting, places):
            tokens -= request.sequence.n_prompt
            blocks -= request.blocks
            if blocks < 0 or (tokens < 0 and chosen):
                break
            chosen.append(request)
        for _ in chosen:
            self._waiting.popleft()
        return chosen

    def _admit_shortest(self, places: int) -> list[_Request]:
        """First fit in order of prompt length, so that the token budget serves as many as it can."""
        n_looked_at = min(self.config.pack_lookahead, len(self._waiting))
        looked_at = [self._waiting.popleft() for _ in range(n_looked_at)]
        chosen: dict[int, _Request] = {}
        tokens, blocks = self.config.prefill_token_budget, self._free_blocks
        for request in sorted(looked_at, key=lambda r: r.sequence.n_prompt):
            n_prompt = request.sequence.n_prompt
            if len(chosen) == places or (n_prompt > tokens and chosen):
                break
            if request.blocks <= blocks:
                chosen[request.sequence.request_id] = request
                tokens -= n_prompt
                blocks -= request.blocks
        self._waiting.extendleft(r for r in reversed(looked_at) if r.sequence.request_id not in chosen)
        return list(chosen.values())

    def _end_active(self, finish_reason: str) -> None:
        for sequence in self._active:
            sequence.finish_reason = finish_reason
        self._retire()

    def _retire(self) -> None:
        """Release the active sequences that have ended, and keep their results."""
        ended = [sequence for sequence in self._active if sequence.finish_reason is not None]
        if not ended:
            return
        self._active = [sequence for sequence in self._active if sequence.finish_reason is None]
        for sequence in ended:
            request = self._requests[sequence.request_id]
            self.engine.release(sequence)
            self._free_blocks += request.blocks
            self._store_result(request)
        running = [self._requests[sequence.request_id] for sequence in self._active]
        self._token_times = [request.metrics.token_times for request in running]
        self._texts = [request for request in running if request.text is not None]

    def _store_result(self, request: _Request) -> None:
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

    def _decoder(self, request: _Request) -> Callable[[], str | None]:
        """What makes the text: nothing is decoded yet unless it was followed all along."""
        sequence, text = request.sequence, request.text
        if self.engine.tokenizer is None:
            return _no_text
        if text is None:
            return partial(self.engine.tokenizer.decode, _without_eos(sequence))
        if not text.stopped:
            text.finish(_without_eos(sequence))
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


def _follow(request: _Request) -> None:
    """Decode the newest token to text, unless it is the end of sequence; a stop string ends the sequence."""
    sequence, text = request.sequence, request.text
    if sequence.finish_reason == "stop":
        return
    text.push(sequence.last_token)
    if text.stopped:
        sequence.finish_reason = "stop"


def _without_eos(sequence: Sequence) -> list[int]:
    """The output of a sequence that no stop string ended, its end-of-sequence token left out."""
    return sequence.output[:-1] if sequence.finish_reason == "stop" else sequence.output


def _no_text() -> None:
    return None
