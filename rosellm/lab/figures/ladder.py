"""Chart a value of every rung of the ladder, and its share of the floor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from rosellm.lab.figures.charts import Chart, ChartError, finish, short, text_table
from rosellm.lab.figures.lines import log_ticks
from rosellm.lab.figures.palette import BLUE, GREEN, HATCHING, MAGENTA, ORANGE, PALE, SKY, VIOLET
from rosellm.lab.records.machines import name_of
from rosellm.lab.records.notebooks import NOTEBOOKS
from rosellm.lab.records.records import Results, number
from rosellm.roseinfer.recipe import SIDE_BRANCHES

FLOOR, SHARE, ROW, LABEL = "bytes floor", "% of the floor", 19, 0.85
RIVALS = (ORANGE, MAGENTA, VIOLET, PALE)  # colours of the lines of rivals, in rotation
BESIDE = (SKY, VIOLET, ORANGE, MAGENTA)  # colours of other machines' dots, in rotation

Values = Mapping[str, float | None]


def ladder_chart(
    values: Values,
    unit: str,
    rivals: Mapping[str, float] | None = None,
    floor: float | None = None,
    *,
    title: str,
    beside: Mapping[str, Mapping[str, float]] | None = None,
) -> Chart:
    """Draw a row per rung, linked to its notebook: its value on a log axis, and its share of the floor.

    values: by rung; None if not measured.
    rivals: values of other engines, by name, drawn as lines through all rows.
    floor: the bytes floor in the unit of the values, drawn as a line; None for no line and no shares.
    beside: values of other machines by rung, by the machine's name.

    Dots of side branches are hollow, and their shares are hatched. Raises ``ChartError`` for no values, or
    values of 0 or less.
    """
    beside = beside or {}
    rungs = list(dict.fromkeys(rung for one in (values, *beside.values()) for rung in one))
    lines = {**({FLOOR: floor} if floor else {}), **(rivals or {})}
    low, high = _log_range(
        [*values.values(), *lines.values(), *(v for own in beside.values() for v in own.values())]
    )
    chart, heads = Chart(), -0.6 - LABEL * len(lines) - 0.4
    _add_dots(chart, unit, values, rungs, BLUE)
    left = {"x": [10**low] * len(rungs), "textposition": "middle right", "hoverinfo": "skip"}
    told = ["" if value is None else number(value) for value in map(values.get, rungs)]
    chart.add_scatter(**left, y0=0, mode="text", text=["\u2002" + text for text in told], showlegend=False)
    for i, ((name, own), colour) in enumerate(zip(beside.items(), cycle(BESIDE))):
        _add_dots(chart, name, own, rungs, colour)
        text = f"● {name}" if own else f"{name}: no record"
        _write(chart, text, heads - 0.5 - LABEL * i, font={"size": 11, "color": colour})
    _add_lines(chart, lines, low, high, len(rungs))
    _write(chart, f"<b>{unit}</b>", heads)
    columns: dict[str, Values] = {unit: values, **beside}
    if floor:
        columns[SHARE] = {rung: value and value / floor * 100 for rung, value in values.items()}
        _add_shares(chart, columns[SHARE], rungs)
        _write(chart, f"<b>{SHARE}</b>", heads, x=0.88, xanchor="center")
    top = heads - 0.5 - LABEL * len(beside)
    chart.update_layout(
        xaxis={"type": "log", "domain": [0, 0.72], "range": [low, high], **log_ticks(low, high)}
    )
    chart.update_xaxes(fixedrange=True, zeroline=False, ticks="")
    chart.update_yaxes(
        range=[len(rungs) - 0.4, top],
        tickvals=list(range(len(rungs))),
        ticktext=[_linked(rung) for rung in rungs],
        griddash="dot",
        zeroline=False,
        ticks="",
        fixedrange=True,  # otherwise the axis's drag area would cover the links
    )
    chart.table = _table(columns, lines, rungs)
    finish(chart, title, round(ROW * (len(rungs) - 0.4 - top)), has_axis=False)
    return chart.update_layout(margin_b=32, height=chart.layout.height + 22)


def values_beside(others: Sequence[Results], workload: str) -> dict[str, dict[str, float]]:
    """Return tokens per second of whole runs of ``workload``, by machine and rung.

    A machine without records has no rungs.
    """
    return {name_of(results): results.values(workload) for results in others}


def _log_range(values: Sequence[float | None]) -> tuple[float, float]:
    known = [value for value in values if value is not None]
    if not known or min(known) <= 0:
        raise ChartError("a log axis needs at least one value, and none that is 0 or less")
    return math.log10(min(known) / 4), math.log10(max(known) * 1.4)


def _add_dots(chart: Chart, name: str, values: Values, rungs: list[str], colour: str) -> None:
    """Draw a dot per rung (a bar would need a zero, which a log axis lacks), hollow for side branches."""
    symbols = ["circle-open" if rung in SIDE_BRANCHES else "circle" for rung in rungs]
    marker = {"color": colour, "size": 9, "symbol": symbols, "line": {"color": colour, "width": 2}}
    hover = f"%{{x:,.4r}}<extra>{name}</extra>"
    x = [values.get(rung) for rung in rungs]
    chart.add_scatter(x=x, y0=0, mode="markers", marker=marker, hovertemplate=hover, cliponaxis=False)


def _add_shares(chart: Chart, shares: Values, rungs: list[str]) -> None:
    x, sides = [shares.get(rung) for rung in rungs], [rung in SIDE_BRANCHES for rung in rungs]
    text = ["" if share is None else f"{number(share)} %" for share in x]
    pattern = HATCHING | {"shape": ["/" if side else "" for side in sides]}
    marker = {"color": [PALE if side else GREEN for side in sides], "pattern": pattern}
    style: dict[str, Any] = {
        "orientation": "h",
        "textposition": "outside",
        "cliponaxis": False,
        "hoverinfo": "skip",
    }
    chart.add_bar(x=x, y0=0, xaxis="x2", text=text, marker=marker, **style)
    most = max((share for share in x if share is not None), default=1)
    chart.update_layout(xaxis2={"domain": [0.76, 1], "range": [0, most * 1.6], "visible": False})


def _write(chart: Chart, text: str, y: float, x: float = 0, xanchor: str = "left", **style: Any) -> None:
    chart.add_annotation(text=text, x=x, xref="paper", xanchor=xanchor, y=y, showarrow=False, **style)


def _add_lines(chart: Chart, lines: Mapping[str, float], low: float, high: float, n_rungs: int) -> None:
    """Draw a vertical line per value through all rungs, up to its label above the rungs."""
    colours = {FLOOR: GREEN} | dict(zip((name for name in lines if name != FLOOR), cycle(RIVALS)))
    largest_first = sorted(lines.items(), key=lambda line: -line[1])  # keeps lines from crossing labels
    for row, (name, value) in enumerate(largest_first):
        at, y = math.log10(value), -0.6 - LABEL * (row + 0.5)
        line = {"color": colours[name], "dash": "solid" if name == FLOOR else "dash", "width": 1.5}
        chart.add_shape(type="line", x0=value, x1=value, y0=y - 0.3, y1=n_rungs - 0.4, line=line)
        at_left = (at - low) / (high - low) > 0.8
        side = {"xanchor": "right", "xshift": -4} if at_left else {"xanchor": "left", "xshift": 4}
        text = f"{name} {short(value)}"
        chart.add_annotation(x=at, y=y, text=text, font_size=11, showarrow=False, **side)


def _linked(rung: str) -> str:
    return f'<a href="{NOTEBOOKS[rung]}.ipynb">{rung}</a>' if rung in NOTEBOOKS else rung


def _table(columns: Mapping[str, Values], lines: Mapping[str, float], rungs: list[str]) -> str:
    names = [f"{rung} (side branch)" if rung in SIDE_BRANCHES else rung for rung in rungs]
    rows = [
        [name, *(one.get(rung) for one in columns.values())] for name, rung in zip(names, rungs, strict=True)
    ]
    blank = [""] * (len(columns) - 1)
    return text_table(["", *columns], rows + [[name, value, *blank] for name, value in lines.items()])
