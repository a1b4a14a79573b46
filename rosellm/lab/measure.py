"""Measure the committed records of a GPU: ``python -m rosellm.lab.measure --output FOLDER``.

Runs every workload on every rung through the benchmark commands, then the experiments behind the notebooks'
figures. Each job writes one JSON file; an interrupted run loses only the job in progress. On a CPU everything
is small: the shipped model, few rows, few tokens.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

from rosellm.bench.record import write_record
from rosellm.command_line import OneLineParser, command, whole_number
from rosellm.errors import RoseError
from rosellm.lab.records.jobs import Job, free_memory, make_record, plan
from rosellm.lab.records.measured_model import add_model_options
from rosellm.lab.running.interruption import Interruption
from rosellm.lab.running.sweep import Sweep, add_cluster_option


@command
def main(argv: list[str] | None = None) -> None:
    """Check all arguments, then measure job by job."""
    arguments = _parser().parse_args(argv)
    if arguments.cluster is None:
        measure_here(arguments)
    else:
        sweep(arguments)


def measure_here(arguments: argparse.Namespace) -> None:
    """Run every job in this process, one after the other."""
    arguments, jobs = plan(arguments)
    arguments.output.mkdir(parents=True, exist_ok=True)
    with redirect_stdout(DummyTqdmFile(sys.stdout)), tqdm(jobs.items(), unit="job") as bar:  # type: ignore[type-var]
        for name, job in bar:
            bar.set_postfix_str(name)
            start = time.perf_counter()
            job(arguments)
            free_memory()
            tqdm.write(f"[{time.perf_counter() - start:6.1f} s] {name}")


def sweep(arguments: argparse.Namespace) -> None:
    """Run every job without a record on the cluster's machines, and write the records here.

    The plan is made on such a machine too, since this one need not have a GPU. If jobs fail, raises
    ``RoseError`` after the others; after an interruption, ``SystemExit``.
    """
    with Interruption() as interruption, Sweep(arguments.cluster, interruption) as machines:
        on_gpu = machines.takes_gpu(arguments.device)
        arguments.device = "cuda" if on_gpu else "cpu"
        arguments, jobs = machines.call(partial(plan, arguments), on_gpu)
        left = _left(jobs, arguments.output)
        tasks = {name: partial(make_record, name, job, arguments) for name, job in left.items()}
        ended, failed = [], {}
        for name, finished in machines.run(tasks, on_gpu, "record"):
            ended.append(name)
            if finished.error:
                failed[name] = finished.error
            else:
                write_record(arguments.output / f"{name}.json", finished.value)
    for name, error in failed.items():
        print(f"FAILED {name}: {error}", file=sys.stderr)
    if interruption.number is not None:
        print(interruption.told(ended, left), file=sys.stderr)
        raise SystemExit(interruption.exit_code)
    if failed:
        raise RoseError(f"{len(failed)} of {len(jobs)} records are missing; the same command continues there")


def _left(jobs: dict[str, Job], output: Path) -> dict[str, Job]:
    """Return the jobs without a record in ``output``, which is created if missing."""
    output.mkdir(parents=True, exist_ok=True)
    left = {name: job for name, job in jobs.items() if not (output / f"{name}.json").is_file()}
    if len(left) < len(jobs):
        print(f"{len(jobs) - len(left)} of {len(jobs)} records are in {output} already")
    return left


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="python -m rosellm.lab.measure", description=__doc__)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder for the records; created if missing")
    add("--workloads", default="W0,W1,W2,W3,W4,W5", help="comma-separated; '' for none")
    add("--rungs", help="comma-separated, for workloads only; default: all; experiments always run all")
    add("--experiments", help="comma-separated; '' for none; default: all that can run here")
    add_model_options(parser)
    add("--repeats", type=whole_number(1), default=3, help="measured runs of each benchmark")
    add_cluster_option(parser)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
