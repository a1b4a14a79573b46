"""Line charts on linear or logarithmic axes, with each line labelled at its end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rosellm.lab.figures.charts import Chart, ChartError, finish, same_length, short, text_table
from rosellm.lab.figures.palette import PALETTE, SYMBOLS, TEXT
from rosellm.lab.records.records import number


def step_lines(
    x: Sequence[float],
    series: Mapping[str, Sequence[float | None]],
    x_title: str,
    y_title: str,
    *,
    title: str,
    log_x: bool = False,
    log_y: bool = False,
    floors: Mapping[str, float | Sequence[float]] | None = None,
) -> Chart:
    """Draw a line with markers per series, labelled at its end.

    ``floors`` (a value, or one per x) are dashed.
    """
    dashed: dict[str, Sequence[float]] = {
        name: [f] * len(x) if isinstance(f, (int, float)) else list(f) for name, f in (floors or {}).items()
    }
    same_length(x=x, **series, **dashed)
    chart, styles = Chart(), {}
    for i, (name, values) in enumerate(series.items()):
        styles[name] = (PALETTE[i % len(PALETTE)], "●")
        marker = {"symbol": SYMBOLS[i % len(SYMBOLS)], "size": 8, "color": styles[name][0]}
        chart.add_scatter(x=list(x), y=list(values), name=name, mode="lines+markers", marker=marker)
    for name, level in dashed.items():
        styles[name] = (TEXT, "┄")
        chart.add_scatter(
            x=list(x), y=level, name=name, mode="lines", line={"color": TEXT, "dash": "dash", "width": 1.5}
        )
    lines: dict[str, Sequence[float | None]] = {**series, **dashed}
    if not any(value is not None for values in lines.values() for value in values):
        raise ChartError("there is no value to draw")
    low, high = _range([v for values in lines.values() for v in values if v is not None], log_y)
    height = 300
    ends = {name: [v for v in values if v is not None][-1] for name, values in lines.items() if any(values)}
    _name_at_right(chart, {f"{n}": (v, *styles[n]) for n, v in ends.items()}, low, high, height, log_y)
    ticks = {"type": "log", **log_ticks(low, high)} if log_y else {}
    chart.update_yaxes(range=[low, high], title_text=y_title, **ticks)
    chart.update_xaxes(title_text=x_title, type="log" if log_x else "linear", showgrid=False)
    if log_x or len(x) <= 12:
        chart.update_xaxes(tickvals=list(x), ticktext=[number(value) for value in x])
    chart.table = text_table([x_title, *lines], zip(x, *lines.values(), strict=True))
    return finish(chart, title, height)


def _name_at_right(chart: Chart, named: dict, low: float, high: float, height: int, log: bool) -> None:
    """Write each line's name and value to the right of the plot, moved apart if they would overlap."""
    place = math.log10 if log else float
    wanted = sorted((place(value), name) for name, (value, _, _) in named.items())
    pixels = _spread([(at - low) / (high - low) * height for at, _ in wanted], gap=15, top=height)
    for (at, name), pixel in zip(wanted, pixels, strict=True):
        value, colour, glyph = named[name]
        chart.add_annotation(
            x=1,
            xref="paper",
            xanchor="left",
            xshift=6,
            y=at,
            yshift=pixel - (at - low) / (high - low) * height,
            text=f'<span style="color:{colour}">{glyph}</span> {name} {short(value)}',
            font_size=11,
            showarrow=False,
        )
    longest = max((len(f"{name} {short(value[0])}") for name, value in named.items()), default=0)
    chart.update_layout(margin_r=min(300, 30 + round(6.2 * longest)))


def _spread(wanted: list[float], gap: float, top: float) -> list[float]:
    """Space ascending positions at least ``gap`` apart, below ``top`` if they fit."""
    placed: list[float] = []
    for at in wanted:
        placed.append(max(at, placed[-1] + gap) if placed else at)
    limit = top
    for i in range(len(placed) - 1, -1, -1):
        placed[i] = min(placed[i], limit)
        limit = placed[i] - gap
    return placed


def _range(values: list[float], log: bool) -> tuple[float, float]:
    if not log:
        return min(0.0, *values) * 1.08, max(*values, 0.0) * 1.08 or 1.0
    if min(values) <= 0:
        raise ChartError("a log axis needs values above 0")
    return math.log10(min(values) / 1.25), math.log10(max(values) * 1.25)


def log_ticks(low: float, high: float) -> dict[str, Any]:
    """Return ticks for a log axis from ``10**low`` to ``10**high``; fewer per decade over more decades."""
    steps = (1, 2, 5) if high - low < 1.8 else (1, 3) if high - low < 3.2 else (1,)
    ticks = [s * 10.0**k for k in range(math.floor(low), math.ceil(high)) for s in steps]
    return {"tickvals": ticks, "ticktext": [_tick(tick) for tick in ticks]}


def _tick(value: float) -> str:
    size, suffix = next(((s, x) for s, x in ((1e6, "M"), (1e3, "k")) if value >= s), (1, ""))
    return f"{value / size:.9g}{suffix}"
