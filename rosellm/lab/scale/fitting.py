"""Fit a device's efficiency relative to its floors to recorded runs, and check planned times against them.

One set of coefficients serves all models, which differ only in their floors. Next to the error of a fit to
all models stands that of a fit without the model in question.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rosellm.bench.arrivals import Arrival
from rosellm.bench.prompts import make_prompts, new_tokens
from rosellm.bench.workloads import MODEL_WORKLOADS
from rosellm.lab.records.floors import Ceiling
from rosellm.lab.records.model_runs import ceiling_of, recorded_models
from rosellm.lab.records.records import Results
from rosellm.lab.records.serving_times import non_negative
from rosellm.lab.scale.simulation import simulate
from rosellm.lab.scale.step_model import Achieved, StepModel, product
from rosellm.lab.scale.work import Cut
from rosellm.models.families.table import read_arch
from rosellm.roseinfer.serving.admission import SchedulerConfig

KINDS = ("decode step", "prefill", "whole run")


@dataclass(frozen=True)
class Run:
    """A recorded run of one model on one device: its requests, and the medians of its record."""

    model: str
    workload: str
    cut: Cut
    requests: tuple[Arrival, ...]
    config: SchedulerConfig
    most: int
    medians: dict[str, float]

    @property
    def rows(self) -> float:
        """Mean rows per decode step; 0 if there was none."""
        steps = self.medians["decode_steps"]
        return self.medians["decode_tokens"] / steps if steps else 0.0

    @property
    def decode_us(self) -> float:
        """Mean µs per decode step."""
        return self.medians["decode_time_s"] / self.medians["decode_steps"] * 1e6

    @property
    def prefill_us(self) -> float:
        """µs of all prefills together."""
        return self.medians["prefill_time_s"] * 1e6

    @property
    def total_us(self) -> float:
        """µs of the whole run."""
        return self.medians["total_time_s"] * 1e6

    def decode_terms(self) -> tuple[float, ...]:
        """Return the floors of its mean step."""
        return self.cut.decode(round(self.rows), MODEL_WORKLOADS[self.workload].mean_context)

    def prefill_terms(self) -> tuple[float, ...]:
        """Return the floors of all its prefills; a prompt beyond the budget counts layers once per chunk."""
        n, tokens = len(self.requests), sum(one.prompt_tokens for one in self.requests)
        passes = math.ceil(tokens / self.config.prefill_token_budget)
        whole = min(passes, n)
        layers, *others = self.cut.prefill(n / whole, tokens / whole)
        return passes * layers, *(whole * other for other in others)


@dataclass(frozen=True)
class Check:
    """A recorded time and planned ones, in ms: fitted to all models, and to the other models only."""

    model: str
    workload: str
    kind: str
    measured: float
    planned: float
    held_out: float

    @property
    def error(self) -> float:
        """Relative error of the planned time."""
        return self.planned / self.measured - 1

    @property
    def held_out_error(self) -> float:
        """Relative error of the time planned without this model's records."""
        return self.held_out / self.measured - 1


def read_runs(results: Results) -> list[Run]:
    """Return the recorded whole runs of the modern models on a device."""
    ceiling = ceiling_of(results)
    return [
        _run(model, Results(results.folder / model).load(workload), ceiling)
        for model in recorded_models(results)
        for workload in MODEL_WORKLOADS
        if (results.folder / model / f"{workload}.json").is_file()
    ]


def _run(model: str, record: dict[str, Any], ceiling: Ceiling) -> Run:
    options = Namespace(**record["options"])
    lengths = map(len, make_prompts(options, vocab_size=2))
    requests = tuple(Arrival(0.0, *both) for both in zip(lengths, new_tokens(options), strict=True))
    (result,) = record["results"].values()
    return Run(
        model,
        record["workload"],
        Cut(read_arch(record["model_shape"]), ceiling),
        requests,
        SchedulerConfig(prefill_token_budget=options.prefill_token_budget),
        record["max_batch_size"],
        result["medians"],
    )


def fit(runs: Iterable[Run]) -> Achieved:
    """Fit non-negative coefficients that minimise relative errors.

    The host's time is the time beyond prefills in runs with a single request of one token.
    """
    runs = list(runs)
    decodes = [_relative(run.decode_terms(), run.decode_us) for run in runs if run.rows]
    prefills = [_relative(run.prefill_terms(), run.prefill_us) for run in runs]
    lone = [one.total_us - one.prefill_us for one in runs if len(one.requests) == 1 and not one.rows]
    host_us = median(lone) if lone else 0.0
    return Achieved(tuple(non_negative(decodes)), tuple(non_negative(prefills)), host_us)


def _relative(terms: Sequence[float], measured: float) -> tuple[float, ...]:
    return *(term / measured for term in terms), 1.0


def check(runs: Sequence[Run]) -> list[Check]:
    """Check each run's mean decode step, its prefills and the whole run, simulated."""
    everything = fit(runs)
    blind = {model: fit(r for r in runs if r.model != model) for model in {run.model for run in runs}}
    return [one for run in runs for one in _checks(run, everything, blind[run.model])]


def _checks(run: Run, everything: Achieved, blind: Achieved) -> Iterator[Check]:
    measured = (run.decode_us if run.rows else 0.0, run.prefill_us, run.total_us)
    planned, held_out = (planned_us(run, achieved) for achieved in (everything, blind))
    for kind, *us in zip(KINDS, measured, planned, held_out, strict=True):
        if us[0]:
            yield Check(run.model, run.workload, kind, *(one / 1e3 for one in us))


def planned_us(run: Run, achieved: Achieved) -> tuple[float, float, float]:
    """Return the planned µs of the three ``KINDS`` of a run."""
    decode = product(achieved.decode, run.decode_terms()) if run.rows else 0.0
    prefill = product(achieved.prefill, run.prefill_terms())
    return decode, prefill, whole_run_s(run, StepModel(run.cut, achieved, run.most)) * 1e6


def whole_run_s(run: Run, times: StepModel) -> float:
    """Return the planned seconds until the last request of a run is served."""
    made = simulate(run.requests, times, run.config, run.most)
    return max(one.token_times[-1] for one in made) + times.achieved.host_us / 1e6


def worst(checks: Iterable[Check], kind: str, held_out: bool = False) -> float:
    """Return the largest absolute error of a kind."""
    return max(abs(one.held_out_error if held_out else one.error) for one in checks if one.kind == kind)
