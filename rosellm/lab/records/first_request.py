"""Measure what the first request of a process waits for, with and without a warm-up.

Fresh processes load a model, build its engine and run workload W8 three times: first with an empty cache of
compiled Triton kernels, then with the cache so filled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rosellm.bench.workloads import WORKLOADS
from rosellm.errors import RoseError
from rosellm.lab.records.experiment import Asked, Experiment, Record
from rosellm.lab.records.records import Results

WORKLOAD = WORKLOADS["W8"]
CHILD = (sys.executable, "-m", "rosellm.lab.records.first_process")
CACHES = ("empty", "filled")  # state of the kernel cache at a process's start


def first_process(
    options: Sequence[str], warm_up: bool = True, kernel_cache: Path | None = None
) -> dict[str, Any]:
    """Run ``first_process.first_figures`` in a new process.

    options: command-line options of the scheduler's benchmark. kernel_cache: folder for Triton's compiled
    kernels; None for Triton's default. Raises ``RoseError`` with the process's last line if it fails.
    """
    own = {} if kernel_cache is None else {"TRITON_CACHE_DIR": str(kernel_cache)}
    switch = "--warm-up" if warm_up else "--no-warm-up"
    done = subprocess.run(
        [*CHILD, "--started", repr(time.time()), switch, *options],
        env=os.environ | own,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise RoseError(f"the new process failed: {said[-1].removeprefix('error: ')}")
    return json.loads(done.stdout.splitlines()[-1])


def construction_s(process: dict[str, Any]) -> float:
    """Return the seconds of ``LLM(...)``: loading, building, warming up."""
    return sum(process["parts_s"][part] for part in ("load", "build", "warm_up"))


def measure(options: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run, with and without a warm-up, a process with an empty kernel cache and one with a filled cache."""
    for warm_up in (True, False):
        with tempfile.TemporaryDirectory(prefix="rosellm-kernels-") as folder:
            for cache in CACHES:
                found = first_process(options, warm_up, Path(folder))
                yield {"warm_up": warm_up, "cache": cache, **found}


def recorded(results: Results) -> list[dict[str, Any]]:
    """Return the recorded processes. Raises ``RecordError``."""
    return results.figures("first_request", "processes")


def run_ratio(process: dict[str, Any]) -> float:
    """Return the first run's throughput over the third's."""
    first, *_, third = process["runs"]
    return first["throughput_tok_s"] / third["throughput_tok_s"]


def told(process: dict[str, Any]) -> str:
    """Describe a process in one line."""
    runs = ", ".join(f"{run['throughput_tok_s']:,.0f}" for run in process["runs"])
    late = sum(run["late_captures"] for run in process["runs"])
    way = "warm-up" if process["warm_up"] else "no warm-up"
    return (
        f"{way}, {process['cache']} cache: {construction_s(process):.1f} s of construction, "
        f"{process['graphs']} graphs; runs of {runs} tok/s, {late} late captures"
    )


def record(asked: Asked) -> Iterator[Record]:
    """Run the processes one after the other; print a line for each."""
    options, processes = asked.benchmark_options(WORKLOAD.id), []
    for _ in range(asked["repeats"]):
        for process in measure(options):
            processes.append(process)
            print(told(process), flush=True)
    facts = {"model": asked.model, "workload": WORKLOAD.id, "options": options, "size": asked.size.name}
    yield asked.record("first_request", **facts, figures={"processes": processes})


EXPERIMENTS = [Experiment("first_request", record, {"repeats": 1})]
