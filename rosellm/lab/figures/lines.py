"""Line charts on linear or logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rosellm.lab.figures.charts import Chart, ChartError, finish, text_table
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
    """Draw a line with markers for each series.

    series: the values at each x, by name; None leaves a gap.
    floors: dashed lines by name, each a value, or one value per x.

    Raises ``ChartError`` for values of 0 or less on a logarithmic y-axis.
    """
    dashed: dict[str, Sequence[float]] = {
        name: [f] * len(x) if isinstance(f, (int, float)) else list(f) for name, f in (floors or {}).items()
    }
    lines: dict[str, Sequence[float | None]] = {**series, **dashed}
    known = [value for values in lines.values() for value in values if value is not None] or [1]
    if log_y and min(known) <= 0:
        raise ChartError("a log axis needs values above 0")
    chart = Chart()
    for i, (name, values) in enumerate(series.items()):
        marker = {"symbol": SYMBOLS[i % len(SYMBOLS)], "size": 8, "color": PALETTE[i % len(PALETTE)]}
        chart.add_scatter(x=list(x), y=list(values), name=name, mode="lines+markers", marker=marker)
    line = {"color": TEXT, "dash": "dash", "width": 1.5}
    for name, level in dashed.items():
        chart.add_scatter(x=list(x), y=level, name=name, mode="lines", line=line)
    scale: dict[str, Any] = {"rangemode": "tozero"}
    if log_y:
        scale = {"type": "log", **log_ticks(math.log10(min(known)) - 0.1, math.log10(max(known)) + 0.1)}
    chart.update_yaxes(title_text=y_title, **scale)
    chart.update_xaxes(title_text=x_title, type="log" if log_x else "linear", showgrid=False)
    if log_x or len(x) <= 12:
        chart.update_xaxes(tickvals=list(x), ticktext=[number(value) for value in x])
    chart.table = text_table([x_title, *lines], zip(x, *lines.values(), strict=True))
    return finish(chart, title, 300, legend=list(lines))


def log_ticks(low: float, high: float) -> dict[str, Any]:
    """Return ticks for a log axis from ``10**low`` to ``10**high``, fewer per decade on a longer axis."""
    steps = (1, 2, 5) if high - low < 1.8 else (1, 3) if high - low < 3.2 else (1,)
    ticks = [s * 10.0**k for k in range(math.floor(low), math.ceil(high)) for s in steps]
    return {"tickvals": ticks, "ticktext": [_tick(tick) for tick in ticks]}


def _tick(value: float) -> str:
    size, suffix = next(((s, x) for s, x in ((1e6, "M"), (1e3, "k")) if value >= s), (1, ""))
    return f"{value / size:.9g}{suffix}"
