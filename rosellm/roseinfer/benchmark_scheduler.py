"""Measures a scheduler on a batch of requests.

Decode throughput is tokens made by decode steps over time spent in decode steps, on the device where that
runs on its own; a request's first token comes from its prefill. Total throughput is all completion tokens,
counted as ids, over the whole run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

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
from rosellm.roseinfer.outputs import Done, RequestOutput
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.scheduler import OfflineScheduler, OnlineScheduler, SchedulerConfig


def run_scheduler_benchmark(
    engine: Engine,
    prompts: cli.Prompts,
    params: SamplingParams,
    config: SchedulerConfig | None = None,
    warmup_runs: int = 1,
    repeat_runs: int = 3,
    mode: str = "online",
) -> dict[str, Any]:
    """Run the requests again and again: every measured run's raw figures, their medians and means.

    mode: "naive" (one request after another, each timed from its own start), "offline" or "online" (all
    requests arrive at once). Text prompts are tokenized within the measured time. Times are seconds,
    throughputs tokens a second, memory bytes.
    """
    for _ in range(warmup_runs):
        _run_once(engine, prompts, params, config, mode)
    repeats = [_run_once(engine, prompts, params, config, mode) for _ in range(repeat_runs)]
    return {"mode": mode, "warmup_runs": warmup_runs, "repeat_runs": repeat_runs, **across_repeats(repeats)}


def profile_run(
    engine: Engine,
    prompts: cli.Prompts,
    params: SamplingParams,
    config: SchedulerConfig | None,
    mode: str,
    path: Path,
) -> None:
    """Write a Chrome trace of one short run: as many requests as run together, a few decode steps."""
    together = 1 if mode == "naive" else engine.max_batch_size
    short = replace(params, max_tokens=min(params.max_tokens, cli.PROFILED_STEPS + 1))
    with profile() as trace:
        _run_once(engine, prompts[:together], short, config, mode)
    with replacing(path) as unfinished:
        trace.export_chrome_trace(str(unfinished))


def _run_once(
    engine: Engine, prompts: cli.Prompts, params: SamplingParams, config: SchedulerConfig | None, mode: str
) -> dict[str, Any]:
    cli.prepare_run(engine)
    scheduler = MODES[mode](engine, config)
    start = perf_counter()
    outputs = scheduler.run(cli.encode_prompts(prompts, engine.tokenizer), params)
    total_time = perf_counter() - start
    completion_tokens = sum(len(output.token_ids) for output in outputs)
    return {
        "decode_time_s": scheduler.decode_time_s,
        "prefill_time_s": scheduler.prefill_time_s,
        "total_time_s": total_time,
        "decode_steps": scheduler.decode_steps,
        "decode_tokens": scheduler.decode_tokens,
        "completion_tokens": completion_tokens,
        "preemptions": scheduler.preemptions,
        "decode_throughput_tok_s": scheduler.decode_tokens / scheduler.decode_time_s
        if scheduler.decode_steps
        else None,
        "total_throughput_tok_s": completion_tokens / total_time,
        **distribution("decode_step", scheduler.step_times, (50, 99)),
        **distribution("ttft", (output.metrics.ttft for output in outputs), (50,)),
        **distribution("tpot", (output.metrics.tpot for output in outputs), (50,)),
        **distribution("latency", (output.metrics.latency for output in outputs), (50,)),
        "peak_gpu_memory_bytes": cli.peak_memory(engine),
        "tokens_sha256": tokens_sha256(output.token_ids for output in outputs),
    }


class _StepTimes:
    """Keeps the seconds of each decode step of a scheduler."""

    def __init__(self, engine: Engine, config: SchedulerConfig | None) -> None:
        super().__init__(engine, config)
        self.step_times: list[float] = []

    def record_step(self, done: Done, n_tokens: int) -> None:
        super().record_step(done, n_tokens)
        if done.kind == "decode" and n_tokens:
            self.step_times.append(done.seconds)


class _Online(_StepTimes, OnlineScheduler):
    def run(self, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
        request_ids = self.add_requests(prompts, params)
        while self.has_unfinished:
            self.step()
        return [self.take_result(request_id) for request_id in request_ids]


class _Offline(_StepTimes, OfflineScheduler):
    pass


class _Naive(_Online):
    def run(self, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
        return [output for prompt in prompts for output in super(_Naive, self).run([prompt], params)]


MODES: dict[str, type[_Naive | _Offline | _Online]] = {
    "naive": _Naive,
    "offline": _Offline,
    "online": _Online,
}

SUMMARY = (
    ("Decode time", "decode_time_s", "decode_time_s", "s"),
    ("Total time", "total_time_s", "total_time_s", "s"),
    ("Throughput(completion,decode)", "decode_throughput_tok_s", "decode_throughput_tok_s", "tokens/s"),
    ("Throughput(completion,total)", "total_throughput_tok_s", "total_throughput_tok_s", "tokens/s"),
    ("TTFT", "ttft_p50_s", "ttft_mean_s", "ms"),
    ("TPOT", "tpot_p50_s", "tpot_mean_s", "ms/token"),
    ("Latency", "latency_p50_s", "latency_mean_s", "ms"),
)


def print_summary(result: dict[str, Any]) -> None:
    """Over the measured runs: the median of each run's p50, and the mean of each run's mean."""
    medians, means = result["medians"], result["means"]
    lines = [
        summary_line(f"{title} p50/mean", (medians.get(p50), means.get(mean)), unit)
        for title, p50, mean, unit in SUMMARY
    ]
    summary.print_summary(result, lines)


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """This command's options; None reads the command line."""
    return cli.parse(_parser(), argv, "scheduler")


def measure(options: argparse.Namespace, gpt: GPT, tokenizer: cli.AnyTokenizer) -> dict[str, Any]:
    """What the command measures, printed and returned as a record; a sweep may share one model."""
    engine, prompts, params, config = cli.set_up(options, gpt, tokenizer)
    results = {}
    for mode in MODES if options.mode == "all" else (options.mode,):
        results[mode] = run_scheduler_benchmark(
            engine, prompts, params, config, options.warmup_runs, options.repeat_runs, mode
        )
        print_summary(results[mode])
    if options.profile:
        profile_run(engine, prompts, params, config, mode, options.profile)
    facts = {**cli.request_facts(options), **engine_facts(engine)}
    return new_record("scheduler", engine.device, **facts, results=results)


main: Callable[[list[str] | None], int] = cli.benchmark_command(parse_options, measure)


def _parser() -> argparse.ArgumentParser:
    parser = cli.benchmark_parser("benchmark_scheduler", __doc__)
    parser.add_argument(
        "--mode",
        choices=(*MODES, "all"),
        default="online",
        help="naive: one request after another; offline and online: schedulers; default: %(default)s",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
