"""Measure streaming under load.

Requests are submitted one by one to a streaming manager; one thread consumes all of their text, as a server's
event loop would. TTFT, TPOT and ITL run from submission to delivery by the manager; with a stream interval of
N, tokens are delivered N at a time. Total throughput is all completion tokens over the time from the first
submission to the last token.
"""

from __future__ import annotations

import math
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from time import perf_counter, sleep
from typing import Any

from rosellm.errors import RoseError
from rosellm.roseinfer.bench import runs
from rosellm.roseinfer.bench.cli import Benchmark
from rosellm.roseinfer.bench.job import Job
from rosellm.roseinfer.bench.options import count
from rosellm.roseinfer.bench.prompts import Prompts
from rosellm.roseinfer.bench.record import distribution
from rosellm.roseinfer.bench.summary import summary_line
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.scheduler import one_each
from rosellm.roseinfer.serving.streaming import StreamingManager

PERCENTS = (50, 95, 99)
DAY_MS = 86_400_000
METRICS = {
    "ttft": ("TTFT", "ms"),
    "tpot": ("TPOT", "ms/token"),
    "itl": ("ITL", "ms"),
    "latency": ("Latency", "ms"),
}


@dataclass(frozen=True)
class StreamingLoad:
    """How requests arrive and text is delivered. submit_interval_s: seconds between two submissions."""

    tokenize_workers: int = 0
    stream_interval: int = 1
    submit_interval_s: float = 0.0


def run_streaming_benchmark(
    job: Job, load: StreamingLoad | None = None, warmup_runs: int = 1, repeat_runs: int = 3
) -> dict[str, Any]:
    """Serve the job's requests repeatedly: every measured run's raw figures, their medians and means.

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
        request_ids = _submit(manager, job.prompts, params, load.submit_interval_s, inbox)
        reading.result()
        read_time = perf_counter() - start
        outputs = _results(manager, request_ids)
    total_time = max(output.metrics.token_times[-1] for output in outputs) - start
    gaps = (gap for output in outputs for gap in output.metrics.itl)
    tokens = [output.token_ids for output in outputs]
    return {
        **runs.run_figures(tokens, total_time, runs.peak_memory(job.engine.device)),
        "read_time_s": read_time,
        **runs.request_figures(outputs, PERCENTS),
        **distribution("itl", gaps, PERCENTS),
    }


def _submit(
    manager: StreamingManager,
    prompts: Prompts,
    params: list[SamplingParams],
    interval_s: float,
    inbox: SimpleQueue,
) -> list[int]:
    """Submit each request at its time. If one is refused, tell the reader that no more will come."""
    start = perf_counter()
    request_ids = []
    try:
        for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            if interval_s:
                sleep(max(0.0, start + index * interval_s - perf_counter()))
            request_ids.append(manager.add_request(prompt, own, inbox))
    except BaseException:
        for _ in prompts:
            inbox.put((None, None))
        raise
    return request_ids


def _results(manager: StreamingManager, request_ids: list[int]) -> list[RequestOutput]:
    """The results of the requests, all of which have ended. Raises RoseError if one of them failed."""
    outputs = []
    for number, request_id in enumerate(request_ids, 1):
        try:
            outputs.append(manager.result(request_id))
        except RoseError as error:
            raise runs.request_failed(number, len(request_ids), error) from error
    return outputs


def _read(inbox: SimpleQueue, n_requests: int) -> None:
    """The client: one thread that consumes every request's text until all have ended."""
    while n_requests:
        _, piece = inbox.get()
        n_requests -= piece is None


def summary(result: dict[str, Any]) -> list[str]:
    """Medians over the measured runs, of a run's percentiles if it has some."""
    medians = result["medians"]
    percentiles = [
        summary_line(f"{title} p50/p95/p99", [medians.get(f"{name}_p{p}_s") for p in PERCENTS], unit)
        for name, (title, unit) in METRICS.items()
    ]
    return [
        summary_line("Total time", [medians["total_time_s"]], "s"),
        *percentiles,
        summary_line("Throughput (completion,total)", [medians["total_throughput_tok_s"]], "tokens/s"),
    ]


def _milliseconds(text: str) -> float:
    """An argparse type: a duration of 0 to a day."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= DAY_MS:
        raise ArgumentTypeError(
            f"{text!r} is not a number of milliseconds, 0 or more and at most {DAY_MS}, a day"
        )
    return value


def _add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("streaming").add_argument
    load = StreamingLoad
    add("--tokenize-workers", **count(load.tokenize_workers, low=0), help="threads; 0: done by the submitter")
    add("--stream-interval", **count(load.stream_interval), help="tokens delivered at a time")
    pause, told = load.submit_interval_s * 1e3, "between two submissions"
    add("--submit-interval-ms", type=_milliseconds, default=pause, metavar="MS", help=told)


def _runs(options: Namespace) -> dict[str, runs.Run]:
    load = StreamingLoad(options.tokenize_workers, options.stream_interval, options.submit_interval_ms / 1e3)
    return {"streaming": partial(_run_once, load=load)}


BENCHMARK = Benchmark("streaming", __doc__, _add_options, _runs, summary)
main = BENCHMARK.main


if __name__ == "__main__":
    sys.exit(main())
