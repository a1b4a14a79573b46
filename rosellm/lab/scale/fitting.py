"""Fit to recorded runs by which factors a device exceeds its floors: the same factors for all models."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rosellm.bench.arrivals import Arrival
from rosellm.bench.prompts import make_prompts, new_tokens
from rosellm.bench.workloads import MODEL_WORKLOADS
from rosellm.lab.records.floors import Ceiling
from rosellm.lab.records.records import Results, recorded_models
from rosellm.lab.records.serving_times import non_negative
from rosellm.lab.scale.cluster import Fleet, simulate_cluster
from rosellm.lab.scale.routers import fewest_tokens
from rosellm.lab.scale.step_model import Achieved, StepModel, product
from rosellm.lab.scale.work import Cut
from rosellm.models.families.table import read_arch
from rosellm.roseinfer.serving.admission import SchedulerConfig

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
        whole = simulate_cluster(self.requests, fleet, fewest_tokens()).seconds * 1e6 + achieved.host_us
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
        SchedulerConfig(prefill_token_budget=options.prefill_token_budget),
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
