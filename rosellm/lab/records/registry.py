"""All experiments by name, and the jobs that a command line selects."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from rosellm.bench.workloads import WORKLOADS
from rosellm.errors import RoseError
from rosellm.lab.records import (
    all_reduce,
    llama_1b_protocol,
    rank_steps,
    recordings,
    runs,
    two_gpus,
    versions,
)
from rosellm.lab.records.experiment import Asked
from rosellm.lab.records.runs import runnable
from rosellm.roseinfer.exhibits import EXHIBITS, load_exhibit


def _exhibits(*names: str) -> list[ModuleType]:
    """Return the exhibits of these names, whose experiments one page shows; none outside a checkout."""
    return [load_exhibit(name) for name in names if EXHIBITS.is_dir()]


SHOWN = _exhibits(
    *("bookkeeping", "launch_costs", "grid", "lengths", "robustness", "sampling_steps", "prompt_attention"),
    *("first_request", "chunk_budget", "shared_prompts", "plain_loop_runs"),
)
ROOMS = (runs, recordings, *SHOWN, llama_1b_protocol, versions, all_reduce, two_gpus, rank_steps)
EXPERIMENTS = {one.name: one for room in ROOMS for one in room.EXPERIMENTS}
LABELS = dict.fromkeys(one.label for one in EXPERIMENTS.values())


class Job(NamedTuple):
    """An experiment, by its name, with the settings to measure."""

    name: str
    asked: Asked

    def run(self) -> None:
        """Measure, and write the record."""
        EXPERIMENTS[self.name].run(self.asked)

    @property
    def path(self) -> Path:
        return self.asked.folder / f"{self.name}.json"

    def in_folder(self, folder: Path) -> Job:
        """Return the same job, writing to another folder."""
        return self._replace(asked=replace(self.asked, folder=folder))


def plan(given: Namespace) -> list[Job]:
    """Return the jobs that a command line selects.

    given: parsed arguments. Each of its ``names`` is an experiment, or a workload of GPT-2, which stands for
        one job per rung.

    Raises ``RoseError`` for an unknown name, an option that none of the experiments takes, and a job that
    cannot run here.
    """
    known = [*WORKLOADS, *EXPERIMENTS]
    if unknown := [name for name in given.names if name not in known]:
        more = "" if SHOWN else "; others are measured from a checkout of RoseLLM"
        raise RoseError(f"experiment {unknown[0]!r} is unknown; use {', '.join(LABELS)}{more}")
    jobs = [job for name in given.names for job in _jobs(name, given)]
    taken = {option for job in jobs for option in job.asked.options}
    if unused := [option for option in given.options if option not in taken]:
        raise RoseError(f"{', '.join(given.names)} takes no --{unused[0].replace('_', '-')}")
    for job in jobs:
        EXPERIMENTS[job.name].check(job.asked)
    return jobs


def _jobs(name: str, given: Namespace) -> list[Job]:
    if name in EXPERIMENTS:
        return [Job(name, EXPERIMENTS[name].asked(given))]
    asked = EXPERIMENTS[f"{name}-dense"].asked(given)
    return [Job(f"{name}-{rung}", asked) for rung in runnable(asked.where, asked.arch)]
