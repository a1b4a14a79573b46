"""Decide from the committed records which of two rungs is faster on each workload."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rosellm.lab.records.records import Results, percent_change

WORKLOADS = ("W0", "W1", "W2", "W3", "W4", "W5")


@dataclass(frozen=True)
class Verdict:
    """A comparison of two rungs by whole runs of one workload.

    before, after: tokens per second of every repeat, of each rung; empty if it was not measured.
    same_session: whether both were measured in one session. If not, they are not compared: ``ratio`` is then
        NaN and ``change`` "–".
    """

    workload: str
    before: list[float]
    after: list[float]
    same_session: bool = True

    @property
    def is_measured(self) -> bool:
        return bool(self.before and self.after)

    @property
    def is_comparable(self) -> bool:
        return self.is_measured and self.same_session

    @property
    def ratio(self) -> float:
        return median(self.after) / median(self.before) if self.is_comparable else math.nan

    @property
    def spread(self) -> float:
        """The larger difference between the extreme repeats of a side, in tokens per second."""
        return max(max(side) - min(side) for side in (self.before, self.after))

    @property
    def sign(self) -> int:
        """1 if the second rung is faster, -1 if it is slower, and 0 if the repeats do not decide.

        They decide if the two ranges of repeats are disjoint and the medians differ by more than twice the
        larger range.
        """
        if not self.is_comparable:
            return 0
        apart = min(self.after) > max(self.before) or max(self.after) < min(self.before)
        gap = median(self.after) - median(self.before)
        if not apart or abs(gap) <= 2 * self.spread:
            return 0
        return 1 if gap > 0 else -1

    @property
    def change(self) -> str:
        return percent_change(median(self.before), median(self.after)) if self.is_comparable else "–"

    @property
    def word(self) -> str:
        if not self.is_measured:
            return "not measured"
        if not self.same_session:
            return "not compared: different sessions"
        return {1: "faster", -1: "slower", 0: "no difference beyond the noise"}[self.sign]


def verdicts(
    results: Results, before: str, after: str, workloads: Sequence[str] = WORKLOADS
) -> list[Verdict]:
    """Return a comparison of the rungs ``before`` and ``after`` for each workload."""

    def verdict(workload: str) -> Verdict:
        there = results.rungs(workload)
        old, new = (results.repeats(workload, rung) if rung in there else [] for rung in (before, after))
        sessions = {_session(results, workload, rung) for rung in (before, after) if rung in there}
        return Verdict(workload, old, new, same_session=len(sessions) <= 1)

    return [verdict(workload) for workload in workloads]


def _session(results: Results, workload: str, rung: str) -> tuple[str | None, ...]:
    """Return the commit and the lease of a record; older records have no lease."""
    known = results.record(workload, rung)["environment"]
    return known["git_commit"], known.get("lease")
