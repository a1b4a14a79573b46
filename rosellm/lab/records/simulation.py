"""One engine that streams to arriving requests, simulated step by step from the times that its steps take."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rosellm.lab.records.serving_times import StepTimes
from rosellm.roseinfer.bench.arrivals import Arrival, goodput, queue_over_time
from rosellm.roseinfer.bench.record import distribution
from rosellm.roseinfer.request import RequestMetrics
from rosellm.roseinfer.serving.admission import SchedulerConfig

PERCENTS = (50, 95, 99)


@dataclass(slots=True)
class _Request:
    """cached: tokens that begun steps leave in the cache; asked: that they give; given: by collected ones."""

    metrics: RequestMetrics
    prompt: int
    new: int
    cached: int = 0
    asked: int = 0
    given: int = 0


def simulate(
    arrivals: Iterable[Arrival], times: StepTimes, config: SchedulerConfig, max_batch_size: int
) -> list[RequestMetrics]:
    """When each request's tokens come, in order of arrival; seconds from the first possible arrival, 0.

    A streaming manager's rounds: those that run decode, then prompts are prefilled first come, first served,
    within the budgets of ``config``; tokens are delivered once the round's finished steps are collected. KV
    blocks never run out.
    """
    requests = [
        _Request(RequestMetrics(a.seconds), a.prompt_tokens, a.new_tokens)
        for a in sorted(arrivals, key=lambda arrival: arrival.seconds)
    ]
    server = Server(times, config, max_batch_size, deque(requests))
    while server.is_busy:
        server.round()
    return [one.metrics for one in requests]


def simulated_run(
    arrivals: Sequence[Arrival],
    times: StepTimes,
    max_batch_size: int,
    limits_s: tuple[float, float] = (math.inf, math.inf),
    config: SchedulerConfig | None = None,
) -> dict[str, Any]:
    """The figures of ``simulate``, called and defined as those of a live run of ``benchmark_streaming``.

    limits_s: goodput's, of TTFT and ITL.
    """
    made = simulate(arrivals, times, config or SchedulerConfig(), max_batch_size)
    seconds = max(one.token_times[-1] for one in made)
    n_tokens = sum(len(one.token_times) for one in made)
    return {
        "total_time_s": seconds,
        "total_throughput_tok_s": n_tokens / seconds,
        **distribution("ttft", [one.ttft for one in made], PERCENTS),
        **distribution("itl", [gap for one in made for gap in one.itl], PERCENTS),
        **goodput(made, [0.0] * len(made), seconds, *limits_s),
        **queue_over_time(made, 0.0, seconds),
    }


class Server:
    """A scheduler at the host's time ``now``, and the steps in flight: when each ends, and for whom."""

    def __init__(self, times: StepTimes, config: SchedulerConfig, most: int, coming: deque[_Request]) -> None:
        self.times, self.config, self.most, self.coming = times, config, most, coming
        self.waiting: deque[_Request] = deque()
        self.active: list[_Request] = []
        self.in_flight: deque[tuple[float, list[_Request]]] = deque()
        self.now = self.free = 0.0  # free: when the device has done all that was begun

    @property
    def is_busy(self) -> bool:
        return bool(self.coming or self.waiting or self.active)

    def round(self) -> None:
        """Begin a decode and a prefill, collect what has ended, deliver it."""
        self._take_arrivals()
        decoding = [one for one in self.active if one.asked < one.new]
        if decoding:
            cached = [one.cached for one in decoding]
            self._begin(self.times.decode(len(cached), sum(cached), max(cached)), decoding, n_cached=1)
        got = self._collect(self.times.run_ahead)
        has_prefilled = self._prefill()
        got += self._collect(self.times.run_ahead if decoding or has_prefilled else 0)
        for one in got:
            one.metrics.token_times.append(self.now)
        self.now += self.times.host(len(got))

    def _take_arrivals(self) -> None:
        if not self.waiting and not self.active:
            self.now = max(self.now, self.coming[0].metrics.arrival)
        while self.coming and self.coming[0].metrics.arrival <= self.now:
            self.waiting.append(self.coming.popleft())

    def _prefill(self) -> bool:
        """Prefill within the budget, the rest of a cut prompt first; whether there was anything."""
        whole_budget, chunk = self.config.prefill_token_budget, self.config.prefill_chunk
        budget = min(whole_budget, chunk or whole_budget) if self.active else whole_budget
        whole: list[_Request] = []
        places, left, prompts, earlier = self.most - len(self.active), budget, 0, 0
        while self.waiting and left and len(whole) < min(places, self.config.prefill_max_batch_size):
            first = self.waiting[0]
            count = min(left, first.prompt - first.cached)
            earlier += count * first.cached
            first.cached, left, prompts = first.cached + count, left - count, prompts + 1
            if first.cached == first.prompt:
                whole.append(self.waiting.popleft())
        if prompts:
            self._begin(self.times.prefill(prompts, budget - left, earlier), whole, n_cached=0)
            self.active = self.active + whole
        return prompts > 0

    def _begin(self, seconds: float, requests: list[_Request], n_cached: int) -> None:
        self.free = max(self.free, self.now) + seconds
        for one in requests:
            one.cached += n_cached
            one.asked += 1
        self.in_flight.append((self.free, requests))

    def _collect(self, leave: int) -> list[_Request]:
        """Wait until at most ``leave`` steps are in flight; who gets a token. Those served leave."""
        got: list[_Request] = []
        while self.in_flight and (len(self.in_flight) > leave or self.in_flight[0][0] <= self.now):
            ended, requests = self.in_flight.popleft()
            self.now = max(self.now, ended)
            got += requests
        for one in got:
            one.given += 1
        if any(one.given == one.new for one in got):
            self.active = [one for one in self.active if one.given < one.new]
        return got
