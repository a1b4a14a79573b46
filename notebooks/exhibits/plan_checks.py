"""Fit to recorded runs what a device needs beyond its floors, and compare planned with recorded times.

The factors are the same for all models.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from rosellm.bench.arrivals import Arrival
from rosellm.bench.prompts import make_prompts, new_tokens
from rosellm.bench.workloads import MODEL_WORKLOADS
from rosellm.lab.records import all_reduce, two_gpus
from rosellm.lab.records.floors import Ceiling
from rosellm.lab.records.records import Results, recorded_models, short_name, signed
from rosellm.lab.records.serving_times import non_negative
from rosellm.models.families.table import read_arch
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.serving.admission import SchedulerConfig

_fleet, _steps = load_exhibit("simulated_fleet"), load_exhibit("planned_steps")
Fleet, simulate_cluster = _fleet.Fleet, _fleet.simulate_cluster
Achieved, Cut, StepModel, product = _steps.Achieved, _steps.Cut, _steps.StepModel, _steps.product

KINDS = ("decode step", "prefill", "whole run")


@dataclass(frozen=True)
class Run:
    """A recorded run of one model on one device: its requests and what they took.

    most: the engine's ``max_batch_size``. rows: the mean rows of decode steps, rounded; 0 if there was no
    decode step. measured_us: µs of the mean decode step, of all prefills together, and of the whole run, in
    the order of ``KINDS``.
    """

    model: str
    workload: str
    cut: Cut
    requests: tuple[Arrival, ...]
    config: SchedulerConfig
    most: int
    rows: int
    measured_us: tuple[float, ...]

    def decode_terms(self) -> tuple[float, ...]:
        """Return the floors of its mean step."""
        return self.cut.decode(self.rows, MODEL_WORKLOADS[self.workload].mean_context)

    def prefill_terms(self) -> tuple[float, ...]:
        """Return the floors of all its prefills; a prompt beyond the budget counts layers once per chunk."""
        n, tokens = len(self.requests), sum(one.prompt_tokens for one in self.requests)
        passes = math.ceil(tokens / self.config.prefill_token_budget)
        whole = min(passes, n)
        layers, *others = self.cut.prefill(n / whole, tokens / whole)
        return passes * layers, *(whole * other for other in others)

    def planned_us(self, achieved: Achieved) -> tuple[float, ...]:
        """Return the planned times that correspond to ``measured_us``; the whole run is simulated."""
        fleet = Fleet(1, StepModel(self.cut, achieved, self.most), self.most, self.config)
        whole = simulate_cluster(self.requests, fleet).seconds * 1e6 + achieved.host_us
        decode = product(achieved.decode, self.decode_terms()) if self.rows else 0.0
        return decode, product(achieved.prefill, self.prefill_terms()), whole


def read_runs(results: Results) -> list[Run]:
    """Return the recorded whole runs of the modern models on a device."""
    ceiling = Ceiling.of(results.figures("ceilings"))
    return [
        _run(model, Results(results.folder / model).load(workload), ceiling)
        for model in recorded_models(results)
        for workload in MODEL_WORKLOADS
        if (results.folder / model / f"{workload}.json").is_file()
    ]


def _run(model: str, record: dict[str, Any], ceiling: Ceiling) -> Run:
    options = Namespace(**record["options"])
    (result,) = record["results"].values()
    medians = result["medians"]
    steps = medians["decode_steps"] or math.inf
    seconds = (medians["decode_time_s"] / steps, medians["prefill_time_s"], medians["total_time_s"])
    return Run(
        model,
        record["workload"],
        Cut(read_arch(record["model_shape"]), ceiling),
        at_once(options),
        SchedulerConfig(),
        record["max_batch_size"],
        round(medians["decode_tokens"] / steps),
        tuple(one * 1e6 for one in seconds),
    )


def at_once(options: Namespace) -> tuple[Arrival, ...]:
    """Return the requests that a benchmark's options ask for, all at time 0."""
    lengths = map(len, make_prompts(options, vocab_size=2))
    return tuple(Arrival(0.0, *both) for both in zip(lengths, new_tokens(options), strict=True))


def fit(runs: Iterable[Run]) -> Achieved:
    """Fit non-negative coefficients that minimise relative errors.

    The host's time is the time beyond prefills in runs with a single request of one token.
    """
    runs = list(runs)
    decodes = [_relative(run.decode_terms(), run.measured_us[0]) for run in runs if run.rows]
    prefills = [_relative(run.prefill_terms(), run.measured_us[1]) for run in runs]
    lone = [run for run in runs if len(run.requests) == 1 and not run.rows]
    host_us = median(run.measured_us[2] - run.measured_us[1] for run in lone) if lone else 0.0
    return Achieved(tuple(non_negative(decodes)), tuple(non_negative(prefills)), host_us)


def _relative(terms: Sequence[float], measured: float) -> tuple[float, ...]:
    return *(term / measured for term in terms), 1.0


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


ERRORS = {"fitted": "error", "not seen": "other_error"}  # attributes of ``Check``
PAIRS = ("model", "workload", "GPUs", "measured, s", "planned, s", "error", "error beyond that of one GPU")


def error_table(checks: Iterable[Check]) -> tuple[list[str], list[list[str]]]:
    """Return headers and a row per workload: the errors of planned decode steps, by model.

    First those of the plan that is fitted to all models, then those of the plan without this model's records.
    A cell is "" where there is no such run.
    """
    steps = {(one.workload, one.model): one for one in checks if one.what == KINDS[0]}
    workloads, models = (list(dict.fromkeys(names)) for names in zip(*steps, strict=True))
    columns = [(model, kind) for kind in ERRORS for model in models]

    def cell(name: str, model: str, kind: str) -> str:
        one = steps.get((name, model))
        return signed(getattr(one, ERRORS[kind]), 0) if one else ""

    rows = [[name, *(cell(name, *column) for column in columns)] for name in workloads]
    return ["error of a decode step", *map(", ".join, columns)], rows


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
        sums = _steps.read_sums(summed, *{way, all_reduce.LIBRARY}) if way else None
        most = flags["max_batch_size"]
        fleet = Fleet(1 if way else int(n), StepModel(cut, achieved, most, sums), most)
        planned = simulate_cluster(at_once(Namespace(**flags, seed=0)), fleet).seconds
        measured = figures["medians"]["total_time_s"]
        scale = measured / planned if side == "1" else scale
        names = short_name(record["model"]), record["workload"]
        yield Check(*names, side, measured, planned, scale * planned)


HOSTS = 1, 2, 4, 8  # GPUs of a host
PLANNED = "model", "workload", "GPUs as", "tok/s: 1 GPU", *(f"{n} GPUs" for n in HOSTS[1:])
LARGE = {"n_layers": 80, "d_model": 8192, "n_heads": 64, "d_ff": 28672}  # of Llama-3.1-70B
SHARED, LONE = ("D1", "D64", "L8K", "PRE"), ("MIX",)


def host_rows(runs: Iterable[Run], achieved: Achieved, sums: Any) -> list[list[Any]]:
    """Return ``PLANNED`` of recorded workloads on more GPUs of one host than were measured.

    sums: all-reduces of two ranks, from which those of more are extrapolated. PRE counts prompt tokens. A
    larger model than the recorded one is planned where it fits: on two GPUs or more.
    """
    rows = []
    for run in runs:
        if run.model == "Llama-3.1-8B" and run.workload in SHARED:
            large = Cut(replace(run.cut.whole, **LARGE), run.cut.ceiling)
            for name, cut, least in ((run.model, run.cut, 1), ("Llama-3.1-70B", large, 2)):
                each = [_planned(run, cut, achieved, sums, n) if n >= least else None for n in HOSTS]
                rows.append([name, run.workload, "tensor parallel", *each])
        if run.model == "Qwen3-0.6B" and run.workload in LONE:
            each = [_planned(run, run.cut, achieved, None, n) for n in HOSTS]
            rows.append([run.model, run.workload, "replicas", *each])
    return rows


def _planned(run: Run, cut: Cut, achieved: Achieved, sums: Any, n: int) -> float:
    """Return the tokens per second of a run on n GPUs: of one model that they share, or of n replicas."""
    among = sums.among(n) if sums is not None and n > 1 else None
    steps = StepModel(cut if sums is None else cut.on(n), achieved, run.most, among)
    fleet = Fleet(n if sums is None else 1, steps, run.most, run.config)
    seconds = simulate_cluster(run.requests, fleet).seconds + achieved.host_us / 1e6
    given = [one.prompt_tokens if run.workload == "PRE" else one.new_tokens for one in run.requests]
    return sum(given) / seconds
