"""One engine serving arrivals, simulated step by step from the times that its steps take."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence as SequenceOf
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np

from rosellm.roseinfer.bench.arrivals import Arrival
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.request import RequestMetrics
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig

TIMED_STEPS = 5


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step: a plane over rows and cached tokens for decodes, a line over tokens for prefills."""

    decode_s: tuple[float, float, float]
    prefill_s: tuple[float, float]

    @classmethod
    def fit(
        cls, decodes: Iterable[tuple[int, int, float]], prefills: Iterable[tuple[int, float]]
    ) -> StepTimes:
        """Least squares of the relative errors.

        decodes: rows, cached tokens of one row, seconds; prefills: tokens, seconds.
        """
        decode = [(1.0, rows, rows * context, seconds) for rows, context, seconds in decodes]
        prefill = [(1.0, tokens, seconds) for tokens, seconds in prefills]
        return cls(_coefficients(decode), _coefficients(prefill))

    def decode(self, rows: int, cached: int) -> float:
        """cached: tokens of all rows together."""
        a, b, c = self.decode_s
        return max(0.0, a + b * rows + c * cached)

    def prefill(self, tokens: int) -> float:
        a, b = self.prefill_s
        return max(0.0, a + b * tokens)


def measure_step_times(
    engine: Engine, batches: SequenceOf[int], contexts: SequenceOf[int], prompts: SequenceOf[int]
) -> StepTimes:
    """Time an idle engine's steps: decodes of every batch and context, prefills of single prompts."""
    prefills = [(n, _prefill_seconds(engine, n)) for n in prompts]
    decodes = [(rows, n, _decode_seconds(engine, rows, n)) for rows in batches for n in contexts]
    return StepTimes.fit(decodes, prefills)


@dataclass(slots=True)
class _Request:
    metrics: RequestMetrics
    prompt: int
    new: int
    cached: int = 0


def simulate(
    arrivals: Iterable[Arrival], times: StepTimes, config: SchedulerConfig, max_batch_size: int
) -> list[RequestMetrics]:
    """When each request's tokens come, in order of arrival; seconds from the first possible arrival, 0.

    The scheduler's iteration: all active requests decode, then prompts are prefilled first come, first
    served, within the budgets of ``config``. KV blocks never run out, and the host takes no time.
    """
    requests = [
        _Request(RequestMetrics(a.seconds), a.prompt_tokens, a.new_tokens)
        for a in sorted(arrivals, key=lambda arrival: arrival.seconds)
    ]
    coming, waiting, active, now = deque(requests), deque[_Request](), list[_Request](), 0.0
    while coming or waiting or active:
        if not waiting and not active:
            now = max(now, coming[0].metrics.arrival)
        while coming and coming[0].metrics.arrival <= now:
            waiting.append(coming.popleft())
        budget = config.prefill_token_budget
        if active:
            budget = min(budget, config.prefill_chunk or budget)
            now += times.decode(len(active), sum(one.cached for one in active))
            active = [one for one in active if _advance(one, now)]
        places = min(max_batch_size - len(active), config.prefill_max_batch_size)
        begun, tokens = _prefill(waiting, places, budget)
        now += times.prefill(tokens) if tokens else 0.0
        active += [one for one in begun if _advance(one, now, n_cached=0)]
    return [one.metrics for one in requests]


def _advance(request: _Request, now: float, n_cached: int = 1) -> bool:
    """One more token; whether it has more to come."""
    request.cached += n_cached
    request.metrics.token_times.append(now)
    return len(request.metrics.token_times) < request.new


def _prefill(waiting: deque[_Request], places: int, budget: int) -> tuple[list[_Request], int]:
    """Who is fully cached after a prefill of at most ``budget`` tokens, and the tokens it takes."""
    begun: list[_Request] = []
    left = budget
    while waiting and left and len(begun) < places:
        first = waiting[0]
        count = min(left, first.prompt - first.cached)
        first.cached += count
        left -= count
        if first.cached == first.prompt:
            begun.append(waiting.popleft())
    return begun, budget - left


def _coefficients(rows: SequenceOf[tuple[float, ...]]) -> tuple:
    """Of the last column over the others, each row weighted by its inverse."""
    table = np.array(rows)
    scaled = table[:, :-1] / table[:, -1:]
    return tuple(np.linalg.lstsq(scaled, np.ones(len(table)), rcond=None)[0].tolist())


def _prefill_seconds(engine: Engine, tokens: int) -> float:
    seconds = []
    for _ in range(TIMED_STEPS):
        sequence = engine.make_sequence([1] * tokens, _endless(1))
        start = perf_counter()
        engine.prefill([sequence])
        seconds.append(perf_counter() - start)
        engine.release(sequence)
    return median(seconds)


def _decode_seconds(engine: Engine, rows: int, context: int) -> float:
    sequences = [engine.make_sequence([1] * context, _endless(TIMED_STEPS + 2)) for _ in range(rows)]
    engine.prefill(sequences)
    seconds = []
    for _ in range(TIMED_STEPS + 1):
        start = perf_counter()
        engine.decode(sequences)
        seconds.append(perf_counter() - start)
    for sequence in sequences:
        engine.release(sequence)
    return median(seconds[1:])


def _endless(n: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
