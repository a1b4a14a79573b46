"""The whole ladder as a chart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from rosellm.lab.figures.charts import Chart, ChartError, finish, short, text_table
from rosellm.lab.figures.lines import log_ticks
from rosellm.lab.figures.palette import BLUE, GREEN, INK, MAGENTA, ORANGE, PALE, PAPER, SKY, VIOLET, fill
from rosellm.lab.records.findings import NOTEBOOKS
from rosellm.roseinfer.recipe import SIDE_BRANCHES

FLOOR, ROW, LABEL = "bytes floor", 19, 0.85


class _Panel(NamedTuple):
    """One column of bars: its head, the share of the width, values by rung, and how a value is written."""

    head: str
    start: float
    end: float
    values: Mapping[str, float | None]
    suffix: str
    colour: str


def ladder_chart(
    values: Mapping[str, float | None],
    unit: str,
    rivals: Mapping[str, float] | None = None,
    floor: float | None = None,
    *,
    title: str,
    live: Mapping[str, float | None] | None = None,
) -> Chart:
    """A row a rung, linked to its notebook: its value on a log axis, its share of the floor, its live one.

    ``rivals`` and the bytes ``floor`` (in the values' unit) are lines through the first column. Side branches
    are hatched. None: not measured.
    """
    lines = {**({FLOOR: floor} if floor else {}), **(rivals or {})}
    known = [value for value in (*values.values(), *lines.values()) if value is not None]
    if not known or min(known) <= 0:
        raise ChartError("a log axis needs at least one value, and none that is 0 or less")
    panels = _panels(values, unit, floor, live)
    chart, rungs = Chart(), list(values)
    for i, panel in enumerate(panels, 1):
        _add_panel(chart, i, panel, rungs)
    low, high = math.log10(min(known) / 4), math.log10(max(known) * 1.4)
    chart.update_layout(xaxis={"type": "log", "range": [low, high], **log_ticks(low, high)})
    top = _add_lines(chart, lines, low, high, len(rungs))
    for panel in panels:
        x = panel.start if panel is panels[0] else (panel.start + panel.end) / 2
        anchor = "left" if panel is panels[0] else "center"
        chart.add_annotation(
            x=x, xref="paper", xanchor=anchor, y=top - 0.4, text=f"<b>{panel.head}</b>", showarrow=False
        )
    chart.update_yaxes(
        range=[len(rungs) - 0.4, top - 0.9],
        tickvals=list(range(len(rungs))),
        ticktext=[_linked(rung) for rung in rungs],
        showgrid=False,
        zeroline=False,
        ticks="",
        fixedrange=True,  # or what drags the axis would lie on the links
    )
    chart.update_xaxes(fixedrange=True)
    chart.table = _table(panels, lines, rungs)
    finish(chart, title, round(ROW * (len(rungs) - top + 0.5)), has_axis=False)
    return chart.update_layout(margin_b=32, height=chart.layout.height + 22)


def _panels(
    values: Mapping[str, float | None],
    unit: str,
    floor: float | None,
    live: Mapping[str, float | None] | None,
) -> list[_Panel]:
    ends = iter((0.54, 0.76, 1.0) if live else (0.72, 1.0))
    panels = [_Panel(unit, 0.0, next(ends), values, "", BLUE)]
    if floor:
        shares = {rung: value and value / floor * 100 for rung, value in values.items()}
        panels.append(_Panel("% of the floor", panels[-1].end + 0.04, next(ends), shares, " %", GREEN))
    if live:
        panels.append(_Panel(f"here, {unit}", panels[-1].end + 0.04, 1.0, live, "", SKY))
    return panels


def _add_panel(chart: Chart, i: int, panel: _Panel, rungs: list[str]) -> None:
    x = [panel.values.get(rung) for rung in rungs]
    known = [value for value in x if value is not None]
    whole = min(known, default=0) >= 100
    x = [value if value is None or not whole else round(value) for value in x]
    is_first = i == 1
    for sides, colour, ink in ((False, panel.colour, PAPER), (True, PALE, INK)):
        chart.add_bar(
            x=[
                value if (rung in SIDE_BRANCHES) == sides else None
                for rung, value in zip(rungs, x, strict=True)
            ],
            y0=0,
            orientation="h",
            xaxis="x" if is_first else f"x{i}",
            texttemplate=f"%{{x:{',.0f' if whole else '.3r'}}}{panel.suffix}",
            textposition="inside" if is_first else "outside",
            insidetextanchor="start",
            constraintext="none",
            cliponaxis=False,
            insidetextfont_color=ink,
            marker=fill(colour, "/" if sides else ""),
            hovertemplate=f"%{{x:,.4r}}{panel.suffix}<extra>{panel.head}</extra>",
        )
    shown = {} if is_first else {"range": [0, max(known, default=1) * 1.6], "showticklabels": False}
    axis = {"domain": [panel.start, panel.end], "zeroline": False, "ticks": "", "showgrid": is_first, **shown}
    chart.update_layout({f"xaxis{'' if is_first else i}": axis}, barmode="overlay")


def _add_lines(chart: Chart, lines: Mapping[str, float], low: float, high: float, n_rungs: int) -> float:
    """Draws each line through all rungs up to its name above them; the y above the names."""
    colours = dict(zip((n for n in lines if n != FLOOR), (ORANGE, MAGENTA, VIOLET, PALE) * 9, strict=False))
    largest_first = sorted(lines.items(), key=lambda line: -line[1])  # so that no line crosses a name
    for row, (name, value) in enumerate(largest_first):
        at, y, colour = math.log10(value), -0.6 - LABEL * (row + 0.5), colours.get(name, GREEN)
        line = {"color": colour, "dash": "solid" if name == FLOOR else "dash", "width": 1.5}
        chart.add_shape(type="line", x0=value, x1=value, y0=y - 0.3, y1=n_rungs - 0.4, line=line)
        at_left = (at - low) / (high - low) > 0.8
        chart.add_annotation(
            x=at,
            y=y,
            text=f"{name} {short(value)}",
            font_size=11,
            xanchor="right" if at_left else "left",
            xshift=-4 if at_left else 4,
            showarrow=False,
        )
    return -0.6 - LABEL * len(lines)


def _linked(rung: str) -> str:
    return f'<a href="{NOTEBOOKS[rung]}.ipynb">{rung}</a>' if rung in NOTEBOOKS else rung


def _table(panels: list[_Panel], lines: Mapping[str, float], rungs: list[str]) -> str:
    names = [f"{rung} (side branch)" if rung in SIDE_BRANCHES else rung for rung in rungs]
    rows = [
        [name, *(panel.values.get(rung) for panel in panels)] for name, rung in zip(names, rungs, strict=True)
    ]
    blank = [""] * (len(panels) - 1)
    return text_table(["", *(p.head for p in panels)], rows + [[n, v, *blank] for n, v in lines.items()])
