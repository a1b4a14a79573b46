"""Record this machine in at most ten minutes: ``make measure``, or ``python -m rosellm.lab.records.quick``.

Runs the reference GPU's workloads at full size, most informative first: a decode step of every rung, and
whole runs, then experiments that take less than a minute. Each is a file of ``notebooks/results/<device>``.
When time is up, the next call continues; incomplete step records are restarted if the commit has changed. A
CPU runs the same workloads in fp32, once each.
"""

from __future__ import annotations

import gc
import io
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from rosellm.bench.record import write_record
from rosellm.bench.workloads import LOAD_FORMAT, WORKLOADS
from rosellm.command_line import OneLineParser, command, whole_number
from rosellm.errors import RoseError, describe
from rosellm.lab.records.experiment import Asked, in_parts, kept_parts
from rosellm.lab.records.machines import this_machine
from rosellm.lab.records.records import Results, results_folder
from rosellm.lab.records.registry import EXPERIMENTS
from rosellm.lab.records.runs import runnable
from rosellm.lab.records.sizes import WHOLE
from rosellm.lab.records.step_time import ladder_steps, step_shape
from rosellm.models.loading import resolve_device
from rosellm.roseinfer.recipe import LADDER, get_rung

MODEL = "gpt2"
EFFORT = {  # arguments of ``measure_steps``; rungs are measured one after the other
    "cuda": {"engines": 1, "seconds": 0.3, "turns": 3},
    "cpu": {"engines": 1, "seconds": 0.0, "turns": 1},
}
LENGTHS = [name for name in EXPERIMENTS if name.startswith("lengths-")]
QUICK = {  # experiments that take less than a minute each at full size
    "cuda": ["bookkeeping", "kv_append", "autotune", "kv_pressure", *LENGTHS],
    "cpu": ["bookkeeping", "kv_append"],
}
LEAVING_S = 15.0  # for the step in progress when time is up, and interpreter shutdown
AGAIN_S = 2.0  # repeat: an exception raised in a finalizer is lost
RUNS = {"cuda": {"warmups": 1, "repeats": 3}, "cpu": {"warmups": 0, "repeats": 1}}


class TimeIsUp(KeyboardInterrupt):
    """Raised wherever the process is when time is up; the record in progress is dropped."""


class Recorder:
    """Makes the records of one device in ``folder``.

    ends: the first and the best rung, recorded before the rungs between them.
    """

    def __init__(self, device: torch.device, folder: Path) -> None:
        self.results = Results(folder)
        self.asked = Asked(MODEL, LOAD_FORMAT, device.type, WHOLE, folder, RUNS[device.type])
        self.ends = ["dense", get_rung(None, device)]
        others = [rung for rung in runnable(device, self.asked.arch) if rung not in self.ends]
        self.rungs = [*self.ends, *others]

    def jobs(self) -> dict[str, Callable[[], None]]:
        """Return the missing records, most informative first: name → function that makes the record."""
        short, longer = ("W0", "W1", "W3"), ("W2", "W4", "W5")
        names = ["ceilings"] if self.asked.device == "cuda" else []
        names += ["steps-W0", *_runs(short, self.ends), "steps-W1", "steps-W3", "steps-W2"]
        names += _runs(longer, self.ends) + _runs((*short, *longer), self.rungs[len(self.ends) :])
        names += [name for name in QUICK[self.asked.device] if name in EXPERIMENTS]
        return {name: partial(self.run, name) for name in names if not self._is_done(name)}

    def run(self, name: str) -> None:
        """Make the record ``name``, without showing the summaries that benchmarks and experiments print."""
        kind, _, workload = name.partition("-")
        if kind == "steps":
            self.steps(name, workload)
        else:
            with redirect_stdout(io.StringIO()):
                EXPERIMENTS[name].run(self.asked)

    def steps(self, name: str, workload: str) -> None:
        """Time the decode step of every rung at the workload's size, and write the record after each rung.

        name: name of the record.
        workload: determines batch size and context.

        Rungs that are already recorded at this commit are kept.
        """

        def turns_us(rung: str) -> list[list[float]]:
            effort = EFFORT[self.asked.device]
            return ladder_steps(self.asked.gpt, [rung], WORKLOADS[workload], **effort)["turns_us"][rung]

        path = self.asked.folder / f"{name}.json"
        batch, context = step_shape(WORKLOADS[workload])
        figures: dict[str, Any] = {"batch": batch, "context": context, "turns_us": {}}
        begun = self.asked.record(name, model=MODEL, size=WHOLE.name, figures=figures)
        known = kept_parts(path, begun, [], "turns_us")
        parts = {rung: partial(turns_us, rung) for rung in self.rungs if rung not in known}
        for record in in_parts(self.asked, begun, parts, key="turns_us", order=list(LADDER).index):
            write_record(path, record)

    def _is_done(self, name: str) -> bool:
        """Return whether a complete record with these settings exists, measured at any commit."""
        workload, _, rung = name.partition("-")
        if workload in WORKLOADS:
            return rung in self.results.rungs(workload)
        if name not in self.results.names():
            return False
        record = self.results.load(name)
        steps = record.get("figures", {}).get("turns_us", {})
        of_whole = (record.get("model", MODEL), record.get("size", WHOLE.name)) == (MODEL, WHOLE.name)
        return of_whole and (workload != "steps" or set(self.rungs) <= steps.keys())


def _runs(workloads: tuple[str, ...], rungs: list[str]) -> list[str]:
    return [f"{workload}-{rung}" for workload in workloads for rung in rungs]


@contextmanager
def limited_to(seconds: float) -> Iterator[None]:
    """Raise TimeIsUp in the body of the ``with`` statement when it has run for ``seconds``.

    Needs a POSIX system and the main thread.
    """

    def end(_number: int, _frame: object) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def work_off(jobs: Mapping[str, Callable[[], None]], seconds: float) -> list[str]:
    """Run jobs for at most ``seconds``, printing a line for each; return the names of those not done.

    If a job fails, e.g. for lack of GPU memory, the error is printed and the next job starts.
    """
    left = list(jobs)
    try:
        with limited_to(seconds):
            for name, run in jobs.items():
                start = time.perf_counter()
                try:
                    run()
                except (RoseError, RuntimeError, MemoryError) as error:
                    why = str(error) if isinstance(error, RoseError) else describe(error)
                    print(f"{name}: not recorded: {why.splitlines()[0]}", flush=True)
                else:
                    left.remove(name)
                    print(f"[{time.perf_counter() - start:6.1f} s] {name}", flush=True)
                gc.collect()
    except TimeIsUp:
        pass
    return left


@command
def main(argv: list[str] | None = None) -> None:
    """Make the records that this machine lacks, until time is up."""
    parser = OneLineParser(prog="python -m rosellm.lab.records.quick", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=whole_number(1, 1440), default=10, metavar="N", help="time limit in minutes")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: cuda if there is one")
    add("--results", type=Path, metavar="DIR", help="folder of the machines; default: notebooks/results")
    arguments = parser.parse_args(argv)
    device = resolve_device(arguments.device)
    folder = (arguments.results or results_folder()) / this_machine(device)
    folder.mkdir(parents=True, exist_ok=True)
    jobs = Recorder(device, folder).jobs()
    taken = time.time() - psutil.Process().create_time()
    left = work_off(jobs, max(1.0, 60 * arguments.minutes - taken - LEAVING_S))
    print(f"{len(jobs) - len(left)} records made in {folder}", end="")
    print(f"; show them with: make notebooks P=record={folder.name}" if any(folder.glob("*.json")) else "")
    if left:
        print(f"{len(left)} left, {left[0]} first: make measure goes on there (MINUTES=60 takes longer)")


if __name__ == "__main__":
    raise SystemExit(main())
