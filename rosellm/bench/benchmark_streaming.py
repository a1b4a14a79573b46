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
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import Any

from rosellm.bench import runs
from rosellm.bench.arrivals import (
    DAY_S,
    goodput,
    poisson_times,
    queue_over_time,
    read_trace,
    submit_by_deadline,
)
from rosellm.bench.cli import Benchmark
from rosellm.bench.job import Job
from rosellm.bench.long_prompt import gap_figures, joined_by
from rosellm.bench.options import MOST_TOKENS, count, counts
from rosellm.bench.prompts import Prompts
from rosellm.bench.record import distribution
from rosellm.bench.summary import summary_line
from rosellm.command_line import INT32_MAX
from rosellm.errors import OptionError, RoseError
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.prompts import one_each
from rosellm.roseinfer.serving.streaming import StreamingManager

PERCENTS = (50, 95, 99)
DAY_MS = 1000 * DAY_S
METRICS = {
    "ttft": ("TTFT", "ms"),
    "tpot": ("TPOT", "ms/token"),
    "itl": ("ITL", "ms"),
    "latency": ("Latency", "ms"),
}


@dataclass(frozen=True)
class StreamingLoad:
    """How requests arrive, how text is delivered, and the latency limits for goodput.

    times: when each request is due, in seconds from the start; None: all at once. ttft_limit_s and
    itl_limit_s: as in ``arrivals.goodput``. ends_with_long_prompt: the last request is the long prompt whose
    effect on the others' ITL is measured.
    """

    tokenize_workers: int = 0
    stream_interval: int = 1
    times: tuple[float, ...] | None = None
    ttft_limit_s: float = math.inf
    itl_limit_s: float = math.inf
    ends_with_long_prompt: bool = False


def run_streaming_benchmark(
    job: Job, load: StreamingLoad | None = None, warmup_runs: int = 1, repeat_runs: int = 3
) -> dict[str, Any]:
    """Serve the job's requests repeatedly; return each run's raw figures, medians and means.

    Times are in seconds, throughputs in tokens per second, memory in bytes.
    """
    run = partial(_run_once, load=load or StreamingLoad())
    return runs.repeat(run, job, "streaming", warmup_runs, repeat_runs)


def _run_once(job: Job, load: StreamingLoad) -> dict[str, Any]:
    runs.prepare_run(job.engine)
    inbox: SimpleQueue = SimpleQueue()
    with (
        ThreadPoolExecutor(1) as thread,
        StreamingManager(job.engine, job.config, load.tokenize_workers, load.stream_interval) as manager,
    ):
        start = perf_counter()
        reading = thread.submit(_read, inbox, len(job.prompts))
        params = one_each(job.params, len(job.prompts))
        times = (0.0,) * len(job.prompts) if load.times is None else load.times[: len(job.prompts)]
        request_ids, lags = _submit(manager, job.prompts, params, times, inbox)
        reading.result()
        read_time = perf_counter() - start
        outputs = _results(manager, request_ids)
    total_time = max(output.metrics.token_times[-1] for output in outputs) - start
    limits = load.ttft_limit_s, load.itl_limit_s
    gaps = (gap for output in outputs for gap in output.metrics.itl)
    tokens, requests = [output.token_ids for output in outputs], [output.metrics for output in outputs]
    return {
        **runs.run_figures(tokens, total_time, runs.peak_memory(job.engine.device)),
        "read_time_s": read_time,
        **runs.request_figures(outputs, PERCENTS),
        **distribution("itl", gaps, PERCENTS),
        **distribution("lag", lags, PERCENTS),
        **(goodput(requests, lags, total_time, *limits) if min(limits) < math.inf else {}),
        **(gap_figures(outputs) if load.ends_with_long_prompt else {}),
        **queue_over_time(requests, start, start + total_time),
    }


def _submit(
    manager: StreamingManager,
    prompts: Prompts,
    params: list[SamplingParams],
    times: tuple[float, ...],
    inbox: SimpleQueue,
) -> tuple[list[int], list[float]]:
    """Submit each request at its time; return ids and lags.

    If one is refused, the reader receives an end marker for every request, so that it stops.
    """
    request_ids: list[int] = []

    def submit(index: int) -> None:
        request_ids.append(manager.add_request(prompts[index], params[index], inbox))

    try:
        lags = submit_by_deadline(times, submit)
    except BaseException:
        for _ in prompts:
            inbox.put((None, None))
        raise
    return request_ids, lags


def _results(manager: StreamingManager, request_ids: list[int]) -> list[RequestOutput]:
    """Return the results of the requests, which have all ended. Raises ``RoseError`` if one failed."""
    outputs = []
    for number, request_id in enumerate(request_ids, 1):
        try:
            outputs.append(manager.result(request_id))
        except RoseError as error:
            raise runs.request_failed(number, len(request_ids), error) from error
    return outputs


def _read(inbox: SimpleQueue, n_requests: int) -> None:
    """Consume every request's text on one thread until all have ended."""
    while n_requests:
        _, piece = inbox.get()
        n_requests -= piece is None


def summary(result: dict[str, Any]) -> list[str]:
    """Report medians over the measured runs, including those of each run's percentiles."""
    medians = result["medians"]
    percentiles = [
        summary_line(f"{title} p50/p95/p99", [medians.get(f"{name}_p{p}_s") for p in PERCENTS], unit)
        for name, (title, unit) in METRICS.items()
    ]
    return [
        summary_line("Total time", [medians["total_time_s"]], "s"),
        *percentiles,
        summary_line("Throughput (completion,total)", [medians["total_throughput_tok_s"]], "tokens/s"),
        *(_goodput_lines(medians) if "goodput_req_s" in medians else []),
        *(_long_prompt_lines(medians) if "itl_beside_p50_s" in medians else []),
    ]


def _long_prompt_lines(medians: dict[str, float]) -> list[str]:
    places = {"beside": "ITL beside the long prompt", "apart": "ITL apart from it"}
    return [
        summary_line(f"{told} p50/p99", [medians.get(f"itl_{place}_p{p}_s") for p in (50, 99)], "ms")
        for place, told in places.items()
    ]


def _goodput_lines(medians: dict[str, float]) -> list[str]:
    return [
        summary_line("Submission lag p50/p95/p99", [medians[f"lag_p{p}_s"] for p in PERCENTS], "ms"),
        summary_line("Goodput (requests within the limits)", [medians["goodput_req_s"]], "requests/s"),
    ]


def _milliseconds(text: str) -> float:
    """An argparse type: a duration from 0 to a day."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= DAY_MS:
        raise ArgumentTypeError(
            f"{text!r} is not a number of milliseconds, 0 or more and at most {DAY_MS}, a day"
        )
    return value


def _rate(text: str) -> float | None:
    """An argparse type: requests per second; inf becomes None."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise ArgumentTypeError(f"{text!r} is not a number of requests a second above 0, or inf")
    if value * DAY_S < 1:
        raise ArgumentTypeError(f"{text!r} is less than a request a day")
    return None if value == math.inf else value


def _arrival_times(options: Namespace) -> tuple[float, ...] | None:
    """Return when requests are due, or None for all at once.

    Raises ``OptionError`` if several options set it, or if it exceeds a day.
    """
    given = {
        "--request-rate": options.request_rate,
        "--trace": options.trace,
        "--submit-interval-ms": options.submit_interval_ms,
    }
    named = [name for name, value in given.items() if value]
    if len(named) > 1:
        raise OptionError(f"{' and '.join(named)} both set when requests arrive; give only one")
    if options.trace:
        return tuple(arrival.seconds for arrival in options.trace)
    if not named:
        return None
    times = _times_of_options(options)
    if times[-1] > DAY_S:
        raise OptionError(f"{named[0]}: the last of {options.num_requests} requests would be due after a day")
    return times


def _times_of_options(options: Namespace) -> tuple[float, ...]:
    if options.request_rate:
        return tuple(poisson_times(options.request_rate, options.num_requests, options.seed))
    interval = options.submit_interval_ms / 1e3
    return tuple(i * interval for i in range(options.num_requests))


def _seconds(milliseconds: float | None) -> float:
    return math.inf if milliseconds is None else milliseconds / 1e3


def _add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("arrivals").add_argument
    load = StreamingLoad
    add("--tokenize-workers", **count(load.tokenize_workers, low=0), help="threads; 0: the submitting thread")
    add("--stream-interval", **count(load.stream_interval), help="tokens delivered at a time")
    add("--submit-interval-ms", type=_milliseconds, default=0.0, metavar="MS", help="between submissions")
    rate = "requests a second, at seeded random times (Poisson); inf, the default: all at once"
    add("--request-rate", type=_rate, metavar="R", help=rate)
    trace = "JSON lines, or CSV with a header: seconds, prompt_tokens, new_tokens of each request"
    add("--trace", type=read_trace, metavar="FILE", help=trace)
    more = "one more request, of this many prompt tokens and one new, joins the others"
    add("--long-prompt-tokens", **count(None, high=MOST_TOKENS), help=more)
    when = "delay of that request after the others"
    add("--long-prompt-after-ms", type=_milliseconds, default=500.0, metavar="MS", help=when)
    sizes = "other sizes of --prefill-chunk to compare; none by default"
    add("--long-prompt-chunks", **counts((), INT32_MAX), help=sizes)
    add("--ttft-limit-ms", type=_milliseconds, metavar="MS", help="goodput: the latest first token")
    add("--itl-limit-ms", type=_milliseconds, metavar="MS", help="goodput: the longest gap between tokens")


def _runs(options: Namespace) -> dict[str, runs.Run]:
    limits = _seconds(options.ttft_limit_ms), _seconds(options.itl_limit_ms)
    times = _arrival_times(options)
    long = options.long_prompt_tokens is not None
    load = StreamingLoad(options.tokenize_workers, options.stream_interval, times, *limits, long)
    if long:
        chunks = {f"chunks of {n}": n for n in options.long_prompt_chunks}
        ways = {"chunked": options.prefill_chunk, **chunks, "whole": None}
        return {way: partial(_run_in_chunks, load=load, chunk=chunk) for way, chunk in ways.items()}
    return {"streaming": partial(_run_once, load=load)}


def _run_in_chunks(job: Job, load: StreamingLoad, chunk: int | None) -> dict[str, Any]:
    config = job.config and replace(job.config, prefill_chunk=chunk)
    return _run_once(replace(job, config=config), load)


class StreamingBenchmark(Benchmark):
    """A benchmark whose requests may come from a trace or be joined by a long prompt."""

    def parse_options(self, argv: list[str] | None = None) -> Namespace:
        options = super().parse_options(argv)
        if options.long_prompt_tokens is not None:
            _check_long_prompt(options)
            after, tokens = options.long_prompt_after_ms / 1e3, options.prompt_tokens or 1
            sizes = options.num_requests, tokens, options.max_new_tokens
            options.trace = joined_by(options.long_prompt_tokens, after, *sizes)
        if trace := options.trace:
            options.num_requests = len(trace)
            options.prompt_tokens = max(arrival.prompt_tokens for arrival in trace)
            options.max_new_tokens = max(arrival.new_tokens for arrival in trace)
            options.min_prompt_tokens = options.min_new_tokens = None
        return options


def _check_long_prompt(options: Namespace) -> None:
    if options.profile:
        raise OptionError("--profile traces a few decode steps, without a long prompt; leave out --profile")
    if options.trace or options.request_rate or options.submit_interval_ms:
        raise OptionError("--long-prompt-tokens sets when requests arrive; give no other arrivals")
    if options.prefill_chunk is None:
        raise OptionError("--long-prompt-tokens compares chunks with whole prompts: give --prefill-chunk")


BENCHMARK = StreamingBenchmark("streaming", __doc__, _add_options, _runs, summary)
main = BENCHMARK.main


if __name__ == "__main__":
    sys.exit(main())
