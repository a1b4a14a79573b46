"""What the committed records allow to be said of two rungs on each workload."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rosellm.lab.records.records import Results, percent_change
from rosellm.roseinfer.steps.kv_append import DEFAULT_MIN_BATCH

WORKLOADS = ("W0", "W1", "W2", "W3", "W4", "W5")
SAME_BELOW_GATE = ("cuda_graph", "triton_append", "full_batch", "identity_pos")


@dataclass(frozen=True)
class Verdict:
    """One workload's whole-run tokens per second before and after, every repeat.

    ``noise`` is a ratio; ``sign`` is 0 where the repeats overlap or the medians differ by no more than it.
    Without repeats of both there is no verdict: ``ratio`` is NaN, ``change`` "–" and ``sign`` 0.
    """

    workload: str
    before: list[float]
    after: list[float]
    noise: float

    @property
    def is_measured(self) -> bool:
        return bool(self.before and self.after)

    @property
    def ratio(self) -> float:
        return median(self.after) / median(self.before) if self.is_measured else math.nan

    @property
    def sign(self) -> int:
        if not self.is_measured:
            return 0
        apart = min(self.after) > max(self.before) or max(self.after) < min(self.before)
        if not apart or abs(self.ratio - 1) <= self.noise:
            return 0
        return 1 if self.ratio > 1 else -1

    @property
    def change(self) -> str:
        return percent_change(median(self.before), median(self.after)) if self.is_measured else "–"

    @property
    def word(self) -> str:
        if not self.is_measured:
            return "not measured"
        return {1: "faster", -1: "slower", 0: "no difference beyond the noise"}[self.sign]


def run_to_run(results: Results) -> dict[str, float]:
    """Workload → how far apart rungs that run the very same code on it were measured, as a ratio less 1.

    Below the gate's batch size the append rungs are what ``cuda_graph`` is, each in an engine of its own, so
    what they differ by is noise. A workload above the gate takes the largest noise of those below. Where
    those rungs were not measured nothing is known, and no difference counts.
    """
    noise = {}
    for workload in WORKLOADS:
        if not set(SAME_BELOW_GATE) <= set(results.rungs(workload)):
            continue
        if results.record(workload, SAME_BELOW_GATE[0])["max_batch_size"] < DEFAULT_MIN_BATCH:
            same = [results.value(workload, rung) for rung in SAME_BELOW_GATE]
            noise[workload] = max(same) / min(same) - 1
    largest = max(noise.values(), default=math.inf)
    return {workload: noise.get(workload, largest) for workload in WORKLOADS}


def verdicts(
    results: Results, before: str, after: str, workloads: Sequence[str] = WORKLOADS
) -> list[Verdict]:
    """The recorded repeats of both rungs on each workload; none of a rung that was not measured on it."""
    noise = run_to_run(results)

    def repeats(workload: str, rung: str) -> list[float]:
        return results.repeats(workload, rung) if rung in results.rungs(workload) else []

    return [Verdict(w, repeats(w, before), repeats(w, after), noise[w]) for w in workloads]
