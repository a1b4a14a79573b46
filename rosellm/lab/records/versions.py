"""Measure whether this checkout's engine is as fast as an earlier commit's: alternating whole runs.

Each side is a process with the package of its commit, its own best rung or the given one, and an engine for
the current workload; samples of a second or more of whole runs alternate. Both must generate equally many
tokens; the output says whether they are the same tokens, which may differ in 16 bits with the order of
summation. The record, rewritten after each workload, is DIR/versions.json, in DIR/MODEL if the model is not
W1's own; it keeps other workloads of the same two commits.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, cast

import torch

import rosellm
from rosellm import errors
from rosellm.bench.record import check_writable, new_record, write_record
from rosellm.bench.workloads import ALL_WORKLOADS, WORKLOADS, Workload
from rosellm.command_line import OneLineParser, command, whole_number
from rosellm.environment import CHECKOUT
from rosellm.errors import RoseError
from rosellm.lab.records import version_side
from rosellm.lab.records.earlier import kept_parts
from rosellm.lab.records.measured_model import add_model_options, folder_of, settle, workloads_named
from rosellm.lab.records.parameters import model_path
from rosellm.lab.records.records import percent_change
from rosellm.lab.records.turns import in_turns

NAME = "versions"
OLD, NEW = "old", "new"
MEASURED = "W0,W1,W2,W3,W4,W5,W6,W7"
SAMPLE_S = 1.0  # duration of a sample's runs on a GPU


class Side:
    """A process that runs the package in ``folder``. Raises RoseError if the process ends prematurely."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._folder = name, folder
        environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
        command_line, pipe = [sys.executable, version_side.__file__], subprocess.PIPE
        self._process = subprocess.Popen(
            command_line, env=environment, cwd=folder, stdin=pipe, stdout=pipe, text=True
        )

    def prepare(self, form: str, options: list[str]) -> dict[str, Any]:
        """Build the engine for a benchmark and serve its requests once; return its rung and KV blocks."""
        answer = self._ask([form, options])
        if Path(package := answer.pop("package")) != (self._folder / "rosellm").resolve():
            raise RoseError(f"the {self._name} side imports {package}, not its own package")
        return answer

    def sample(self, seconds: float) -> dict[str, Any]:
        """Return the figures of runs that take ``seconds`` together; at least one runs."""
        return self._ask(seconds)

    def close(self) -> None:
        """Kill the process, whatever it is doing."""
        self._process.kill()
        self._process.communicate()

    def _ask(self, asked: object) -> dict[str, Any]:
        to, answers = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)
        try:
            print(json.dumps(asked), file=to, flush=True)
            answer = answers.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RoseError(f"the {self._name} side ended with status {self._process.wait()}; see above")
        answered = cast(dict[str, Any], json.loads(answer))
        if "error" in answered:
            raise RoseError(f"the {self._name} side: {answered['error']}")
        return answered


@contextmanager
def package_of(commit: str) -> Iterator[Path]:
    """Yield a folder with the package as of a commit. Raises RoseError if git does not have it."""
    archive = _git("archive", commit, "rosellm")
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


def measure(arguments: Namespace) -> None:
    """Sample each workload; rewrite the record and print the result after each.

    Raises ``RecordError``, before measuring, if the record would lose other workloads.
    """
    arguments.old = full_hash(arguments.old)
    path = check_writable(folder_of(arguments.output, arguments.model, WORKLOADS["W1"]) / f"{NAME}.json")
    figures = kept_parts(path, _record(arguments, {}), [workload.id for workload in arguments.workloads])
    with ExitStack() as stack:
        folders = {
            OLD: stack.enter_context(package_of(arguments.old)),
            NEW: Path(rosellm.__file__).parents[1],
        }
        sides = {name: Side(name, folder) for name, folder in folders.items()}
        for side in sides.values():
            stack.callback(side.close)
        for workload in arguments.workloads:
            figures[workload.id] = measure_workload(arguments, sides, workload)
            write_record(path, _record(arguments, figures))
            print(told(workload.id, figures[workload.id]), flush=True)


def measure_workload(
    arguments: Namespace, sides: Mapping[str, Side], workload: Workload
) -> dict[str, dict[str, Any]]:
    """Return side → its engine and samples.

    Raises RoseError if the sides' KV caches or their numbers of generated tokens differ.
    """
    options = _options(arguments, workload)
    engines = {name: side.prepare(workload.form, options) for name, side in sides.items()}
    _check_caches(workload, {name: engine["num_kv_blocks"] for name, engine in engines.items()})
    seconds = SAMPLE_S if arguments.device == "cuda" else 0.0
    found = in_turns({name: partial(side.sample, seconds) for name, side in sides.items()}, arguments.repeats)
    if len(all_of("completion_tokens", found)) > 1:
        raise RoseError(f"{workload.id}: the runs make different numbers of tokens")
    return {name: {**engines[name], **figures} for name, figures in found.items()}


def _check_caches(workload: Workload, blocks: Mapping[str, int]) -> None:
    """Raise RoseError unless both engines, which share memory, have equally many KV blocks."""
    if len(set(blocks.values())) > 1:
        counts = ", ".join(f"{name} {n:,}" for name, n in blocks.items())
        raise RoseError(f"{workload.id}: memory has no room for two such KV caches: blocks {counts}")


def _options(arguments: Namespace, workload: Workload) -> list[str]:
    given = arguments.size.options(workload) | {
        "--hf-model-id": model_path(arguments.model),
        "--load-format": arguments.load_format,
        "--device": arguments.device,
    }
    rung = ["--rung", arguments.rung] if arguments.rung else ["--paged-attn", "--cuda-graph"]
    return [str(text) for pair in given.items() for text in pair] + rung


def _record(arguments: Namespace, figures: dict[str, Any]) -> dict[str, Any]:
    facts = {"model": arguments.model, "load_format": arguments.load_format, "size": arguments.size.name}
    facts |= {"rung": arguments.rung, "old_commit": arguments.old}
    ordered = {name: figures[name] for name in ALL_WORKLOADS if name in figures}
    return new_record(NAME, torch.device(arguments.device), **facts, figures=ordered)


def all_of(name: str, figures: Mapping[str, Mapping[str, Any]]) -> set[Any]:
    """Return the values of a figure over all samples of both sides."""
    return {value for side in figures.values() for one in side["repeats"] for value in one[name]}


def told(name: str, figures: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe a workload's medians in one line, and whether all runs gave the same tokens."""
    old, new = (figures[side]["medians"]["tok_s"] for side in (OLD, NEW))
    tokens = "the same tokens" if len(all_of("tokens_sha256", figures)) == 1 else "not always the same tokens"
    return f"{name}, tok/s: {OLD} {old:,.0f}, {NEW} {new:,.0f} ({percent_change(old, new)}), {tokens}"


def _parser() -> OneLineParser:
    parser = OneLineParser(prog=f"python -m rosellm.lab.records.{NAME}", description=__doc__)
    add_model_options(parser)
    add = parser.add_argument
    add("--old", required=True, metavar="COMMIT", help="commit of this checkout to compare with")
    add("--rung", help="rung of both sides; default: each side's best for the device")
    add("--workloads", default=MEASURED, metavar="ID,ID", help=f"default: {MEASURED}")
    add("--repeats", type=whole_number(1), default=5, metavar="N", help="measured samples per side")
    add("--output", type=Path, required=True, metavar="DIR", help="folder of the record")
    return parser


@command
def main(argv: list[str] | None = None) -> None:
    """Check the names, then measure."""
    arguments = settle(_parser().parse_args(argv), WORKLOADS["W1"])
    arguments.workloads = workloads_named(arguments.workloads, ALL_WORKLOADS)
    measure(arguments)


if __name__ == "__main__":
    sys.exit(main())
