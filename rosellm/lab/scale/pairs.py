"""Compare planned with recorded runs on one and two GPUs: tensor parallelism, and a replica on each."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rosellm.bench.arrivals import Arrival
from rosellm.bench.prompts import make_prompts, new_tokens
from rosellm.lab.records import all_reduce, two_gpus
from rosellm.lab.records.floors import Ceiling
from rosellm.lab.records.records import Results
from rosellm.lab.scale.cluster import Fleet, simulate_cluster
from rosellm.lab.scale.fitting import ceiling_of
from rosellm.lab.scale.routers import fewest_tokens
from rosellm.lab.scale.step_model import Achieved, StepModel
from rosellm.lab.scale.sums import read_sums
from rosellm.lab.scale.work import Cut
from rosellm.models.families.table import read_arch

FIGURE = "total_time_s"


@dataclass(frozen=True)
class PairCheck:
    """Seconds of a whole run. side: "1", "2", or "2 WAY", where WAY is the all-reduce of two ranks.

    alone: measured over planned time of the corresponding run on one GPU.
    """

    model: str
    workload: str
    side: str
    measured: float
    planned: float
    alone: float = 1.0

    @property
    def error(self) -> float:
        """Relative error of the planned time."""
        return self.planned / self.measured - 1

    @property
    def error_beyond_one(self) -> float:
        """Relative error after correcting the plan by ``alone``."""
        return self.alone * self.planned / self.measured - 1


def pair_checks(results: Results, achieved: Achieved) -> list[PairCheck]:
    """Check every recorded run on two GPUs of this device, and its run on one; [] if none are recorded.

    Runs whose all-reduce is missing from the record ``all_reduce`` are skipped.
    """
    return [one for model in two_gpus.recorded_models(results) for one in _checks(results, model, achieved)]


def _checks(results: Results, model: str, achieved: Achieved) -> Iterator[PairCheck]:
    record, sums = two_gpus.recorded(results, model), all_reduce.recorded(results)
    ceiling = ceiling_of(results)
    for kind, workloads in record["figures"].items():
        for name, sides in workloads.items():
            alone = 1.0
            for side, figures in sides.items():  # the single GPU comes first
                way = side.partition(" ")[2]
                if way and way not in sums.get("us", {}):
                    continue
                fleet = _fleet(record, name, kind, side, achieved, ceiling, sums)
                measured = figures["medians"][FIGURE]
                planned = _planned_s(record["workloads"][name], fleet)
                alone = measured / planned if side == "1" else alone
                yield PairCheck(model, name, side, measured, planned, alone)


def _fleet(
    record: Mapping[str, Any],
    name: str,
    kind: str,
    side: str,
    achieved: Achieved,
    ceiling: Ceiling,
    sums: Mapping[str, Any],
) -> Fleet:
    n, _, way = side.partition(" ")
    cut, most = Cut(read_arch(record["model_shape"]), ceiling), record["workloads"][name]["max_batch_size"]
    if kind == "replicas" or not way:
        return Fleet(int(n), StepModel(cut, achieved, most), most)
    shared = replace(cut, ranks=int(n))
    return Fleet(1, StepModel(shared, achieved, most, read_sums(sums, *{way, all_reduce.LIBRARY})), most)


def _planned_s(flags: Mapping[str, Any], fleet: Fleet) -> float:
    """Return the seconds until a workload's requests, which arrive all at once, are served."""
    options = Namespace(**flags, seed=0)
    lengths = map(len, make_prompts(options, vocab_size=2))
    arrivals = [Arrival(0.0, *both) for both in zip(lengths, new_tokens(options), strict=True)]
    return simulate_cluster(arrivals, fleet, fewest_tokens()).seconds
