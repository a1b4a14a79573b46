"""The figures of a simulated engine that streams to arriving requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rosellm.bench.arrivals import Arrival, goodput, queue_over_time
from rosellm.bench.record import distribution
from rosellm.lab.records.serving_times import StepTimes
from rosellm.lab.scale.cluster import Fleet, simulate_cluster
from rosellm.lab.scale.routers import fewest_tokens
from rosellm.roseinfer.request import RequestMetrics

PERCENTS = (50, 95, 99)


def simulated_run(
    arrivals: Sequence[Arrival],
    times: StepTimes,
    max_batch_size: int,
    limits_s: tuple[float, float] = (math.inf, math.inf),
) -> dict[str, Any]:
    """Return the figures of one simulated replica, named and defined as in ``benchmark_streaming``.

    limits_s: goodput's limits on TTFT and ITL.
    """
    made = simulate_cluster(arrivals, Fleet(1, times, max_batch_size), fewest_tokens())
    requests: list[RequestMetrics] = list(made.requests)
    n_tokens = sum(len(one.token_times) for one in requests)
    return {
        "total_time_s": made.seconds,
        "total_throughput_tok_s": n_tokens / made.seconds,
        **distribution("ttft", [one.ttft for one in requests], PERCENTS),
        **distribution("itl", [gap for one in requests for gap in one.itl], PERCENTS),
        **goodput(requests, [0.0] * len(requests), made.seconds, *limits_s),
        **queue_over_time(requests, 0.0, made.seconds),
    }
