"""A replica: an engine in its own process, driven by calls from another process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from rosellm.frozen_heap import frozen_heap
from rosellm.roseinfer.cache.limits import Limits
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.request import Likely, Sequence
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.scheduler import OnlineScheduler
from rosellm.roseinfer.tensor_parallel import load_engine

SLICE_S, STREAMING_SLICE_S = 0.05, 0.01  # seconds between reports: for LLM.generate, for streaming


@dataclass(frozen=True, slots=True)
class Order:
    """A request that the driver sends to a replica.

    request_id: the driver's id.
    prompt: token ids.
    known: the output tokens that another replica has already generated.
    logprobs: the logprobs of ``known``, one item per token; None unless requested.
    """

    request_id: int
    prompt: list[int]
    params: SamplingParams
    known: list[int]
    logprobs: list[Likely] | None


@dataclass(frozen=True, slots=True)
class Facts:
    """The properties of a loaded replica that the driver needs.

    rung: name of the engine's rung; None for a custom recipe.
    max_batch_size: maximum number of sequences that run together.
    limits: limits on the tokens of a request.
    eos_token_ids: the model's end-of-sequence tokens.
    """

    rung: str | None
    max_batch_size: int
    limits: Limits
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gain:
    """What a request gained since the last report.

    tokens: new output tokens.
    times: when each token was generated, in seconds on the clock of ``Report.now``.
    logprobs: the logprobs of ``tokens``; None unless requested.
    finish_reason: None while the request runs.
    error: why the request failed, or None.
    preemptions: how often this replica has preempted the request, in total.
    num_cached_tokens: number of tokens of the prompt that this replica's prefix cache held.
    prompt_logprobs: the logprobs of the prompt, once the request has ended; None unless requested.
    """

    tokens: list[int]
    times: list[float]
    logprobs: list[Likely] | None
    finish_reason: str | None
    error: str | None
    preemptions: int
    num_cached_tokens: int
    prompt_logprobs: list[Likely | None] | None


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one ``Replica.advance``.

    now: when the call returned, in seconds of the replica's ``time.perf_counter``.
    gains: by request id, for requests with new tokens and requests that have ended.
    """

    now: float
    gains: dict[int, Gain]


@dataclass(slots=True)
class _Running:
    """A request in the replica's scheduler.

    n_reported: number of the sequence's tokens, from the first, that the driver knows.
    """

    sequence: Sequence
    n_reported: int

    def gain(self) -> Gain | None:
        """Return the request's gain since the last report; None without new tokens, unless it has ended."""
        sequence, known = self.sequence, self.n_reported
        tokens, times = sequence.tokens[known:], sequence.metrics.token_times
        if not tokens and not sequence.is_finished:
            return None
        self.n_reported += len(tokens)
        logprobs = None if sequence.logprobs is None else sequence.logprobs[known - sequence.n_prompt :]
        ending = sequence.finish_reason, sequence.error
        prompt = sequence.prompt_logprobs if sequence.is_finished else None
        cached = sequence.metrics.preemptions, sequence.num_cached_prompt_tokens
        return Gain(tokens, times[len(times) - len(tokens) :], logprobs, *ending, *cached, prompt)


class Replica:
    """The actor class; Ray runs its calls one at a time, in the order they were made.

    model, n_ranks, options: the arguments of ``tensor_parallel.load_engine``.

    The engine is loaded by :meth:`load`, since Ray would turn an exception of the constructor into text.
    """

    def __init__(self, model: str, n_ranks: int, options: dict[str, Any]) -> None:
        self._model, self._n_ranks, self._options = model, n_ranks, options
        self._engine: Engine | None = None
        self._running: dict[int, _Running] = {}  # by the driver's request id

    def load(self, config: SchedulerConfig) -> Facts:
        """Load the engine and call :meth:`take` with it. Raises what ``load_engine`` raises."""
        engine = load_engine(self._model, tensor_parallel_size=self._n_ranks, **self._options)
        return self.take(config, engine)

    def take(self, config: SchedulerConfig, engine: Engine) -> Facts:
        """Serve with ``engine``, within the limits of ``config``; return the properties of the engine."""
        self._engine = engine
        self.begin(config)
        return Facts(engine.rung, engine.max_batch_size, engine.limits, engine.config.eos_token_ids)

    def begin(self, config: SchedulerConfig) -> None:
        """Cancel all requests, and serve later requests within the limits of ``config``."""
        if self._engine is None:  # loading failed; the driver gets that error from ``load``
            return
        for request_id in list(self._running):
            self._cancel(request_id)
        self._scheduler = OnlineScheduler(self._engine, replace(config, max_in_flight=None))

    def advance(self, orders: list[Order], cancelled: list[int], seconds: float) -> Report:
        """Run the engine for ``seconds``, or until no request is left; return what the requests gained.

        orders: requests to begin first; those with equal prompts share their prefill.
        cancelled: ids of requests to cancel first; unknown ids are ignored.
        """
        scheduler = self._scheduler
        firsts: dict[tuple[int, ...], Sequence] = {}
        for order in orders:
            sequence = scheduler.engine.make_sequence(order.prompt, order.params)
            sequence.share_prefill(firsts.setdefault(tuple(order.prompt), sequence))
            sequence.resume(order.known, order.logprobs)
            scheduler.submit(sequence)
            self._running[order.request_id] = _Running(sequence, len(sequence.tokens))
        for request_id in cancelled:
            self._cancel(request_id)
        with frozen_heap():
            until = perf_counter() + seconds
            while scheduler.has_unfinished and perf_counter() < until:
                scheduler.step()
        gains = {i: gain for i, running in self._running.items() if (gain := running.gain()) is not None}
        for request_id, gain in gains.items():
            if gain.finish_reason is not None:
                scheduler.take_result(self._running.pop(request_id).sequence.request_id)
        return Report(perf_counter(), gains)

    def _cancel(self, request_id: int) -> None:
        running = self._running.pop(request_id, None)
        if running is not None:  # the request may have ended before the driver knew
            self._scheduler.cancel(running.sequence.request_id)
            self._scheduler.take_result(running.sequence.request_id)
