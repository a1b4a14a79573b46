"""The ladder's chart as SVG, for pages that run no scripts, such as README.md.

plotly draws in a browser, and README.md's pictures are checked where there is none. So this renders the
figure that plotly would draw, with its axes, dots, lines and texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from itertools import repeat

import plotly.graph_objects as go

from rosellm.lab.figures.palette import GRID
from rosellm.lab.figures.svg import FONT, px, rect, text_width, texts

ANCHORS = {"left": "start", "center": "middle", "right": "end"}
RADIUS, TEXT_SIZE, BESIDE_AXIS = 5, 12, 10


def ladder_svg(chart: go.Figure) -> str:
    """Dots with their values beside the names, upright lines, notes, ticks and the title."""
    page = _Page(chart)
    width, height, title = chart.layout.width, chart.layout.height, chart.layout.title.text
    heading = texts(title.split("<br>"), 8, 22, 15, page.ink, 19, anchor="start", extra=' font-weight="bold"')
    drawn = "".join((*page.ticks(), *page.rungs(), *page.lines(), *page.notes()))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="{FONT}" role="img"><title>{escape(title.replace("<br>", " "))}'
        f"</title>{heading}{drawn}</svg>\n"
    )


class _Page:
    """A chart's layout in pixels."""

    def __init__(self, chart: go.Figure) -> None:
        self.chart, self.layout, self.ink = chart, chart.layout, chart.layout.font.color
        margin, names = self.layout.margin, self.layout.yaxis.ticktext
        self.left = margin.l + max(text_width(name, TEXT_SIZE) for name in names) + BESIDE_AXIS
        self.width = self.layout.width - self.left - margin.r
        self.top, self.bottom = margin.t, self.layout.height - margin.b

    def x(self, reference: str, value: float, is_exponent: bool = False) -> float:
        """Where a value is on the axis that is called ``x`` or ``x2``, or on ``paper``."""
        if reference == "paper":
            return self.left + value * self.width
        axis = self.layout[f"xaxis{reference[1:]}"]
        (low, high), (start, end) = axis.range, axis.domain
        at = math.log10(value) if axis.type == "log" and not is_exponent else value
        return self.left + (start + (at - low) / (high - low) * (end - start)) * self.width

    def y(self, value: float) -> float:
        low, high = self.layout.yaxis.range
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)

    def ticks(self) -> Iterator[str]:
        for tick, name in zip(self.layout.yaxis.tickvals, self.layout.yaxis.ticktext, strict=True):
            yield texts([name], self.left - BESIDE_AXIS, self.y(tick) + 4, TEXT_SIZE, self.ink, anchor="end")
        for reference in sorted({trace.xaxis for trace in self.chart.data}):
            axis = self.layout[f"xaxis{reference[1:]}"]
            for tick, name in zip(axis.tickvals, axis.ticktext, strict=True):
                if axis.range[0] <= math.log10(tick) <= axis.range[1]:
                    at = self.x(reference, tick)
                    yield rect(at, self.y(-0.5), 1, self.bottom - self.y(-0.5), 0, GRID)
                    yield texts([name], at, self.bottom + 16, TEXT_SIZE, self.ink)

    def rungs(self) -> Iterator[str]:
        """Each panel's values in a column at its left, and a dot for each where the axis has it."""
        for trace in self.chart.data:
            for i, (value, text) in enumerate(zip(trace.x, trace.text or repeat(""), strict=False)):
                if value is not None and trace.mode == "text":
                    x, y = self.x(trace.xaxis, value) + 6, self.y(i) + 4
                    yield texts([text.strip()], x, y, TEXT_SIZE, self.ink, anchor="start")
                elif value is not None:
                    inner = "none" if trace.marker.symbol == "circle-open" else trace.marker.color
                    yield (
                        f'<circle cx="{px(self.x(trace.xaxis, value))}" cy="{px(self.y(i))}" r="{RADIUS}" '
                        f'fill="{inner}" stroke="{trace.marker.color}" stroke-width="2"/>'
                    )

    def lines(self) -> Iterator[str]:
        for line in self.layout.shapes:
            at, dash = px(self.x(line.xref or "x", line.x0)), "5 4" if line.line.dash == "dash" else "none"
            yield (
                f'<path d="M{at} {px(self.y(line.y0))}V{px(self.y(line.y1))}" stroke="{line.line.color}" '
                f'stroke-width="1.8" stroke-dasharray="{dash}"/>'
            )

    def notes(self) -> Iterator[str]:
        for note in self.layout.annotations:
            x = self.x(note.xref or "x", note.x, is_exponent=True) + (note.xshift or 0)
            ink, size = note.font.color or self.ink, note.font.size or TEXT_SIZE
            text = note.text.removeprefix("<b>").removesuffix("</b>")
            weight = ' font-weight="bold"' if text != note.text else ""
            yield texts([text], x, self.y(note.y) + 4, size, ink, anchor=ANCHORS[note.xanchor], extra=weight)
