"""Rows of the tables that present plans."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from rosellm.lab.records.records import signed
from rosellm.lab.scale import plan
from rosellm.lab.scale.cluster import Failures, Fleet, Outcome
from rosellm.lab.scale.fitting import KINDS, Check, Run
from rosellm.lab.scale.pairs import PairCheck
from rosellm.lab.scale.step_model import Achieved, StepModel
from rosellm.lab.scale.sums import Sums
from rosellm.lab.scale.work import DECODE_TERMS, PREFILL_TERMS, Cut

Row = list[Any]
STEPS = (
    "model", "workload", "step, ms", "error of the plan", "without this model",
    "prefill, ms", "error", "run, ms", "error",
)  # fmt: skip
PAIRS = ("model", "workload", "GPUs", "measured, s", "planned, s", "error", "error beyond that of one GPU")
ROUTES = ("prompts", "router", "within limits, %", "TTFT p50, ms", "p90")
FAILURES = (
    "a host fails every, s",
    "failures",
    "away, expected %",
    "started again, %",
    "TTFT p50, ms",
    "p99",
)
LAYOUTS = ("replicas × GPUs of each", "a lone request's token, ms", "requests per second")
PERCENTS = (50, 90)
_signed = partial(signed, decimals=0)


def coefficients(achieved: Achieved) -> list[str]:
    """Return a line for decode steps, one for prefills, and one for the host."""
    both = (("decode", DECODE_TERMS, achieved.decode), ("prefill", PREFILL_TERMS, achieved.prefill))
    lines = [
        f"{kind:8}" + ", ".join(f"{term} {value:.2f}" for term, value in zip(terms, values, strict=True))
        for kind, terms, values in both
    ]
    return [*lines, f"host    a run, µs {achieved.host_us:.0f}"]


def step_rows(runs: Sequence[Run], checks: Iterable[Check]) -> list[Row]:
    """Return ``STEPS`` of each run."""
    of = {(one.model, one.workload, one.kind): one for one in checks}
    rows = []
    for run in runs:
        step, prefill, whole = (of.get((run.model, run.workload, kind)) for kind in KINDS)
        row: Row = [run.model, run.workload, *_told(step), _signed(step.held_out_error) if step else ""]
        rows.append([*row, *_told(prefill), *_told(whole)])
    return rows


def _told(check: Check | None) -> Row:
    """Return the measured time, and the plan's relative error."""
    return [f"{check.measured:,.2f}", _signed(check.error)] if check else ["", ""]


def sum_rows(figures: Mapping[str, Any]) -> list[Row]:
    """Return a header with the sizes of an ``all_reduce`` record, then the medians of each way in µs."""
    us = figures["us"]
    kbs = sorted({kb for times in us.values() for kb in times}, key=int)
    medians = [[way, *(times.get(kb, {}).get("median") for kb in kbs)] for way, times in us.items()]
    return [["µs", *(f"{kb} KB" for kb in kbs)], *medians]


def pair_rows(checks: Iterable[PairCheck]) -> list[Row]:
    """Return ``PAIRS`` of each check."""
    return [
        [c.model, c.workload, c.side, c.measured, c.planned, _signed(c.error), _signed(c.error_beyond_one)]
        for c in checks
    ]


def route_row(kind: str, router: str, outcome: Outcome, limits: plan.Limits) -> Row:
    """Return ``ROUTES`` of one router at one load."""
    ms = [outcome.ttft(percent) * 1e3 for percent in PERCENTS]
    return [kind, router, 100 * limits.share(outcome), *map(round, ms)]


def failure_rows(
    means_s: Iterable[float], serve: Callable[[Failures], Outcome], load_s: float, together: int
) -> list[Row]:
    """Return ``FAILURES`` for each mean time between failures of a host."""
    rows = []
    for mean_s in means_s:
        outcome = serve(Failures(mean_s, load_s, together, seed=1))
        again = sum(one.attempts > 1 for one in outcome.requests) / len(outcome.requests)
        away = load_s / (mean_s + load_s)
        told = "never" if math.isinf(mean_s) else mean_s
        ms = [outcome.ttft(percent) * 1e3 for percent in (50, 99)]
        rows.append([told, outcome.failures, 100 * away, 100 * again, *map(round, ms)])
    return rows


def layout_rows(
    cut: Callable[[int], Cut], achieved: Achieved, sums: Sums, gpus: int, traffic: plan.Traffic
) -> list[Row]:
    """Return ``LAYOUTS`` of ``gpus`` GPUs: a replica on one, two, four … of them; tokens at context 256."""
    rows = []
    for ranks in (2**k for k in range(gpus.bit_length())):
        times = StepModel(cut(ranks), achieved, sums=sums.among(ranks) if ranks > 1 else None)
        fleet = Fleet(gpus // ranks, times)
        served = fleet.n * plan.capacity(fleet, traffic)
        rows.append([f"{fleet.n} × {ranks}", times.decode(1, 256) * 1e3, served])
    return rows
