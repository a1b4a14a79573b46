"""Chart the whole ladder against its floor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rosellm.lab.figures.charts import Chart, ChartError, finish, short, text_table
from rosellm.lab.figures.lines import log_ticks
from rosellm.lab.figures.palette import BLUE, GREEN, MAGENTA, ORANGE, PALE, SKY, VIOLET, fill
from rosellm.lab.records.machines import name_of
from rosellm.lab.records.notebooks import NOTEBOOKS
from rosellm.lab.records.records import Results, number
from rosellm.roseinfer.recipe import SIDE_BRANCHES

FLOOR, ROW, LABEL = "bytes floor", 19, 0.85
RIVALS = (ORANGE, MAGENTA, VIOLET, PALE)  # colours of their lines, in rotation
BESIDE = (SKY, VIOLET, ORANGE, MAGENTA)  # colours of other machines' dots, in rotation


@dataclass(frozen=True)
class Panel:
    """One column: heading, horizontal extent, values by rung and unit.

    Bars, or dots on a logarithmic axis. With dots, ``lines`` (name → value) are drawn through all rungs, and
    ``beside`` holds other machines' values by rung, as dots too.
    """

    head: str
    start: float
    end: float
    values: Mapping[str, float | None]
    colour: str
    suffix: str = ""
    is_log: bool = False
    lines: Mapping[str, float] = field(default_factory=dict)
    beside: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def range(self) -> tuple[float, float]:
        """Ends of the axis in plotly's form: exponents if it is logarithmic."""
        others = [value for values in self.beside.values() for value in values.values()]
        known = [v for v in (*self.values.values(), *self.lines.values(), *others) if v is not None]
        if not self.is_log:
            return 0, max(known, default=1) * 1.6
        if not known or min(known) <= 0:
            raise ChartError("a log axis needs at least one value, and none that is 0 or less")
        return math.log10(min(known) / 4), math.log10(max(known) * 1.4)


def ladder_chart(
    values: Mapping[str, float | None],
    unit: str,
    rivals: Mapping[str, float] | None = None,
    floor: float | None = None,
    *,
    title: str,
    beside: Mapping[str, Mapping[str, float]] | None = None,
) -> Chart:
    """Draw a row per rung, linked to its notebook: its value on a log axis, and its share of the floor.

    ``rivals`` and the bytes ``floor`` (in the values' unit) are lines through the first column. Side branches
    are hollow, their shares hatched. None: not measured. beside: other machines' values by rung, by name.
    """
    beside = beside or {}
    rungs = list(dict.fromkeys(rung for one in (values, *beside.values()) for rung in one))
    lines = {**({FLOOR: floor} if floor else {}), **(rivals or {})}
    panels = [Panel(unit, 0.0, 0.72, values, BLUE, is_log=True, lines=lines, beside=beside)]
    if floor:
        shares = {rung: value and value / floor * 100 for rung, value in values.items()}
        panels.append(Panel("% of the floor", 0.76, 1.0, shares, GREEN, " %"))
    chart = _draw(panels, rungs, title, ROW)
    chart.update_yaxes(ticktext=[_linked(rung) for rung in rungs])
    chart.table = _table(panels, lines, rungs)
    return chart


def values_beside(others: Sequence[Results], workload: str) -> dict[str, dict[str, float]]:
    """Return machine → rung → whole-run tokens per second; empty for a machine without records."""
    return {name_of(results): results.values(workload) for results in others}


def _draw(panels: Sequence[Panel], rungs: list[str], title: str, row: int) -> Chart:
    chart, top = Chart(), -0.6 - LABEL * max(len(panel.lines) for panel in panels)
    _name_machines(chart, panels, top - 0.9)
    for i, panel in enumerate(panels, 1):
        _add_panel(chart, i, panel, rungs)
        _add_lines(chart, i, panel, len(rungs))
        is_left = panel.is_log
        chart.add_annotation(
            x=panel.start if is_left else (panel.start + panel.end) / 2,
            xref="paper",
            xanchor="left" if is_left else "center",
            y=top - 0.4,
            text=f"<b>{panel.head}</b>",
            showarrow=False,
        )
    chart.update_yaxes(
        range=[len(rungs) - 0.4, top - 0.9 - LABEL * len(panels[0].beside)],
        tickvals=list(range(len(rungs))),
        ticktext=rungs,
        griddash="dot",
        zeroline=False,
        ticks="",
        fixedrange=True,  # otherwise the axis's drag area would cover the links
    )
    chart.update_xaxes(fixedrange=True)
    n_rows = len(rungs) - top + 0.5 + LABEL * len(panels[0].beside)
    finish(chart, title, round(row * n_rows), has_axis=False)
    return chart.update_layout(margin_b=32, height=chart.layout.height + 22)


def _add_panel(chart: Chart, i: int, panel: Panel, rungs: list[str]) -> None:
    (low, high), axis = panel.range, f"x{i}" if i > 1 else "x"
    for sides in (False, True):
        mine = [panel.values.get(rung) if (rung in SIDE_BRANCHES) == sides else None for rung in rungs]
        hover = f"%{{x:,.4r}}{panel.suffix}<extra>{panel.head}</extra>"
        add = _add_dots if panel.is_log else _add_bars
        add(chart, panel, mine, sides, xaxis=axis, y0=0, hovertemplate=hover, cliponaxis=False)
    _add_beside(chart, axis, panel, rungs)
    if panel.is_log:
        values = ["\u2002" + _text(panel, panel.values.get(rung)) for rung in rungs]
        left = {"x": [10**low] * len(rungs), "textposition": "middle right", "hoverinfo": "skip"}
        chart.add_scatter(**left, y0=0, xaxis=axis, mode="text", text=values, showlegend=False)
    shown = {"type": "log", **log_ticks(low, high)} if panel.is_log else {"showticklabels": False}
    shown |= {"domain": [panel.start, panel.end], "range": [low, high], "zeroline": False, "ticks": ""}
    chart.update_layout({f"xaxis{i if i > 1 else ''}": shown | {"showgrid": panel.is_log}}, barmode="overlay")


def _name_machines(chart: Chart, panels: Sequence[Panel], top: float) -> None:
    """Write a line above the columns for each other machine, in the colour of its dots."""
    for i, (name, colour) in enumerate(zip(panels[0].beside, BESIDE * 9, strict=False)):
        measured = any(panel.beside.get(name) for panel in panels)
        chart.add_annotation(
            x=0,
            xref="paper",
            xanchor="left",
            y=top - LABEL * i,
            text=f"● {name}" if measured else f"{name}: no record",
            font={"size": 11, "color": colour},
            showarrow=False,
        )


def _add_beside(chart: Chart, axis: str, panel: Panel, rungs: list[str]) -> None:
    for (name, values), colour in zip(panel.beside.items(), BESIDE * 9, strict=False):
        mine = [values.get(rung) for rung in rungs]
        marker = {"color": colour, "size": 8, "symbol": "circle", "line": {"color": colour, "width": 2}}
        hover = f"%{{x:,.4r}}{panel.suffix}<extra>{name}</extra>"
        where = {"xaxis": axis, "y0": 0, "hovertemplate": hover, "cliponaxis": False}
        chart.add_scatter(x=mine, mode="markers", marker=marker, showlegend=False, **where)


def _add_dots(chart: Chart, panel: Panel, values: list[float | None], sides: bool, **options: Any) -> None:
    """Draw dots, not bars, because a log axis has no zero."""
    symbol = "circle-open" if sides else "circle"
    marker = {
        "color": panel.colour,
        "size": 10,
        "symbol": symbol,
        "line": {"color": panel.colour, "width": 2},
    }
    chart.add_scatter(x=values, mode="markers", marker=marker, showlegend=False, **options)


def _add_bars(chart: Chart, panel: Panel, values: list[float | None], sides: bool, **options: Any) -> None:
    marker = fill(PALE if sides else panel.colour, "/" if sides else "")
    text = [_text(panel, value) for value in values]
    chart.add_bar(x=values, orientation="h", text=text, textposition="outside", marker=marker, **options)


def _text(panel: Panel, value: float | None) -> str:
    return "" if value is None else number(value) + panel.suffix


def _add_lines(chart: Chart, i: int, panel: Panel, n_rungs: int) -> None:
    """Draw each line through all rungs, up to its label above them."""
    low, high = panel.range
    colours = dict(zip((n for n in panel.lines if n != FLOOR), RIVALS * 9, strict=False))
    largest_first = sorted(panel.lines.items(), key=lambda line: -line[1])  # keeps lines from crossing labels
    for row, (name, value) in enumerate(largest_first):
        at, y, axis = math.log10(value), -0.6 - LABEL * (row + 0.5), f"x{i}" if i > 1 else None
        line = {"color": colours.get(name, GREEN), "dash": "solid" if name == FLOOR else "dash"}
        ends = {"x0": value, "x1": value, "y0": y - 0.3, "y1": n_rungs - 0.4}
        chart.add_shape(type="line", xref=axis, **ends, line=line | {"width": 1.5})
        at_left = (at - low) / (high - low) > 0.8
        chart.add_annotation(
            x=at,
            xref=axis,
            y=y,
            text=f"{name} {short(value)}",
            font_size=11,
            xanchor="right" if at_left else "left",
            xshift=-4 if at_left else 4,
            showarrow=False,
        )


def _linked(rung: str) -> str:
    return f'<a href="{NOTEBOOKS[rung]}.ipynb">{rung}</a>' if rung in NOTEBOOKS else rung


def _table(panels: Sequence[Panel], lines: Mapping[str, float], rungs: list[str]) -> str:
    """Build the text table; other machines' columns follow the column that they belong to."""
    heads, columns = [], []
    for panel in panels:
        heads += [panel.head, *panel.beside]
        columns += [panel.values, *panel.beside.values()]
    names = [f"{rung} (side branch)" if rung in SIDE_BRANCHES else rung for rung in rungs]
    rows = [[name, *(one.get(rung) for one in columns)] for name, rung in zip(names, rungs, strict=True)]
    blank = [""] * (len(columns) - 1)
    return text_table(["", *heads], rows + [[n, v, *blank] for n, v in lines.items()])
