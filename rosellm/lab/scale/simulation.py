"""Simulate one engine that streams to arriving requests, step by step, from its step times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from rosellm.bench.arrivals import Arrival, goodput, queue_over_time
from rosellm.bench.record import distribution
from rosellm.lab.records.serving_times import StepTimes
from rosellm.lab.scale.cluster import Fleet, simulate_cluster
from rosellm.lab.scale.routers import fewest_tokens
from rosellm.roseinfer.request import RequestMetrics
from rosellm.roseinfer.serving.admission import SchedulerConfig

PERCENTS = (50, 95, 99)


def simulate(
    arrivals: Iterable[Arrival], times: StepTimes, config: SchedulerConfig, max_batch_size: int
) -> list[RequestMetrics]:
    """Return when each request's tokens are delivered, in order of arrival; seconds from time 0.

    Follows a streaming manager's rounds: running requests decode, then prompts are prefilled in FIFO order,
    within the budgets of ``config``; tokens are delivered once the round's finished steps are collected. KV
    blocks never run out.
    """
    made = simulate_cluster(list(arrivals), Fleet(1, times, max_batch_size, config), fewest_tokens())
    return [RequestMetrics(one.arrival, token_times=one.token_times) for one in made.requests]


def simulated_run(
    arrivals: Sequence[Arrival],
    times: StepTimes,
    max_batch_size: int,
    limits_s: tuple[float, float] = (math.inf, math.inf),
    config: SchedulerConfig | None = None,
) -> dict[str, Any]:
    """Return the figures of ``simulate``, named and defined as in ``benchmark_streaming``.

    limits_s: goodput's limits on TTFT and ITL.
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
