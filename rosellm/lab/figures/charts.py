"""Code that all charts share: style, text tables and display."""

from __future__ import annotations

import html
import json
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from IPython.display import Markdown, display

from rosellm.errors import RoseError
from rosellm.lab.figures.palette import BLUE, GRID, SKY, TEXT
from rosellm.lab.records.records import number

PLOTLY = "application/vnd.plotly.v1+json"

FIGURE = re.compile(r"[+−~-]?\d[\d.,]*( ?%)?( ~)?")  # ``~`` marks a difference within the noise
WIDTH, LINE, TITLE_CHARACTERS = 760, 19, 86
AXIS = {
    "gridcolor": GRID,
    "linecolor": GRID,
    "zerolinecolor": GRID,
    "ticks": "outside",
    "tickcolor": GRID,
    "automargin": True,
}
TEMPLATE = go.layout.Template(
    layout={
        "font": {"color": TEXT, "size": 12, "family": "Helvetica Neue, Arial, Liberation Sans, sans-serif"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "xaxis": AXIS,
        "yaxis": AXIS | {"ticklabelstandoff": 4},
        "title": {"x": 0, "xref": "container", "xanchor": "left", "yref": "container", "yanchor": "top"},
        "legend": {
            "orientation": "h",
            "traceorder": "normal",
            "x": 0,
            "y": 0,
            "yref": "container",
            "yanchor": "bottom",
        },
        "barcornerradius": 2,
        "hoverlabel": {"align": "left"},
        "sliderdefaults": {"bgcolor": BLUE, "activebgcolor": SKY, "bordercolor": GRID, "tickcolor": TEXT},
    }
)


class ChartError(RoseError):
    """Values that are inconsistent or that a chart cannot show."""


class Chart(go.Figure):
    """A plotly figure whose ``table`` holds its numbers as text."""

    table = ""


def text_table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table as text: words are aligned left, figures right; ``records.number`` formats numbers.

    Raises ``ChartError`` if a row has more or fewer cells than there are headers.
    """
    rows = [list(row) for row in rows]
    for row in rows:
        if len(row) != len(headers):
            raise ChartError(f"a row of {len(row)} cells does not fit {len(headers)} headers: {row}")
    written = [list(map(str, headers)), *([_cell(value) for value in row] for row in rows)]
    columns = list(zip(*written, strict=True))
    widths = [max(map(len, column)) for column in columns]
    written.insert(1, ["─" * width for width in widths])
    pads = [str.rjust if is_numeric else str.ljust for is_numeric in _numeric(headers, rows)]
    padded = ([pad(cell, w) for pad, cell, w in zip(pads, line, widths, strict=True)] for line in written)
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


@dataclass(frozen=True, repr=False)
class Table:
    """A table that is shown as HTML in pages and JupyterLab, and as aligned text elsewhere.

    notes: lines below the table.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[Any]]
    notes: Sequence[str] = ()

    def __repr__(self) -> str:
        return "\n".join([text_table(self.headers, self.rows), *self.notes])

    def _repr_html_(self) -> str:
        right = _numeric(self.headers, self.rows)
        head = _html_row("th", self.headers, right)
        body = "\n".join(_html_row("td", map(_cell, row), right) for row in self.rows)
        below = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return (
            f'<table class="figures">\n<thead>\n{head}\n</thead>\n<tbody>\n{body}\n</tbody>\n</table>{below}'
        )


def show_table(headers: Sequence[str], rows: Iterable[Sequence[Any]], *notes: str) -> None:
    """Display a :class:`Table`, with ``notes`` as lines below it."""
    display(Table(headers, [list(row) for row in rows], notes))


def _numeric(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[bool]:
    """Return for each column whether it is aligned right: it has a number, or all its texts are figures."""
    columns = [[row[i] for row in rows] for i in range(len(headers))]
    return [any(map(_is_number, column)) or _are_figures(map(_cell, column)) for column in columns]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _are_figures(cells: Iterable[str]) -> bool:
    told = [cell for cell in cells if cell not in ("", "–")]
    return bool(told) and all(map(FIGURE.fullmatch, told))


def _html_row(tag: str, cells: Iterable[str], right: Sequence[bool]) -> str:
    sides = ["right" if to_right else "left" for to_right in right]
    written = (
        f'<{tag} style="text-align: {side}">{html.escape(cell)}</{tag}>'
        for cell, side in zip(cells, sides, strict=True)
    )
    return f"<tr>{''.join(written)}</tr>"


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value) if value is None or isinstance(value, (int, float)) else str(value)


def say(text: str) -> None:
    """Display ``text`` as Markdown."""
    display(Markdown(text))


def show(figure: go.Figure) -> None:
    """Display a figure as plotly JSON, and its table as plain text.

    ``make refresh`` adds a PNG for readers without JavaScript.
    """
    display(bundle(figure), raw=True)


def bundle(figure: go.Figure) -> dict[str, Any]:
    """Return the data that :func:`show` displays, by MIME type; floats are rounded to five digits."""
    drawn = json.loads(figure.to_json(), parse_float=lambda digits: float(f"{float(digits):.5g}"))
    drawn["config"] = {"displayModeBar": False}
    return {
        PLOTLY: drawn,
        "text/plain": getattr(figure, "table", "") or figure.layout.title.text or "a figure",
    }


def finish(chart: Chart, title: str, body: int, legend: Sequence[str] = (), has_axis: bool = True) -> Chart:
    """Set a chart's title, size, margins and style, and return the chart.

    body: height of the plot in pixels, without the axis below it.
    legend: names in the legend; without names, there is no legend.
    has_axis: whether an axis needs space below the plot.
    """
    lines = textwrap.wrap(title, TITLE_CHARACTERS)
    top, rows = 16 + LINE * len(lines), math.ceil(sum(7 * len(name) + 50 for name in legend) / (WIDTH - 40))
    bottom = (LINE + 2) * rows + (55 if has_axis else 10)
    height = top + body + bottom
    right = chart.layout.margin.r or 20
    chart.update_layout(
        template=TEMPLATE,
        title={"text": "<br>".join(lines), "font_size": 15, "y": 1 - (8 + LINE * (len(lines) - 1)) / height},
        width=WIDTH,
        height=height,
        margin={"l": 20, "r": right, "t": top, "b": bottom},
        showlegend=bool(legend),
    )
    return chart


def short(value: float | None) -> str:
    """Format a number in three significant digits with a suffix k or M, such as ``114k`` or ``1.91k``."""
    for size, suffix in ((1e6, "M"), (1e3, "k")):
        if value is not None and abs(value) >= size * 0.9995:
            return number(float(value / size)) + suffix
    return number(value)
