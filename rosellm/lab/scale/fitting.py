"""What a device achieves of its floors, fitted to recorded runs, and how far planned times are from those.

One set of coefficients serves all models: what tells models apart is their floors. Beside the error of a fit
to all of them stands that of a model which the fit has not seen.
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
        """Of a decode step on average; 0 if there was none."""
        steps = self.medians["decode_steps"]
        return self.medians["decode_tokens"] / steps if steps else 0.0

    @property
    def decode_us(self) -> float:
        """Of one decode step on average."""
        return self.medians["decode_time_s"] / self.medians["decode_steps"] * 1e6

    @property
    def prefill_us(self) -> float:
        """Of all prefills together."""
        return self.medians["prefill_time_s"] * 1e6

    @property
    def total_us(self) -> float:
        """Of the whole run."""
        return self.medians["total_time_s"] * 1e6

    def decode_terms(self) -> tuple[float, ...]:
        """The floors of its mean step."""
        return self.cut.decode(round(self.rows), MODEL_WORKLOADS[self.workload].mean_context)

    def prefill_terms(self) -> tuple[float, ...]:
        """The floors of all its prefills; a prompt beyond the budget counts a layer's time for each piece."""
        n, tokens = len(self.requests), sum(one.prompt_tokens for one in self.requests)
        passes = math.ceil(tokens / self.config.prefill_token_budget)
        whole = min(passes, n)
        layers, *others = self.cut.prefill(n / whole, tokens / whole)
        return passes * layers, *(whole * other for other in others)


@dataclass(frozen=True)
class Check:
    """A recorded time beside planned ones, all in ms: fitted to all models, and to the other ones only."""

    model: str
    workload: str
    kind: str
    measured: float
    planned: float
    held_out: float

    @property
    def error(self) -> float:
        """Of the planned time, as a share of the measured one."""
        return self.planned / self.measured - 1

    @property
    def held_out_error(self) -> float:
        """The same of the time planned without this model's records."""
        return self.held_out / self.measured - 1


def read_runs(results: Results) -> list[Run]:
    """The whole runs of the modern models that are recorded on a device."""
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
    """The coefficients by which relative errors are least; none is negative.

    The host's time is that of runs of one request and one token, beyond their prefills.
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
    """Each run's mean decode step, its prefills and the whole of it, simulated."""
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
    """What the three ``KINDS`` of a run would take."""
    decode = product(achieved.decode, run.decode_terms()) if run.rows else 0.0
    prefill = product(achieved.prefill, run.prefill_terms())
    return decode, prefill, whole_run_s(run, StepModel(run.cut, achieved, run.most)) * 1e6


def whole_run_s(run: Run, times: StepModel) -> float:
    """Seconds until the last of a run's requests would be served."""
    made = simulate(run.requests, times, run.config, run.most)
    return max(one.token_times[-1] for one in made) + times.achieved.host_us / 1e6


def worst(checks: Iterable[Check], kind: str, held_out: bool = False) -> float:
    """The largest error of a kind, without its sign."""
    return max(abs(one.held_out_error if held_out else one.error) for one in checks if one.kind == kind)
