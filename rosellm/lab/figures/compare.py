"""Two rungs side by side, live and from the committed records."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from IPython.display import Markdown, display

from rosellm.bench.workloads import WORKLOADS
from rosellm.lab.figures.bars import before_after
from rosellm.lab.figures.charts import Chart
from rosellm.lab.records.bench import Run
from rosellm.lab.records.machines import name_of, names_of
from rosellm.lab.records.records import Results
from rosellm.lab.records.verdicts import verdicts


def recorded_chart(machines: Sequence[Results], before: str, after: str) -> Chart:
    """Chart median tokens per second of whole runs, per workload that one session measured on both rungs.

    Machines are stacked vertically.
    """
    names = names_of(machines)
    each = [verdicts(results, before, after) for results in machines]
    labelled = [
        (f"{row.workload}{name}", row)
        for of_workload in zip(*each, strict=True)
        for name, row in zip(names, of_workload, strict=True)
        if row.is_comparable
    ]
    rows = [row for _, row in labelled]
    where = " and ".join(map(name_of, machines))
    chart = before_after(
        [label for label, _ in labelled],
        [median(row.before) for row in rows],
        [median(row.after) for row in rows],
        ["tok/s"] * len(rows),
        (before, after),
        title=f"{before} → {after} on {where}: tokens per second of the whole run",
    )
    legend = [f"{row.workload}: {WORKLOADS[row.workload].described}" for row in rows]
    return chart.update_traces(hovertext=legend, hoverinfo="name+text")


def live_chart(before: Run, after: Run, title: str) -> Chart:
    """Chart what was just measured on this machine: median step time, calls or launches, allocations."""
    work = "GPU kernels a step" if after.trace.on_gpu else "operators a step"
    labels, units = ["step time (median)", work, "allocations a step"], ["ms", "", ""]
    old, new = ([run.step_ms, run.trace.kernels, run.trace.allocations] for run in (before, after))
    return before_after(labels, old, new, units, (before.name, after.name), title=title)


def say(text: str) -> None:
    """Display Markdown built from computed values."""
    display(Markdown(text))
