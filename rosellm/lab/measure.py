"""Measure records: ``python -m rosellm.lab.measure NAME… --output FOLDER``.

A NAME is that of a record, or of a workload of GPT-2, for all rungs. Each writes one file; an interrupted run
loses only the one in progress. Records of a model other than GPT-2 are in a folder of its name. On a CPU all
is small: the shipped model, few rows, few tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

from rosellm.bench.record import write_record
from rosellm.bench.workloads import ALL_WORKLOADS
from rosellm.command_line import ScreenParser, command, whole_number
from rosellm.errors import RoseError
from rosellm.lab.records.registry import EXPERIMENTS, Job, plan
from rosellm.lab.records.sizes import SIZES
from rosellm.lab.running.interruption import Interruption
from rosellm.lab.running.sweep import Sweep, add_cluster_option
from rosellm.models.loading import LOAD_FORMATS
from rosellm.roseinfer.recipe import recipe_choices


@command
def main(argv: list[str] | None = None) -> None:
    """Check all arguments, then measure one job after the other, here or on a cluster."""
    given = parse(argv)
    if given.cluster is None:
        measure_here(given)
    else:
        sweep(given)


def measure_here(given: argparse.Namespace) -> None:
    """Run every job in this process, one after the other."""
    jobs = plan(given)
    bar = tqdm(jobs, unit="record", disable=len(jobs) == 1)
    with redirect_stdout(DummyTqdmFile(sys.stdout)), bar:  # type: ignore[type-var]
        for job in bar:
            bar.set_postfix_str(job.name)
            start = time.perf_counter()
            job.run()
            tqdm.write(f"[{time.perf_counter() - start:6.1f} s] {job.name}")


def sweep(given: argparse.Namespace) -> None:
    """Run every job that has no record yet on the cluster's machines, and write the records here.

    The jobs are also selected on a machine of the cluster, since this machine may have no GPU. If a job
    fails, the remaining jobs run and ``RoseError`` is raised at the end. An interruption raises
    ``SystemExit``.
    """
    with Interruption() as interruption, Sweep(given.cluster, interruption) as machines:
        on_gpu = machines.takes_gpu(given.device)
        given.device = "cuda" if on_gpu else "cpu"
        jobs = {job.name: job for job in machines.call(partial(plan, given), on_gpu)}
        left = {name: job for name, job in jobs.items() if not job.path.is_file()}
        if len(left) < len(jobs):
            print(f"{len(jobs) - len(left)} of {len(jobs)} records are in {given.output} already")
        tasks = {name: partial(make_record, job) for name, job in left.items()}
        ended, failed = [], {}
        for name, finished in machines.run(tasks, on_gpu, "record"):
            ended.append(name)
            if finished.error:
                failed[name] = finished.error
            else:
                jobs[name].path.parent.mkdir(parents=True, exist_ok=True)
                write_record(jobs[name].path, finished.value)
    for name, error in failed.items():
        print(f"FAILED {name}: {error}", file=sys.stderr)
    interruption.exit_unless_done(ended, list(left))
    if failed:
        raise RoseError(f"{len(failed)} of {len(jobs)} records are missing; the same command continues there")


def make_record(job: Job) -> dict[str, Any]:
    """Run ``job`` in a temporary folder, and return its record."""
    with tempfile.TemporaryDirectory() as folder:
        elsewhere = job.in_folder(Path(folder))
        elsewhere.run()
        return json.loads(elsewhere.path.read_text(encoding="utf-8"))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line.

    An option in ``OPTIONS`` is an attribute of the result only if it is given; ``options`` lists these.
    """
    details = "options of single records"
    parser = ScreenParser(details=(details,), prog="python -m rosellm.lab.measure", description=__doc__)
    add = parser.add_argument
    add("names", nargs="+", metavar="NAME", help="records or workloads")
    add("--output", type=Path, default=Path("build/records"), metavar="DIR", help="folder of the records")
    add("--model", help="shape of the model; default: the experiment's own, at size small the shipped one")
    add("--load-format", choices=LOAD_FORMATS, help="default: dummy; auto for a shipped model")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: cuda if there is one")
    add("--size", choices=tuple(SIZES), help="default: full on a GPU, small on a CPU")
    add_cluster_option(parser)
    add = parser.add_argument_group(details).add_argument
    for name, option in OPTIONS.items():
        takers = dict.fromkeys(one.label for one in EXPERIMENTS.values() if name in one.options)
        told = f"{option['help']} ({', '.join(takers)})"
        add(f"--{name.replace('_', '-')}", **option | {"default": argparse.SUPPRESS, "help": told})
    given = parser.parse_args(argv)
    given.options = [name for name in OPTIONS if name in given]
    return given


def listed(known: Any) -> Any:
    """Return an argparse type that parses comma-separated names, each of which must be in ``known``."""

    def parse_names(text: str) -> tuple[str, ...]:
        names = tuple(filter(None, text.split(",")))
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is unknown; use {', '.join(known)}")
        return names

    return parse_names


_NAMES = {"metavar": "NAME,NAME"}
OPTIONS: dict[str, dict[str, Any]] = {
    "repeats": {"type": whole_number(1), "metavar": "N", "help": "measured runs or turns of each side"},
    "workloads": _NAMES | {"type": listed(ALL_WORKLOADS), "help": "parts of the record"},
    "old": {"metavar": "COMMIT", "help": "commit of this checkout to compare with"},
    "ranks": {"type": whole_number(2), "metavar": "N", "help": "default: all GPUs of this host; on a CPU 2"},
    "all_reduce": _NAMES | {"type": listed(recipe_choices()["all_reduce"]), "help": "ways to sum"},
}


if __name__ == "__main__":
    raise SystemExit(main())
