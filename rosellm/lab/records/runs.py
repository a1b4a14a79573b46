"""Experiments that run whole workloads: of GPT-2 on every rung, of a modern model on the best rung."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from rosellm.bench import benchmark_scheduler, benchmark_streaming
from rosellm.bench.workloads import ALL_WORKLOADS, MODEL_WORKLOADS, MODERN_MODEL, WORKLOADS
from rosellm.errors import RecipeError
from rosellm.lab.records.experiment import Asked, Experiment, Record
from rosellm.models.arch import Arch
from rosellm.roseinfer.recipe import LADDER, check_launch

# Measured runs of a workload, by the spread of earlier ones: docs/reproduce.md says how.
REPEATS = dict.fromkeys(("W0", "W1", "W2", "W6", "W7", "PFX"), 3)
REPEATS |= dict.fromkeys(("W8", "W9", "W10", "PRE"), 5) | dict.fromkeys(("W3", "W4"), 7)
REPEATS |= dict.fromkeys(("W5", "D1", "D8", "D64", "P512", "MIX", "L8K", "L32K"), 2)
REPEATS |= dict.fromkeys(("TTFT64", "TTFT1K"), 15)
BENCHMARKS = {"scheduler": benchmark_scheduler.BENCHMARK, "streaming": benchmark_streaming.BENCHMARK}


def check_rung(rung: str, device: torch.device, arch: Arch) -> None:
    """Raise ``RecipeError`` if the rung cannot run on this device, or cannot run a model of this shape."""
    try:
        if LADDER[rung].launch == "autotuned" and device.type == "cpu":
            raise RecipeError("it needs a GPU: a CPU has no launch to tune")
        check_launch(LADDER[rung], device)
        LADDER[rung].check_serves(arch)
    except RecipeError as error:
        raise RecipeError(f"rung {rung!r}: {error}") from None


def runnable(device: torch.device, arch: Arch) -> list[str]:
    """Return the rungs that can run a model of this shape on the device, in the ladder's order."""

    def can_run(rung: str) -> bool:
        try:
            check_rung(rung, device, arch)
        except RecipeError:
            return False
        return True

    return [rung for rung in LADDER if can_run(rung)]


def whole_run(asked: Asked, workload: str, options: tuple[str, ...]) -> Iterator[Record]:
    """Run the benchmark of a workload, and yield its record.

    asked: its option "repeats" is the number of measured runs; "warmups", 1 if absent, of those before.
    options: further command-line options.
    """
    benchmark = BENCHMARKS[ALL_WORKLOADS[workload].form]
    runs = "--warmup-runs", asked.options.get("warmups", 1), "--repeat-runs", asked["repeats"]
    given = benchmark.parse_options(asked.benchmark_options(workload, *options, *runs))
    yield benchmark.measure(given, asked.gpt, asked.tokenizer)


def _experiment(name: str, workload: str, *options: str, **places: Any) -> Experiment:
    measure = partial(whole_run, workload=workload, options=options)
    return Experiment(name, measure, {"repeats": REPEATS[workload]}, workloads=[workload], **places)


def _on_rung(workload: str, rung: str) -> Experiment:
    def refuse(asked: Asked) -> None:
        check_rung(rung, asked.where, asked.arch)

    return _experiment(f"{workload}-{rung}", workload, "--rung", rung, refuse=refuse)


EXPERIMENTS = [_on_rung(workload, rung) for workload in WORKLOADS for rung in LADDER] + [
    _experiment(name, name, "--mode", "offline", model=MODERN_MODEL, own_folder=True)
    for name in MODEL_WORKLOADS
]
