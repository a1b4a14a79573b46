"""Measures streaming under load.

Requests are submitted one by one to a streaming manager; one thread takes all of their text, as a server's
event loop would. TTFT, TPOT and ITL are taken where the manager hands tokens over, from the moment of
submission on; with a stream interval of N, tokens are handed over N at a time. Total throughput is all
completion tokens over the time from the first submission to the last token.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter, sleep
from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile

from rosellm.atomic import replacing
from rosellm.models.model import GPT
from rosellm.roseinfer.bench import cli, summary
from rosellm.roseinfer.bench.record import (
    across_repeats,
    distribution,
    engine_facts,
    new_record,
    tokens_sha256,
)
from rosellm.roseinfer.bench.summary import summary_line
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.scheduler import SchedulerConfig
from rosellm.roseinfer.serving.streaming import StreamingManager

PERCENTS = (50, 95, 99)


@dataclass(frozen=True)
class StreamingLoad:
    """How requests come in and text goes out. submit_interval_s: between two submissions; 0 for no pause."""

    tokenize_workers: int = 0
    stream_interval: int = 1
    submit_interval_s: float = 0.0


def run_streaming_benchmark(
    engine: Engine,
    prompts: cli.Prompts,
    params: SamplingParams,
    config: SchedulerConfig | None = None,
    load: StreamingLoad | None = None,
    warmup_runs: int = 1,
    repeat_runs: int = 3,
) -> dict[str, Any]:
    """Run the requests again and again: every measured run's raw figures, their medians and means.

    Times are seconds, throughputs tokens a second, memory bytes.
    """

    def run() -> dict[str, Any]:
        return _run_once(engine, prompts, params, config, load or StreamingLoad())

    for _ in range(warmup_runs):
        run()
    repeats = [run() for _ in range(repeat_runs)]
    return {
        "mode": "streaming",
        "warmup_runs": warmup_runs,
        "repeat_runs": repeat_runs,
        **across_repeats(repeats),
    }


def profile_run(
    engine: Engine,
    prompts: cli.Prompts,
    params: SamplingParams,
    config: SchedulerConfig | None,
    load: StreamingLoad,
    path: Path,
) -> None:
    """Write a Chrome trace of all threads in one short run: as many requests as run together."""
    short = replace(params, max_tokens=min(params.max_tokens, cli.PROFILED_STEPS + 1))
    with profile(experimental_config=_ExperimentalConfig(profile_all_threads=True)) as trace:
        _run_once(engine, prompts[: engine.max_batch_size], short, config, load)
    with replacing(path) as unfinished:
        trace.export_chrome_trace(str(unfinished))


def _run_once(
    engine: Engine,
    prompts: cli.Prompts,
    params: SamplingParams,
    config: SchedulerConfig | None,
    load: StreamingLoad,
) -> dict[str, Any]:
    cli.prepare_run(engine)
    inbox = SimpleQueue()
    with (
        ThreadPoolExecutor(1) as thread,
        StreamingManager(engine, config, load.tokenize_workers, load.stream_interval) as manager,
    ):
        start = perf_counter()
        reading = thread.submit(_read, inbox, len(prompts))
        request_ids = _submit(manager, prompts, params, load.submit_interval_s, inbox)
        reading.result()
        read_time = perf_counter() - start
        outputs = [manager.result(request_id) for request_id in request_ids]
    return _figures(engine, outputs, start, read_time)


def _submit(
    manager: StreamingManager,
    prompts: cli.Prompts,
    params: SamplingParams,
    interval_s: float,
    inbox: SimpleQueue,
) -> list[int]:
    """Each request at its time. If one is refused, the reader is told that no more will come."""
    start = perf_counter()
    request_ids = []
    try:
        for index, prompt in enumerate(prompts):
            if interval_s:
                sleep(max(0.0, start + index * interval_s - perf_counter()))
            request_ids.append(manager.add_request(prompt, params, inbox))
    except BaseException:
        for _ in prompts:
            inbox.put((None, None))
        raise
    return request_ids


def _read(inbox: SimpleQueue, n_requests: int) -> None:
    """The client: one thread that takes every request's text as it comes, until all have ended."""
    while n_requests:
        _, piece = inbox.get()
        n_requests -= piece is None


def _figures(engine: Engine, outputs: list[RequestOutput], start: float, read_time: float) -> dict[str, Any]:
    metrics = [output.metrics for output in outputs]
    completion_tokens = sum(len(output.token_ids) for output in outputs)
    total_time = max(m.token_times[-1] for m in metrics) - start
    return {
        "total_time_s": total_time,
        "read_time_s": read_time,
        "completion_tokens": completion_tokens,
        "total_throughput_tok_s": completion_tokens / total_time,
        **distribution("ttft", (m.ttft for m in metrics), PERCENTS),
        **distribution("tpot", (m.tpot for m in metrics), PERCENTS),
        **distribution("itl", (gap for m in metrics for gap in m.itl), PERCENTS),
        **distribution("latency", (m.latency for m in metrics), PERCENTS),
        "peak_gpu_memory_bytes": cli.peak_memory(engine),
        "tokens_sha256": tokens_sha256(output.token_ids for output in outputs),
    }


SUMMARY = (
    ("TTFT", "ttft", "ms"),
    ("TPOT", "tpot", "ms/token"),
    ("ITL", "itl", "ms"),
    ("Latency", "latency", "ms"),
)


def print_summary(result: dict[str, Any]) -> None:
    """Medians over the measured runs, of a run's percentiles where it has some."""
    medians = result["medians"]
    total_time, throughput = medians["total_time_s"], medians["total_throughput_tok_s"]
    percentiles = [
        summary_line(f"{title} p50/p95/p99", [medians.get(f"{name}_p{p}_s") for p in PERCENTS], unit)
        for title, name, unit in SUMMARY
    ]
    lines = [
        summary_line("Total time", [total_time], "s"),
        *percentiles,
        summary_line("Throughput (completion,total)", [throughput], "tokens/s"),
    ]
    summary.print_summary(result, lines)


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """This command's options; None reads the command line."""
    return cli.parse(_parser(), argv, "streaming")


def measure(options: argparse.Namespace, gpt: GPT, tokenizer: cli.AnyTokenizer) -> dict[str, Any]:
    """What the command measures, printed and returned as a record; a sweep may share one model."""
    engine, prompts, params, config = cli.set_up(options, gpt, tokenizer)
    load = StreamingLoad(options.tokenize_workers, options.stream_interval, options.submit_interval_ms / 1e3)
    result = run_streaming_benchmark(
        engine, prompts, params, config, load, options.warmup_runs, options.repeat_runs
    )
    print_summary(result)
    if options.profile:
        profile_run(engine, prompts, params, config, load, options.profile)
    facts = {**cli.request_facts(options), **engine_facts(engine)}
    return new_record("streaming", engine.device, **facts, results={"streaming": result})


main: Callable[[list[str] | None], int] = cli.benchmark_command(parse_options, measure)


def _parser() -> argparse.ArgumentParser:
    parser = cli.benchmark_parser("benchmark_streaming", __doc__)
    group = parser.add_argument_group("streaming")
    add = group.add_argument
    add(
        "--tokenize-workers",
        type=cli.whole_number(0),
        default=0,
        help="threads; 0 tokenizes on submission; default: %(default)s",
    )
    add(
        "--stream-interval",
        type=cli.whole_number(1),
        default=1,
        help="tokens handed over at a time; default: %(default)s",
    )
    add(
        "--submit-interval-ms",
        type=cli.milliseconds,
        default=0.0,
        help="ms between two submissions; default: %(default)s",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
