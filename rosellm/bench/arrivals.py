"""Arrival times of requests, and figures of how the requests were served."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from time import perf_counter, sleep
from typing import NamedTuple

import numpy as np

from rosellm.roseinfer.request import RequestMetrics

N_SAMPLES = 200  # times per run at which the queue's length is sampled


class Arrival(NamedTuple):
    """A request: when it arrives, in seconds from the start, and its token counts."""

    seconds: float
    prompt_tokens: int
    new_tokens: int


def poisson_times(rate: float, n_requests: int, seed: int) -> list[float]:
    """Draw arrival times of a Poisson process, in seconds, the first at 0; rate: requests per second."""
    gaps = np.random.default_rng([seed, n_requests]).exponential(1 / rate, size=n_requests)
    return (np.cumsum(gaps) - gaps[0]).tolist()


def submit_by_deadline(
    times: Iterable[float],
    submit: Callable[[int], None],
    clock: Callable[[], float] = perf_counter,
    pause: Callable[[float], object] = sleep,
) -> list[float]:
    """Call ``submit(i)`` at ``times[i]`` seconds from now; return how late each call was, in seconds.

    A call that is already late is made at once; later calls keep their times.
    """
    start, lags = clock(), []
    for i, due in enumerate(times):
        while (left := start + due - clock()) > 0:
            pause(left)
        lags.append(clock() - start - due)
        submit(i)
    return lags


def queue_over_time(requests: list[RequestMetrics], start: float, end: float) -> dict[str, list[float]]:
    """Sample how many requests wait for their first token and how many are in flight, N_SAMPLES times.

    start, end: when the run started and ended, in ``perf_counter`` seconds.

    The returned ``queue_times_s`` are relative to the start.
    """
    samples = np.linspace(start, end, N_SAMPLES)
    columns = zip(*((one.arrival, one.token_times[0], one.token_times[-1]) for one in requests), strict=True)
    arrived, begun, ended = (np.searchsorted(np.sort(times), samples, side="right") for times in columns)
    return {
        "queue_times_s": (samples - start).tolist(),
        "queue_waiting": (arrived - begun).tolist(),
        "queue_in_flight": (arrived - ended).tolist(),
    }


def goodput(
    requests: list[RequestMetrics],
    lags: list[float],
    seconds: float,
    ttft_limit: float = math.inf,
    itl_limit: float = math.inf,
) -> dict[str, float]:
    """Return how many requests per second meet both limits, and the share of requests that do.

    lags: seconds from when each request was due to its submission.
    seconds: length of the run.
    ttft_limit: maximum seconds from when a request was due to its first token.
    itl_limit: maximum seconds between any two successive tokens of a request.
    """
    good = 0
    for one, lag in zip(requests, lags, strict=True):
        slow = max(one.itl, default=0.0) > itl_limit
        good += not slow and one.token_times[0] - one.arrival + lag <= ttft_limit
    return {"goodput_req_s": good / seconds, "within_limits_share": good / len(requests)}
