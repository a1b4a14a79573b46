"""What the committed records allow to be said of two rungs on each workload."""

from __future__ import annotations

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
    """

    workload: str
    before: list[float]
    after: list[float]
    noise: float

    @property
    def ratio(self) -> float:
        return median(self.after) / median(self.before)

    @property
    def sign(self) -> int:
        apart = min(self.after) > max(self.before) or max(self.after) < min(self.before)
        if not apart or abs(self.ratio - 1) <= self.noise:
            return 0
        return 1 if self.ratio > 1 else -1

    @property
    def change(self) -> str:
        return percent_change(median(self.before), median(self.after))

    @property
    def word(self) -> str:
        return {1: "faster", -1: "slower", 0: "no difference beyond the noise"}[self.sign]


def run_to_run(results: Results) -> dict[str, float]:
    """Workload → how far apart rungs that run the very same code on it were measured, as a ratio less 1.

    Below the gate's batch size the append rungs are what ``cuda_graph`` is, each in an engine of its own, so
    what they differ by is noise. A workload above the gate takes the largest noise of those below.
    """
    noise = {}
    for workload in WORKLOADS:
        if results.record(workload, SAME_BELOW_GATE[0])["max_batch_size"] < DEFAULT_MIN_BATCH:
            same = [results.value(workload, rung) for rung in SAME_BELOW_GATE]
            noise[workload] = max(same) / min(same) - 1
    return {workload: noise.get(workload, max(noise.values())) for workload in WORKLOADS}


def verdicts(
    results: Results, before: str, after: str, workloads: Sequence[str] = WORKLOADS
) -> list[Verdict]:
    """The recorded repeats of both rungs on each workload."""
    noise = run_to_run(results)
    return [Verdict(w, results.repeats(w, before), results.repeats(w, after), noise[w]) for w in workloads]
