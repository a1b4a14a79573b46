"""Measure a scheduler on a batch of requests.

Decode throughput is tokens from decode steps over time spent in decode steps, measured on the device if it
runs the step by itself; a request's first token comes from its prefill. Total throughput is all completion
tokens over the whole run.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

from rosellm.bench.job import Benchmark, Job, Run, check_served, prepare_run
from rosellm.bench.record import distribution, request_figures, run_figures
from rosellm.command_line import command
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.outputs import Done, RequestOutput
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.scheduler import OfflineScheduler


def run_scheduler(job: Job, mode: str = "online") -> dict[str, Any]:
    """Serve the job's requests once; return the figures of the run.

    mode: all requests arrive at once, "offline" at ``OfflineScheduler.run``, "online" at single calls of
        ``step``.

    Text prompts are tokenized within the measured time. Times are in seconds, throughputs in tokens per
    second, memory in bytes.
    """
    engine = job.engine
    prepare_run(engine)
    scheduler = _Scheduler(engine, job.config)
    start = perf_counter()
    outputs = MODES[mode](scheduler, engine.encode_many(job.prompts), job.params)
    total_time = perf_counter() - start
    check_served(outputs, job.params)
    tokens = [output.token_ids for output in outputs]
    throughput = scheduler.decode_tokens / scheduler.decode_time_s if scheduler.decode_steps else None
    return {
        **run_figures(tokens, total_time, engine.device),
        "decode_time_s": scheduler.decode_time_s,
        "prefill_time_s": scheduler.prefill_time_s,
        "decode_steps": scheduler.decode_steps,
        "decode_tokens": scheduler.decode_tokens,
        "preemptions": scheduler.preemptions,
        "decode_throughput_tok_s": throughput,
        **distribution("decode_step", scheduler.step_times, (50, 99)),
        **request_figures(outputs, (50,)),
    }


Params = SamplingParams | list[SamplingParams]
Prompts = list[list[int]]


class _Scheduler(OfflineScheduler):
    """A scheduler that records how many seconds each decode step took."""

    def __init__(self, engine: Engine, config: SchedulerConfig | None) -> None:
        super().__init__(engine, config)
        self.step_times: list[float] = []

    def record_step(self, done: Done, n_tokens: int) -> None:
        super().record_step(done, n_tokens)
        if done.kind == "decode" and n_tokens:
            self.step_times.append(done.seconds)


def _online(scheduler: _Scheduler, prompts: Prompts, params: Params) -> list[RequestOutput]:
    request_ids = scheduler.add_requests(prompts, params)
    while scheduler.has_unfinished:
        scheduler.step()
    return [scheduler.take_result(request_id) for request_id in request_ids]


MODES: dict[str, Callable[[_Scheduler, Prompts, Params], list[RequestOutput]]] = {
    "offline": _Scheduler.run,
    "online": _online,
}


def _add_options(parser: ArgumentParser) -> None:
    told = "offline: the scheduler runs to the end by itself; online: step by step"
    parser.add_argument("--mode", choices=MODES, default="online", help=told)


def _runs(options: Namespace) -> dict[str, Run]:
    return {options.mode: partial(run_scheduler, mode=options.mode)}


BENCHMARK = Benchmark("scheduler", __doc__, _add_options, _runs)
main = command(BENCHMARK.run)


if __name__ == "__main__":
    sys.exit(main())
