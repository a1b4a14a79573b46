"""Compare planned with recorded times, on one GPU and on two."""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from rosellm.lab.records import all_reduce, two_gpus
from rosellm.lab.records.floors import Ceiling
from rosellm.lab.records.records import Results, short_name, signed
from rosellm.lab.scale.cluster import Fleet, simulate_cluster
from rosellm.lab.scale.fitting import KINDS, Run, at_once, fit
from rosellm.lab.scale.routers import fewest_tokens
from rosellm.lab.scale.step_model import Achieved, StepModel
from rosellm.lab.scale.sums import read_sums
from rosellm.lab.scale.work import Cut
from rosellm.models.families.table import read_arch


@dataclass(frozen=True)
class Check:
    """A recorded time and two plans of it, in one unit; ``what``: which time of the workload's run."""

    model: str
    workload: str
    what: str
    measured: float
    planned: float
    other: float

    @property
    def error(self) -> float:
        """Relative error of the planned time."""
        return self.planned / self.measured - 1

    @property
    def other_error(self) -> float:
        """Relative error of the other plan."""
        return self.other / self.measured - 1


def check(runs: Sequence[Run]) -> list[Check]:
    """Check each run's ``KINDS``, in ms; the other plan is fitted without this model's records."""
    everything = fit(runs)
    blind = {model: fit(r for r in runs if r.model != model) for model in {run.model for run in runs}}
    return [
        Check(run.model, run.workload, kind, *(one / 1e3 for one in us))
        for run in runs
        for kind, *us in zip(
            KINDS, run.measured_us, run.planned_us(everything), run.planned_us(blind[run.model]), strict=True
        )
        if us[0]
    ]


RUNS = (
    "model", "workload", "step, ms", "error of the plan", "without this model",
    "prefill, ms", "error", "run, ms", "error",
)  # fmt: skip
PAIRS = ("model", "workload", "GPUs", "measured, s", "planned, s", "error", "error beyond that of one GPU")


def run_rows(checks: Iterable[Check]) -> list[list[str]]:
    """Return ``RUNS`` of each run; empty cells where it has no decode steps."""
    runs: dict[tuple[str, str], dict[str, Check]] = defaultdict(dict)
    for one in checks:
        runs[one.model, one.workload][one.what] = one
    rows = []
    for named, kinds in runs.items():
        step, *others = (
            [f"{c.measured:,.2f}", signed(c.error, 0)] if (c := kinds.get(kind)) else ["", ""]
            for kind in KINDS
        )
        unseen = signed(kinds[KINDS[0]].other_error, 0) if KINDS[0] in kinds else ""
        rows.append([*named, *step, unseen, *chain(*others)])
    return rows


def pair_rows(checks: Iterable[Check]) -> list[list[str | float]]:
    """Return ``PAIRS`` of each check."""
    return [
        [c.model, c.workload, c.what, c.measured, c.planned, signed(c.error, 0), signed(c.other_error, 0)]
        for c in checks
    ]


def worst(checks: Iterable[Check], kind: str, other: bool = False) -> float:
    """Return the largest absolute error of a kind, or of its other plan."""
    return max(abs(one.other_error if other else one.error) for one in checks if one.what == kind)


def pair_checks(results: Results, achieved: Achieved) -> list[Check]:
    """Check every recorded run on two GPUs of this device, and its run on one, in s; [] if none are recorded.

    ``what`` is "1", "2", or "2 WAY", where WAY is the all-reduce of two ranks; runs whose WAY is missing from
    the record ``all_reduce`` are skipped. The other plan is scaled by the error of the one-GPU run.
    """
    recorded = [two_gpus.recorded(results, kind) for kind in two_gpus.KINDS]
    models = sorted({model for own in recorded for model in own})
    records = [record for model in models for own in recorded for record in own.get(model, {}).values()]
    return [check for record in records for check in _pair(results, record, achieved)]


def _pair(results: Results, record: dict[str, Any], achieved: Achieved) -> Iterator[Check]:
    summed, flags, scale = all_reduce.recorded(results), record["flags"], 1.0
    whole = Cut(read_arch(record["model_shape"]), Ceiling.of(results.figures("ceilings")))
    for side, figures in record["figures"].items():  # the single GPU comes first
        n, _, way = side.partition(" ")
        if way and way not in summed.get("us", {}):
            continue
        cut = whole.on(int(n) if way else 1)
        sums = read_sums(summed, *{way, all_reduce.LIBRARY}) if way else None
        most = flags["max_batch_size"]
        fleet = Fleet(1 if way else int(n), StepModel(cut, achieved, most, sums), most)
        requests = at_once(Namespace(**flags, seed=0))
        planned = simulate_cluster(requests, fleet, fewest_tokens()).seconds
        measured = figures["medians"]["total_time_s"]
        scale = measured / planned if side == "1" else scale
        names = short_name(record["model"]), record["workload"]
        yield Check(*names, side, measured, planned, scale * planned)
