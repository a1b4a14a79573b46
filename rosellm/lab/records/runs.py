"""Whole runs of the workloads: GPT-2's on every rung, a modern model's on the best one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from rosellm.bench import benchmark_scheduler, benchmark_streaming
from rosellm.bench.workloads import ALL_WORKLOADS, MODEL_WORKLOADS, MODERN_MODEL, WORKLOADS
from rosellm.lab.records.experiment import Asked, Experiment, Record
from rosellm.lab.records.rungs import check_rung
from rosellm.lab.records.sizes import Size
from rosellm.roseinfer.recipe import LADDER

BENCHMARKS = {"scheduler": benchmark_scheduler.BENCHMARK, "streaming": benchmark_streaming.BENCHMARK}


def whole_run(asked: Asked, workload: str, options: tuple[str, ...], warmups: int = 1) -> Iterator[Record]:
    """Run a workload's benchmark with ``options``, ``warmups`` and ``asked["repeats"]`` times."""
    benchmark = BENCHMARKS[ALL_WORKLOADS[workload].form]
    more = *options, "--warmup-runs", warmups, "--repeat-runs", asked["repeats"]
    given = benchmark.parse_options(asked.benchmark_options(workload, *more))
    yield benchmark.measure(given, asked.gpt, asked.tokenizer)


def _check(asked: Asked, rung: str) -> None:
    check_rung(rung, asked.where, asked.arch)


def positions_of(size: Size, workload: str) -> int:
    """Return the positions that a workload's longest request needs."""
    w = size.of(ALL_WORKLOADS[workload])
    return w.shared_prefix_tokens + max(w.prompt_repeats) * (w.prompt_tokens or 1) + w.max_new_tokens


def _experiment(name: str, workload: str, *options: str, **places: Any) -> Experiment:
    measure = partial(whole_run, workload=workload, options=options)
    return Experiment(
        name, measure, {"repeats": 3}, positions=partial(positions_of, workload=workload), **places
    )


EXPERIMENTS = [
    *(
        _experiment(f"{name}-{rung}", name, "--rung", rung, refuse=partial(_check, rung=rung))
        for name in WORKLOADS
        for rung in LADDER
    ),
    *(
        _experiment(name, name, "--mode", "offline", model=MODERN_MODEL, own_folder=True)
        for name in MODEL_WORKLOADS
    ),
]
