"""Measure whether this checkout's engine is as fast as that of an earlier commit, by alternating whole runs.

For each workload, each of the two versions runs in a process that imports the package of its commit and
builds an engine with that version's best rung. Samples alternate; each consists of whole runs that take a
second or more. Both versions must generate equally many tokens. The output says whether the tokens are the
same; in 16-bit dtypes they may differ, because the order of summation does.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, cast

import rosellm
from rosellm import errors
from rosellm.bench.workloads import ALL_WORKLOADS
from rosellm.environment import CHECKOUT
from rosellm.errors import OptionError, RoseError
from rosellm.lab.records import version_side
from rosellm.lab.records.experiment import Asked, Experiment, Record, in_parts
from rosellm.lab.records.records import percent_change
from rosellm.lab.records.turns import runs_in_turns

NAME = "versions"
OLD, NEW = "old", "new"
MEASURED = ("W0", "W1", "W2", "W3", "W4", "W5", "W6", "W7")
SAMPLE_S = 1.0  # duration of a sample's runs on a GPU


class Side:
    """A process that runs a benchmark with one version of the package.

    name: of the side, for error messages.
    folder: contains the package.
    form, options: the benchmark, "scheduler" or "streaming", and its command-line options.

    Methods raise RoseError if the process has failed or ended.
    """

    def __init__(self, name: str, folder: Path, form: str, options: list[str]) -> None:
        self._name, self._folder = name, folder
        environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
        command_line, pipe = [sys.executable, version_side.__file__, form, *options], subprocess.PIPE
        self._process = subprocess.Popen(
            command_line, env=environment, cwd=folder, stdin=pipe, stdout=pipe, text=True
        )

    def engine(self) -> dict[str, Any]:
        """Wait until the process has served the requests once; return its rung and number of KV blocks.

        Raises RoseError if it imported another package than the one in ``folder``.
        """
        answer = self._answer()
        if Path(package := answer.pop("package")) != (self._folder / "rosellm").resolve():
            raise RoseError(f"the {self._name} side imports {package}, not its own package")
        return answer

    def sample(self, seconds: float) -> dict[str, Any]:
        """Let the process run at least once, until its runs took ``seconds`` in total; return the figures."""
        print(seconds, file=cast(IO[str], self._process.stdin), flush=True)
        return self._answer()

    def close(self) -> None:
        """Kill the process, whatever it is doing."""
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        line = cast(IO[str], self._process.stdout).readline()
        if not line:
            raise RoseError(f"the {self._name} side ended with status {self._process.wait()}; see above")
        answered = cast(dict[str, Any], json.loads(line))
        if "error" in answered:
            raise RoseError(f"the {self._name} side: {answered['error']}")
        return answered


@contextmanager
def package_of(commit: str) -> Iterator[Path]:
    """Yield a temporary folder that contains the package at a commit; raise RoseError if git lacks it."""
    archive = _git("archive", commit, "rosellm")
    with TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as members:
            members.extractall(folder, filter="data")
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


def measure_workload(asked: Asked, packages: Mapping[str, Path], workload: str) -> dict[str, dict[str, Any]]:
    """Measure one workload with both versions; return side → facts about its engine, and its samples.

    packages: side → folder that contains its package.

    Raises RoseError if the KV caches of the two differ in size, or their runs in the number of tokens.
    """
    form = ALL_WORKLOADS[workload].form
    options = asked.benchmark_options(workload, "--paged-attn", "--cuda-graph")  # each side's best rung
    seconds = SAMPLE_S if asked.device == "cuda" else 0.0
    engines, samples = dict[str, dict[str, Any]](), dict[str, Callable[[], dict[str, Any]]]()
    with ExitStack() as stack:
        for name, folder in packages.items():
            side = stack.enter_context(closing(Side(name, folder, form, options)))
            engines[name], samples[name] = side.engine(), partial(side.sample, seconds)
        _check_caches(workload, {name: engine["num_kv_blocks"] for name, engine in engines.items()})
        found = runs_in_turns(samples, asked["repeats"])
    if len(all_of("completion_tokens", found)) > 1:
        raise RoseError(f"{workload}: the runs make different numbers of tokens")
    return {name: {**engines[name], **figures} for name, figures in found.items()}


def _check_caches(workload: str, blocks: Mapping[str, int]) -> None:
    """Raise RoseError unless both engines, which share memory, have equally many KV blocks."""
    if len(set(blocks.values())) > 1:
        counts = ", ".join(f"{name} {n:,}" for name, n in blocks.items())
        raise RoseError(f"{workload}: memory has no room for two such KV caches: blocks {counts}")


def all_of(name: str, figures: Mapping[str, Mapping[str, Any]]) -> set[Any]:
    """Return the distinct values of a list-valued figure over all samples of both sides."""
    return {value for side in figures.values() for one in side["repeats"] for value in one[name]}


def told(name: str, figures: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe in one line the medians of a workload, and whether all runs generated the same tokens."""
    old, new = (figures[side]["medians"]["tok_s"] for side in (OLD, NEW))
    tokens = "the same tokens" if len(all_of("tokens_sha256", figures)) == 1 else "not always the same tokens"
    return f"{name}, tok/s: {OLD} {old:,.0f}, {NEW} {new:,.0f} ({percent_change(old, new)}), {tokens}"


def _refuse(asked: Asked) -> None:
    if not asked["workloads"]:
        raise OptionError(f"--workloads names none; use {', '.join(ALL_WORKLOADS)}")
    if asked["old"] is None:
        raise OptionError("versions needs --old, a commit of this checkout to compare with")
    full_hash(asked["old"])


DEFAULTS = {"old": None, "workloads": MEASURED, "repeats": 5}
EXPERIMENTS = [Experiment(NAME, measure, DEFAULTS, refuse=_refuse)]
