"""Horizontal bar charts: before and after, and waterfalls between two totals."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import accumulate

from rosellm.lab.figures.charts import Chart, finish, text_table
from rosellm.lab.figures.palette import BLUE, GREEN, GRID, ORANGE, PALE
from rosellm.lab.records.ledger import Ledger
from rosellm.lab.records.records import number, percent_change


def before_after(
    labels: Sequence[str],
    before: Sequence[float],
    after: Sequence[float],
    units: Sequence[str],
    names: tuple[str, str],
    *,
    title: str,
) -> Chart:
    """Draw two horizontal bars per label, each pair on its own scale, and write the change at the second bar.

    before, after, units: one value per label, and the unit of both values.
    names: legend of the bars of ``before`` and ``after``.
    """
    scales = [max(pair) or 1 for pair in zip(before, after, strict=True)]
    texts = [
        [_with_unit(b, u) for b, u in zip(before, units, strict=True)],
        [f"{_with_unit(a, u)}  <b>{_change(b, a)}</b>" for b, a, u in zip(before, after, units, strict=True)],
    ]
    lines = ["<br>".join(textwrap.wrap(label, 24)) for label in labels]
    chart = Chart()
    for name, values, text, colour in zip(names, (before, after), texts, (PALE, BLUE), strict=True):
        scaled = [value / scale for value, scale in zip(values, scales, strict=True)]
        chart.add_bar(x=scaled, y=lines, orientation="h", name=name, text=text, marker_color=colour)
    chart.update_traces(textposition="outside", cliponaxis=False, hoverinfo="name+text+y")
    chart.update_xaxes(range=[0, 1.32], visible=False)
    chart.update_yaxes(autorange="reversed", showgrid=False, ticks="")
    chart.table = text_table(
        ["", *names, "unit", "change"],
        [[*row, _change(row[1], row[2])] for row in zip(labels, before, after, units, strict=True)],
    )
    return finish(chart, title, 54 * len(labels), legend=names, has_axis=False)


def _change(before: float, after: float) -> str:
    if before == after:
        return "same"
    if not before or not after:
        return "none" if not after else "new"
    if after >= 2 * before or before >= 2 * after:
        times = max(after / before, before / after)
        told = number(times) if times >= 100 else f"{times:.3g}"
        return f"× {told}" if after > before else f"÷ {told}"
    return percent_change(before, after)


def _with_unit(value: float, unit: str) -> str:
    return f"{number(value)} {unit}".rstrip()


def waterfall(before: Ledger, after: Ledger, smallest: float = 0.005) -> Chart:
    """Draw a waterfall from one step's time to another's: a bar for each total, and one for every cause.

    smallest: changes below this share of the larger total are merged into "the rest".

    Causes are ordered from the largest saving to the largest cost.
    """
    old, new = before.us_by_cause(), after.us_by_cause()
    changes = {cause: new.get(cause, 0.0) - old.get(cause, 0.0) for cause in {**old, **new}}
    limit = smallest * max(before.step_us, after.step_us)
    steps = sorted(((c, v) for c, v in changes.items() if abs(v) >= limit), key=lambda step: step[1])
    small = [value for value in changes.values() if 0 < abs(value) < limit]
    steps += [("the rest", sum(small))] if small else []
    values = [before.step_us, *(value for _, value in steps), after.step_us]
    told = [number(values[0]), *(f"{'+' * (v > 0)}{number(v)}" for v in values[1:-1]), number(values[-1])]
    chart = Chart()
    chart.add_waterfall(
        orientation="h",
        measure=["absolute", *["relative"] * len(steps), "total"],
        x=values,
        y=[f"<b>{before.name}</b>", *(cause for cause, _ in steps), f"<b>{after.name}</b>"],
        text=told,
        textposition="outside",
        decreasing_marker_color=GREEN,
        increasing_marker_color=ORANGE,
        totals_marker_color=BLUE,
        connector_line={"color": GRID, "width": 1},
        hoverinfo="y+text",
        cliponaxis=False,
    )
    chart.update_xaxes(range=[0, max(accumulate(values[:-1])) * 1.15], title_text="µs")
    chart.update_yaxes(autorange="reversed", showgrid=False, ticks="")
    rows = [(before.name, before.step_us), *steps, (after.name, after.step_us)]
    chart.table = text_table(["", "change, µs"], rows)
    title = f"{before.name} → {after.name}: what became of each microsecond, batch {after.batch}"
    return finish(chart, title, 30 * (len(steps) + 2))
