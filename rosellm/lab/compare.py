"""Two rungs side by side, live and from the committed records, and the verdict that the figures allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from IPython.display import Markdown, display

from rosellm.lab.bench import Run
from rosellm.lab.charts import Chart, before_after
from rosellm.lab.records import Results, floor_tok_s, number, percent_change

WORKLOADS = ("W0", "W1", "W2", "W3", "W4", "W5")


@dataclass(frozen=True)
class Verdict:
    """One workload's whole-run tokens per second before and after; ``sign`` is 0 where the repeats overlap."""

    workload: str
    before: list[float]
    after: list[float]

    @property
    def sign(self) -> int:
        if min(self.after) > max(self.before):
            return 1
        return -1 if max(self.after) < min(self.before) else 0

    @property
    def change(self) -> str:
        return percent_change(_median(self.before), _median(self.after))

    @property
    def word(self) -> str:
        return {1: "faster", -1: "slower", 0: "within the repeats' spread"}[self.sign]


def verdicts(
    results: Results, before: str, after: str, workloads: Sequence[str] = WORKLOADS
) -> list[Verdict]:
    """The recorded repeats of both rungs on each workload."""
    return [Verdict(w, results.repeats(w, before), results.repeats(w, after)) for w in workloads]


def recorded_chart(
    results: Results, before: str, after: str, workloads: Sequence[str] = WORKLOADS, title: str | None = None
) -> Chart:
    """Whole-run tokens per second of two rungs on each workload, medians of the recorded repeats."""
    rows = verdicts(results, before, after, workloads)
    chart = before_after(
        [row.workload for row in rows],
        [_median(row.before) for row in rows],
        [_median(row.after) for row in rows],
        ["tok/s"] * len(rows),
        (before, after),
        title=title or f"{before} → {after} on {results.device_name}: tokens per second of the whole run",
    )
    return chart


def live_chart(before: Run, after: Run, title: str) -> Chart:
    """What this machine just measured: the step's median time, what it called or launched, and memory taken."""
    work = "GPU kernels a step" if after.trace.on_gpu else "operators a step"
    rows = (
        ("step time (median)", before.step_ms, after.step_ms, "ms"),
        (work, before.trace.kernels, after.trace.kernels, ""),
        ("allocations a step", before.trace.allocations, after.trace.allocations, ""),
    )
    labels, left, right, units = zip(*rows, strict=True)
    return before_after(labels, left, right, units, (before.name, after.name), title=title)


def say_verdict(results: Results, before: str, after: str, workloads: Sequence[str] = WORKLOADS) -> None:
    """Displays, as prose, what the records allow to be said; every number in it is computed."""
    rows = verdicts(results, before, after, workloads)
    parts = [f"{row.workload} {row.change} ({row.word})" for row in rows]
    best = max(rows, key=lambda row: _median(row.after) / floor_tok_s(row.workload))
    share = _median(best.after) / floor_tok_s(best.workload) * 100
    say(
        f"**Verdict on {results.device_name}.** `{before}` → `{after}`, whole-run tokens per second: {'; '.join(parts)}. "
        f"Nearest to the bytes floor: {best.workload}, at {number(share)} % of it."
    )


def say(text: str) -> None:
    """Displays Markdown made from figures."""
    display(Markdown(text))


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
