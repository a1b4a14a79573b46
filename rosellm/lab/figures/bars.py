"""Horizontal bar charts: before and after, and waterfalls between two totals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rosellm.lab.figures.charts import Chart, ChartError, finish, same_length, text_table, wrapped
from rosellm.lab.figures.palette import BLUE, GREEN, GRID, ORANGE, PALE
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
    """Draw two horizontal bars per label, each pair on its own scale, with the change next to the second."""
    same_length(labels=labels, before=before, after=after, units=units)
    scales = [max(pair) or 1 for pair in zip(before, after, strict=True)]
    texts = [
        [_with_unit(b, u) for b, u in zip(before, units, strict=True)],
        [f"{_with_unit(a, u)}  <b>{_change(b, a)}</b>" for b, a, u in zip(before, after, units, strict=True)],
    ]
    chart = Chart()
    for name, values, text, colour in zip(names, (before, after), texts, (PALE, BLUE), strict=True):
        scaled = [value / scale for value, scale in zip(values, scales, strict=True)]
        chart.add_bar(
            x=scaled, y=wrapped(labels, 24), orientation="h", name=name, text=text, marker_color=colour
        )
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


def waterfall(
    before: tuple[str, float],
    changes: Mapping[str, float],
    after: tuple[str, float],
    unit: str,
    *,
    title: str,
    smallest: float = 0.005,
) -> Chart:
    """Draw a waterfall: a named bar for each total, and between them a bar for every change.

    Changes are ordered from the largest saving to the largest cost; those below ``smallest`` of the larger
    total are merged into "the rest". Raises ``ChartError`` if the changes do not add up to the difference.
    """
    (first, start), (last, end) = before, after
    if not math.isclose(start + sum(changes.values()), end, rel_tol=1e-6, abs_tol=1e-9):
        raise ChartError(
            f"the changes add up to {number(sum(changes.values()))} {unit}, and {first} and {last} are "
            f"{number(end - start)} {unit} apart"
        )
    limit = smallest * max(start, end)
    steps = sorted(((c, v) for c, v in changes.items() if abs(v) >= limit), key=lambda step: step[1])
    small = [value for value in changes.values() if 0 < abs(value) < limit]
    steps += [("the rest", sum(small))] if small else []
    causes, values = [cause for cause, _ in steps], [value for _, value in steps]
    chart = Chart()
    chart.add_waterfall(
        orientation="h",
        measure=["absolute", *["relative"] * len(steps), "total"],
        x=[start, *values, end],
        y=[f"<b>{first}</b>", *causes, f"<b>{last}</b>"],
        text=[number(start), *(f"{'+' if v > 0 else ''}{number(v)}" for v in values), number(end)],
        textposition="outside",
        decreasing_marker_color=GREEN,
        increasing_marker_color=ORANGE,
        totals_marker_color=BLUE,
        connector_line={"color": GRID, "width": 1},
    )
    reached = [start, *(start + sum(values[: i + 1]) for i in range(len(values)))]
    chart.update_traces(hoverinfo="y+text", cliponaxis=False)
    chart.update_xaxes(range=[0, max(reached) * 1.15], title_text=unit)
    chart.update_yaxes(autorange="reversed", showgrid=False, ticks="")
    chart.table = text_table(["", f"change, {unit}"], [(first, start), *steps, (last, end)])
    return finish(chart, title, 30 * (len(steps) + 2))
