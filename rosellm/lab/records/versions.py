"""Measure whether this checkout's engine is as fast as an earlier commit's: alternating whole runs.

A sample is a process that runs the benchmark of one side's package on that side's best rung or the given one;
the sides alternate. Both must generate equally many tokens; the output says whether they are the same tokens,
which may differ in 16 bits with the order of summation.
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
from rosellm.lab.records.earlier import in_parts
from rosellm.lab.records.experiment import Asked, Experiment, Record
from rosellm.lab.records.records import percent_change
from rosellm.lab.records.turns import in_turns

NAME = "versions"
OLD, NEW = "old", "new"
MEASURED = ("W0", "W1", "W2", "W3", "W4", "W5", "W6", "W7")
RUNS = {"cuda": 5, "cpu": 1}  # measured runs of a sample


def sample(name: str, folder: Path, form: str, options: list[str]) -> dict[str, Any]:
    """Return the record of a benchmark by the package in ``folder``, run in a new process.

    Raises RoseError, naming the side, with the process's last line if it fails.
    """
    with TemporaryDirectory() as place:
        path = Path(place) / "run.json"
        done = subprocess.run(
            [
                sys.executable,
                "-P",
                "-m",
                f"rosellm.roseinfer.benchmark_{form}",
                *options,
                "--json",
                str(path),
            ],
            env=os.environ | {"PYTHONPATH": str(folder)},
            cwd=folder,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
            raise RoseError(f"the {name} side: {said[-1].removeprefix('error: ')}")
        return json.loads(path.read_text())


@contextmanager
def files_of(commit: str) -> Iterator[Path]:
    """Yield a folder with the files of a commit. Raises RoseError if git does not have it."""
    archive = _git(
        "archive", commit, *(f":(exclude)notebooks/{left_out}" for left_out in ("*.ipynb", "results"))
    )
    with TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as members:
            members.extractall(folder, filter="data")
        yield Path(folder)


def full_hash(revision: str) -> str:
    """Return the commit that a revision names. Raises RoseError if there is none."""
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
    """Sample each workload on both sides; print the result after each."""
    facts = {"model": asked.model, "load_format": asked.load_format, "size": asked.size.name}
    begun = asked.record(NAME, **facts, rung=asked["rung"], old_commit=full_hash(asked["old"]), figures={})
    with files_of(begun["old_commit"]) as old:
        sides = {OLD: old, NEW: Path(rosellm.__file__).parents[1]}
        parts = {name: partial(measure_workload, asked, sides, name) for name in asked["workloads"]}
        path, order = asked.folder / f"{NAME}.json", list(ALL_WORKLOADS).index
        for record, name, figures in in_parts(path, begun, parts, order=order):
            yield record
            print(told(name, figures), flush=True)


def measure_workload(asked: Asked, sides: Mapping[str, Path], workload: str) -> dict[str, dict[str, Any]]:
    """Return side → its rung, KV blocks and samples. sides: name → folder with the package.

    Raises RoseError if the sides' numbers of generated tokens differ.
    """
    rung = ("--rung", asked["rung"]) if asked["rung"] else ("--paged-attn", "--cuda-graph")
    runs = "--warmup-runs", 1, "--repeat-runs", RUNS[asked.device]
    form, options = ALL_WORKLOADS[workload].form, asked.benchmark_options(workload, *rung, *runs)
    samples = {name: partial(sample, name, folder, form, options) for name, folder in sides.items()}
    found = in_turns(samples, asked["repeats"], warm_up=False)
    figures = {name: _figures(records) for name, records in found.items()}
    if len(all_of("completion_tokens", figures)) > 1:
        raise RoseError(f"{workload}: the runs make different numbers of tokens")
    return figures


def _figures(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a side's engine and, for each sample, the tokens per second over all its runs."""
    repeats = []
    for record in records:
        (result,) = record["results"].values()
        names = "completion_tokens", "total_time_s", "tokens_sha256"
        tokens, seconds, digests = ([run[name] for run in result["repeats"]] for name in names)
        total = {"total_time_s": sum(seconds), "tok_s": sum(tokens) / sum(seconds)}
        repeats.append(total | {"completion_tokens": tokens, "tokens_sha256": sorted(set(digests))})
    engine = {name: records[0][name] for name in ("rung", "num_kv_blocks")}
    return {**engine, "repeat_runs": len(repeats), **across_repeats(repeats)}


def all_of(name: str, figures: Mapping[str, Mapping[str, Any]]) -> set[Any]:
    """Return the values of a figure over all samples of both sides."""
    return {value for side in figures.values() for one in side["repeats"] for value in one[name]}


def told(name: str, figures: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe a workload's medians in one line, and whether all runs gave the same tokens."""
    old, new = (figures[side]["medians"]["tok_s"] for side in (OLD, NEW))
    tokens = "the same tokens" if len(all_of("tokens_sha256", figures)) == 1 else "not always the same tokens"
    return f"{name}, tok/s: {OLD} {old:,.0f}, {NEW} {new:,.0f} ({percent_change(old, new)}), {tokens}"


def _refuse(asked: Asked) -> None:
    if not asked["workloads"]:
        raise OptionError(f"--workloads names none; use {', '.join(ALL_WORKLOADS)}")
    if asked["old"] is None:
        raise OptionError("versions needs --old, a commit of this checkout to compare with")
    full_hash(asked["old"])


DEFAULTS = {"old": None, "rung": None, "workloads": MEASURED, "repeats": 5}
EXPERIMENTS = [Experiment(NAME, measure, DEFAULTS, refuse=_refuse)]
