"""Measure whether this checkout's engine is as fast as that of an earlier commit, in alternation.

For each workload the benchmark's command runs with the package of one commit, then with that of the other,
each time in a new process and on that version's best rung. Both versions must generate equally many tokens.
The output says whether the tokens are the same; in 16-bit dtypes they may differ, because the order of
summation does.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import rosellm
from rosellm import errors
from rosellm.bench.record import across_repeats
from rosellm.bench.workloads import ALL_WORKLOADS
from rosellm.environment import CHECKOUT
from rosellm.errors import OptionError, RoseError
from rosellm.lab.records.experiment import Asked, Experiment, Record, in_parts
from rosellm.lab.records.records import percent_change
from rosellm.lab.records.turns import in_turns

NAME = "versions"
OLD, NEW = "old", "new"
MEASURED = ("W0", "W1", "W2", "W3", "W4", "W5", "W6", "W7")
RUNS = {"cuda": (1, 3), "cpu": (0, 1)}  # of a process: unmeasured and measured

Sides = Mapping[str, dict[str, Any]]


@contextmanager
def package_of(commit: str) -> Iterator[Path]:
    """Yield a temporary folder that contains the package at a commit; raise RoseError if git lacks it."""
    archive = _git("archive", commit, "rosellm")
    with TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as members:
            members.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 and later
            members.extractall(folder)
        yield Path(folder)


def full_hash(revision: str) -> str:
    """Return the full hash of the commit that a revision names; raise RoseError if there is none."""
    return _git("rev-list", "--max-count=1", "--end-of-options", revision).decode().strip()


def _git(*arguments: str) -> bytes:
    try:
        done = subprocess.run(["git", "-C", str(CHECKOUT), *arguments], capture_output=True, check=False)
    except OSError as error:
        raise RoseError(f"git cannot be run: {errors.describe(error)}") from None
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip() or "there is none in this checkout"
        raise RoseError(f"commit {errors.describe(arguments[-1])}: {' '.join(reason.split())}")
    return done.stdout


def measure(asked: Asked) -> Iterator[Record]:
    """Measure each workload with both versions; print the result after each."""
    facts = {"model": asked.model, "load_format": asked.load_format, "size": asked.size.name}
    begun = asked.record(NAME, **facts, old_commit=full_hash(asked["old"]), figures={})
    with package_of(begun["old_commit"]) as old:
        packages = {OLD: old, NEW: Path(rosellm.__file__).parents[1]}
        parts = {name: partial(measure_workload, asked, packages, name) for name in asked["workloads"]}
        yield from in_parts(asked, begun, parts, told, order=list(ALL_WORKLOADS).index)


def measure_workload(asked: Asked, packages: Mapping[str, Path], workload: str) -> Sides:
    """Measure one workload with both versions; return side → figures of every process, and their medians.

    packages: side → folder that contains its package.

    Raises RoseError if a process fails, or if the two make different numbers of tokens.
    """
    warm_ups, repeats = RUNS[asked.device]
    more = "--paged-attn", "--cuda-graph", "--warmup-runs", warm_ups, "--repeat-runs", repeats
    form, options = ALL_WORKLOADS[workload].form, asked.benchmark_options(workload, *more)
    sides = {side: partial(run_version, side, folder, form, options) for side, folder in packages.items()}
    found = in_turns(sides, asked["repeats"], warm_up=False)
    figures = {side: across_repeats(own) for side, own in found.items()}
    if len(_all_of("completion_tokens", figures)) > 1:
        raise RoseError(f"{workload}: the runs make different numbers of tokens")
    return figures


def run_version(side: str, folder: Path, form: str, options: list[str]) -> dict[str, Any]:
    """Run a benchmark's command with the package in ``folder``; return its rung, and medians of its runs.

    side: the version's name, for error messages.
    form, options: the benchmark, "scheduler" or "streaming", and its command-line options.

    Raises RoseError with the last line of the process's standard error if it fails.
    """
    with TemporaryDirectory() as out:
        path = Path(out) / "record.json"
        command = [sys.executable, "-m", f"rosellm.roseinfer.benchmark_{form}", *options, "--json", str(path)]
        environment = os.environ | {"PYTHONPATH": str(folder)}
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
            raise RoseError(f"the {side} version: {said[-1].removeprefix('error: ')}")
        record = json.loads(path.read_text(encoding="utf-8"))
    (result,) = record["results"].values()
    medians, last = result["medians"], result["repeats"][-1]
    return {
        "rung": record["rung"],
        "tok_s": medians["completion_tokens"] / medians["total_time_s"],
        "completion_tokens": last["completion_tokens"],
        "tokens_sha256": last["tokens_sha256"],
    }


def _all_of(name: str, figures: Sides) -> set[Any]:
    """Return the distinct values of a figure over all processes of both sides."""
    return {one[name] for side in figures.values() for one in side["repeats"]}


def told(name: str, figures: Sides) -> str:
    """Describe in one line the medians of a workload, and whether all runs generated the same tokens."""
    old, new = (figures[side]["medians"]["tok_s"] for side in (OLD, NEW))
    tokens = (
        "the same tokens" if len(_all_of("tokens_sha256", figures)) == 1 else "not always the same tokens"
    )
    return f"{name}, tok/s: {OLD} {old:,.0f}, {NEW} {new:,.0f} ({percent_change(old, new)}), {tokens}"


def _refuse(asked: Asked) -> None:
    if not asked["workloads"]:
        raise OptionError(f"--workloads names none; use {', '.join(ALL_WORKLOADS)}")
    if asked["old"] is None:
        raise OptionError("versions needs --old, a commit of this checkout to compare with")
    full_hash(asked["old"])


DEFAULTS = {"old": None, "workloads": MEASURED, "repeats": 5}
EXPERIMENTS = [Experiment(NAME, measure, DEFAULTS, refuse=_refuse)]
