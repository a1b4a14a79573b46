"""Measure streaming under load.

Requests are submitted to a streaming manager; one thread consumes all of their text, as a server's event loop
would. TTFT, TPOT and ITL run from submission to delivery by the manager.

Requests arrive all at once, at the times of a Poisson process (--request-rate) or as in a trace. With a
stream interval of N, tokens are delivered N at a time. Total throughput is all completion tokens over the
time from the first submission to the last token. Goodput is the requests per second whose first token comes
within --ttft-limit-ms of the time they were due, and every further one within --itl-limit-ms of the one
before. The record also has each submission's lag and the queue's length over the run. With
--long-prompt-tokens one more request, of that many prompt tokens, arrives while the others run; their ITL
during its prefill ("beside") and outside it ("apart") is measured twice: with chunks of --prefill-chunk, and
with the whole prompt at once.
"""

from __future__ import annotations

import math
import sys
from argparse import ArgumentParser, Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import Any

from rosellm.bench.arrivals import (
    DAY_S,
    Arrival,
    gap_figures,
    goodput,
    poisson_times,
    queue_over_time,
    read_trace,
    submit_by_deadline,
)
from rosellm.bench.cli import Benchmark, Line
from rosellm.bench.job import Job, Run, prepare_run
from rosellm.bench.options import MOST_TOKENS, count, counts, number
from rosellm.bench.record import distribution, request_figures, run_figures
from rosellm.command_line import INT32_MAX, command
from rosellm.errors import OptionError
from rosellm.roseinfer.serving.prompts import one_each
from rosellm.roseinfer.serving.streaming import StreamingManager

PERCENTS = (50, 95, 99)
DAY_MS = 1000 * DAY_S


@dataclass(frozen=True)
class StreamingLoad:
    """How requests arrive, how text is delivered, and the latency limits for goodput.

    tokenize_workers: number of threads that tokenize; 0 means the submitting thread.
    stream_interval: number of tokens delivered at a time.
    times: when each request is due, in seconds from the start; None means all at once.
    ttft_limit_s, itl_limit_s: as in ``arrivals.goodput``.
    ends_with_long_prompt: whether the last request is the long prompt whose effect on the other requests'
        ITL is measured.
    """

    tokenize_workers: int = 0
    stream_interval: int = 1
    times: tuple[float, ...] | None = None
    ttft_limit_s: float = math.inf
    itl_limit_s: float = math.inf
    ends_with_long_prompt: bool = False


AT_ONCE = StreamingLoad()


def run_streaming(job: Job, load: StreamingLoad = AT_ONCE) -> dict[str, Any]:
    """Serve the job's requests once; return the figures of the run.

    Times are in seconds, throughputs in tokens per second, memory in bytes.
    """
    prepare_run(job.engine)
    inbox: SimpleQueue = SimpleQueue()
    n = len(job.prompts)
    with (
        ThreadPoolExecutor(1) as thread,
        StreamingManager(job.engine, job.config, load.tokenize_workers, load.stream_interval) as manager,
    ):
        start = perf_counter()
        reading = thread.submit(_read, inbox, n)
        times = (0.0,) * n if load.times is None else load.times[:n]
        request_ids, lags = _submit(manager, job, times, inbox)
        reading.result()
        read_time = perf_counter() - start
        outputs = [manager.result(request_id) for request_id in request_ids]
    tokens, requests = [output.token_ids for output in outputs], [output.metrics for output in outputs]
    total_time = max(request.token_times[-1] for request in requests) - start
    limits = load.ttft_limit_s, load.itl_limit_s
    return {
        **run_figures(tokens, total_time, job.engine.device),
        "read_time_s": read_time,
        **request_figures(outputs, PERCENTS),
        **distribution("itl", (gap for request in requests for gap in request.itl), PERCENTS),
        **distribution("lag", lags, PERCENTS),
        **(goodput(requests, lags, total_time, *limits) if min(limits) < math.inf else {}),
        **(gap_figures(outputs) if load.ends_with_long_prompt else {}),
        **queue_over_time(requests, start, start + total_time),
    }


def _submit(
    manager: StreamingManager, job: Job, times: tuple[float, ...], inbox: SimpleQueue
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


def _percentiles(title: str, name: str, unit: str, percents: tuple[int, ...] = PERCENTS) -> Line:
    titled = f"{title} {'/'.join(f'p{percent}' for percent in percents)}"
    return titled, [f"medians.{name}_p{percent}_s" for percent in percents], unit


LINES = [
    ("Total time", ["medians.total_time_s"], "s"),
    _percentiles("TTFT", "ttft", "ms"),
    _percentiles("TPOT", "tpot", "ms/token"),
    _percentiles("ITL", "itl", "ms"),
    _percentiles("Latency", "latency", "ms"),
    ("Throughput (completion,total)", ["medians.total_throughput_tok_s"], "tokens/s"),
]
GOODPUT_LINES = [
    _percentiles("Submission lag", "lag", "ms"),
    ("Goodput (requests within the limits)", ["medians.goodput_req_s"], "requests/s"),
]
LONG_PROMPT_LINES = [
    _percentiles("ITL beside the long prompt", "itl_beside", "ms", (50, 99)),
    _percentiles("ITL apart from it", "itl_apart", "ms", (50, 99)),
]


def lines_of(result: dict[str, Any]) -> list[Line]:
    """Return the lines to print: medians, over the measured runs, of each run's figures."""
    goodput, long_prompt = (name in result["medians"] for name in ("goodput_req_s", "itl_beside_p50_s"))
    return LINES + GOODPUT_LINES * goodput + LONG_PROMPT_LINES * long_prompt


def _rate(text: str) -> float | None:
    """Return requests per second; "inf" becomes None (an argparse type)."""
    rate = number("of requests a second, at least one a day, or inf", 1 / DAY_S, math.inf)(text)
    return None if rate == math.inf else rate


def _add_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("arrivals")
    add, load = group.add_argument, StreamingLoad
    milliseconds = number(f"of milliseconds, 0 or more and at most {DAY_MS}, a day", 0, DAY_MS)
    ms: dict[str, Any] = {"type": milliseconds, "metavar": "MS"}
    add("--tokenize-workers", **count(load.tokenize_workers, low=0), help="threads; 0: the submitting thread")
    add("--stream-interval", **count(load.stream_interval), help="tokens delivered at a time")
    add_one = group.add_mutually_exclusive_group().add_argument
    add_one("--submit-interval-ms", **ms, default=0.0, help="between submissions")
    rate = "requests a second, at seeded random times (Poisson); inf, the default: all at once"
    add_one("--request-rate", type=_rate, metavar="R", help=rate)
    trace = "JSON lines, or CSV with a header: seconds, prompt_tokens, new_tokens of each request"
    add_one("--trace", type=read_trace, metavar="FILE", help=trace)
    more = "one more request, of this many prompt tokens and one new, joins the others"
    add_one("--long-prompt-tokens", **count(None, high=MOST_TOKENS), help=more)
    add("--long-prompt-after-ms", **ms, default=500.0, help="delay of that request after the others")
    sizes = "other sizes of --prefill-chunk to compare; none by default"
    add("--long-prompt-chunks", **counts((), INT32_MAX), help=sizes)
    add("--ttft-limit-ms", **ms, help="goodput: the latest first token")
    add("--itl-limit-ms", **ms, help="goodput: the longest gap between tokens")


def _arrival_times(options: Namespace) -> tuple[float, ...]:
    """Return when requests are due, in seconds; raise ``OptionError`` if the last is due after a day."""
    n, interval = options.num_requests, options.submit_interval_ms / 1e3
    if options.trace:
        return tuple(arrival.seconds for arrival in options.trace)
    if options.request_rate:
        times = poisson_times(options.request_rate, n, options.seed)
    else:
        times = [i * interval for i in range(n)]
    if times[-1] > DAY_S:
        raise OptionError(f"the last of {n} requests would be due after a day")
    return tuple(times)


def _runs(options: Namespace) -> dict[str, Run]:
    load = StreamingLoad(
        tokenize_workers=options.tokenize_workers,
        stream_interval=options.stream_interval,
        times=_arrival_times(options),
        ttft_limit_s=_seconds(options.ttft_limit_ms),
        itl_limit_s=_seconds(options.itl_limit_ms),
        ends_with_long_prompt=options.long_prompt_tokens is not None,
    )
    if not load.ends_with_long_prompt:
        return {"streaming": partial(run_streaming, load=load)}
    chunks = {f"chunks of {n}": n for n in options.long_prompt_chunks}
    ways = {"chunked": options.prefill_chunk, **chunks, "whole": None}
    return {way: partial(_run_in_chunks, load=load, chunk=chunk) for way, chunk in ways.items()}


def _seconds(milliseconds: float | None) -> float:
    return math.inf if milliseconds is None else milliseconds / 1e3


def _run_in_chunks(job: Job, load: StreamingLoad, chunk: int | None) -> dict[str, Any]:
    config = job.config and replace(job.config, prefill_chunk=chunk)
    return run_streaming(replace(job, config=config), load)


class StreamingBenchmark(Benchmark):
    """A benchmark whose requests may come from a trace or be joined by a long prompt."""

    def parse_options(self, argv: list[str] | None = None) -> Namespace:
        options = super().parse_options(argv)
        if options.long_prompt_tokens is not None:
            if options.profile:
                raise OptionError("--profile traces decode steps without a long prompt; leave out --profile")
            if options.prefill_chunk is None:
                raise OptionError(
                    "--long-prompt-tokens compares chunks with whole prompts: give --prefill-chunk"
                )
            running = Arrival(0.0, options.prompt_tokens or 1, options.max_new_tokens)
            long = Arrival(options.long_prompt_after_ms / 1e3, options.long_prompt_tokens, 1)
            options.trace = [running] * options.num_requests + [long]
        if trace := options.trace:
            options.num_requests = len(trace)
            options.prompt_tokens = max(arrival.prompt_tokens for arrival in trace)
            options.max_new_tokens = max(arrival.new_tokens for arrival in trace)
            options.min_prompt_tokens = options.min_new_tokens = None
        return options


BENCHMARK = StreamingBenchmark("streaming", __doc__, _add_options, _runs, lines_of)
main = command(BENCHMARK.run)


if __name__ == "__main__":
    sys.exit(main())
