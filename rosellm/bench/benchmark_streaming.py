"""Measure streaming under load.

Requests are submitted to a streaming manager; one thread consumes all of their text, as a server's event loop
would. TTFT, TPOT and ITL run from submission to delivery by the manager.

Requests arrive all at once, at fixed intervals or at the times of a Poisson process (--request-rate). Total
throughput is all completion tokens over the time from the first submission to the last token. Goodput is the
requests per second whose first token comes within --ttft-limit-ms of the time they were due, and every
further one within --itl-limit-ms of the one before. The record also has the queue's length over the run.
"""

from __future__ import annotations

import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import Any

from rosellm.bench.arrivals import goodput, poisson_times, queue_over_time, submit_by_deadline
from rosellm.bench.job import Benchmark, Job, Run, check_served, prepare_run
from rosellm.bench.options import count, number
from rosellm.bench.record import distribution, request_figures, run_figures
from rosellm.command_line import command
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.serving.prompts import one_each
from rosellm.roseinfer.serving.streaming import StreamingManager

PERCENTS = (50, 95, 99)
DAY_MS = 86_400_000


def serve(
    job: Job, times: Sequence[float] | None = None, tokenize_workers: int = 0
) -> tuple[list[RequestOutput], list[float], float]:
    """Serve the job's requests once; the arguments are those of :func:`run_streaming`.

    Returns the outputs, the seconds from when each request was due to its submission, and when the run
    started, in ``perf_counter`` seconds.
    """
    prepare_run(job.engine)
    inbox: SimpleQueue = SimpleQueue()
    n = len(job.prompts)
    with (
        ThreadPoolExecutor(1) as thread,
        StreamingManager(job.engine, job.config, tokenize_workers) as manager,
    ):
        start = perf_counter()
        reading = thread.submit(_read, inbox, n)
        request_ids, lags = _submit(manager, job, times or [0.0] * n, inbox)
        reading.result()
        outputs = [manager.result(request_id) for request_id in request_ids]
    check_served(outputs, job.params)
    return outputs, lags, start


def run_streaming(
    job: Job,
    times: Sequence[float] | None = None,
    limits_s: tuple[float, float] = (math.inf, math.inf),
    *,
    tokenize_workers: int = 0,
) -> dict[str, Any]:
    """Serve the job's requests once; return the figures of the run.

    times: when each request is due, in seconds from the start; None means all at once.
    limits_s: goodput's limits on TTFT and ITL.
    tokenize_workers: number of threads that tokenize; 0 means the submitting thread.

    Times are in seconds, throughputs in tokens per second, memory in bytes.
    """
    outputs, lags, start = serve(job, times, tokenize_workers)
    tokens, requests = [output.token_ids for output in outputs], [output.metrics for output in outputs]
    total_time = max(request.token_times[-1] for request in requests) - start
    return {
        **run_figures(tokens, total_time, job.engine.device),
        **request_figures(outputs, PERCENTS),
        **distribution("itl", (gap for request in requests for gap in request.itl), PERCENTS),
        **(goodput(requests, lags, total_time, *limits_s) if min(limits_s) < math.inf else {}),
        **queue_over_time(requests, start, start + total_time),
    }


def _submit(
    manager: StreamingManager, job: Job, times: Sequence[float], inbox: SimpleQueue
) -> tuple[list[int], list[float]]:
    """Submit each request at its time; return ids and lags in seconds. An error also ends :func:`_read`."""
    request_ids: list[int] = []
    params = one_each(job.params, len(job.prompts))

    def submit(index: int) -> None:
        request_ids.append(manager.add_request(job.prompts[index], params[index], inbox))

    try:
        return request_ids, submit_by_deadline(times, submit)
    except BaseException:
        inbox.put(None)
        raise


def _read(inbox: SimpleQueue, n_requests: int) -> None:
    """Consume the text of all requests until all have ended, or until the inbox delivers None."""
    while n_requests and (delivered := inbox.get()) is not None:
        n_requests -= delivered[1] is None


def _rate(text: str) -> float | None:
    """Return requests per second; "inf" becomes None (an argparse type)."""
    rate = number("of requests a second above 0, or inf", 1e-6, math.inf)(text)
    return None if rate == math.inf else rate


def _add_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("arrivals")
    add = group.add_argument
    milliseconds = number(f"of milliseconds, 0 or more and at most {DAY_MS}, a day", 0, DAY_MS)
    ms: dict[str, Any] = {"type": milliseconds, "metavar": "MS"}
    add("--tokenize-workers", **count(0, low=0), help="threads; 0: the submitting thread")
    add_one = group.add_mutually_exclusive_group().add_argument
    add_one("--submit-interval-ms", **ms, default=0.0, help="between submissions")
    rate = "requests a second, at seeded random times (Poisson); inf, the default: all at once"
    add_one("--request-rate", type=_rate, metavar="R", help=rate)
    add("--ttft-limit-ms", **ms, help="goodput: the latest first token")
    add("--itl-limit-ms", **ms, help="goodput: the longest gap between tokens")


def _arrival_times(options: Namespace) -> list[float]:
    """Return when requests are due, in seconds from the start."""
    if options.request_rate:
        return poisson_times(options.request_rate, options.num_requests, options.seed)
    return [i * options.submit_interval_ms / 1e3 for i in range(options.num_requests)]


def _runs(options: Namespace) -> dict[str, Run]:
    run = partial(
        run_streaming,
        times=_arrival_times(options),
        limits_s=(_seconds(options.ttft_limit_ms), _seconds(options.itl_limit_ms)),
        tokenize_workers=options.tokenize_workers,
    )
    return {"streaming": run}


def _seconds(milliseconds: float | None) -> float:
    return math.inf if milliseconds is None else milliseconds / 1e3


BENCHMARK = Benchmark("streaming", __doc__, _add_options, _runs)
main = command(BENCHMARK.run)


if __name__ == "__main__":
    sys.exit(main())
