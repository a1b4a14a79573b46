"""A horizontal bar chart as SVG, for pages that run no scripts, such as README.md.

plotly draws in a browser, and README.md's pictures are checked where there is none. So this renders the
figure that plotly would draw, with its axes, bars, lines and texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

import plotly.graph_objects as go

from rosellm.lab.figures.palette import GRID, INK
from rosellm.lab.figures.svg import FONT, px, rect, text_width, texts

ANCHORS = {"left": "start", "center": "middle", "right": "end"}
BAR, TEXT_SIZE, BESIDE_AXIS = 0.8, 12, 10
HATCH = (
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<path d="M0 0V6" stroke="{INK}" stroke-opacity="0.35" stroke-width="3"/></pattern>'
)


def bars_svg(chart: go.Figure) -> str:
    """Bars with their values inside, upright lines, notes, ticks and the title: what a ladder is made of."""
    page = _Page(chart)
    width, height, title = chart.layout.width, chart.layout.height, chart.layout.title.text
    heading = texts(title.split("<br>"), 8, 22, 15, page.ink, 19, anchor="start", extra=' font-weight="bold"')
    drawn = "".join((*page.ticks(), *page.bars(), *page.lines(), *page.notes()))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="{FONT}" role="img"><title>{escape(title.replace("<br>", " "))}'
        f"</title><defs>{HATCH}</defs>{heading}{drawn}</svg>\n"
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
        for reference in sorted({bar.xaxis for bar in self.chart.data}):
            axis = self.layout[f"xaxis{reference[1:]}"]
            for tick, name in zip(axis.tickvals, axis.ticktext, strict=True):
                if axis.range[0] <= math.log10(tick) <= axis.range[1]:
                    at = self.x(reference, tick)
                    yield rect(at, self.y(-0.5), 1, self.bottom - self.y(-0.5), 0, GRID)
                    yield texts([name], at, self.bottom + 16, TEXT_SIZE, self.ink)

    def bars(self) -> Iterator[str]:
        thick = (self.y(1) - self.y(0)) * BAR
        for bar in self.chart.data:
            start = self.left + self.layout[f"xaxis{bar.xaxis[1:]}"].domain[0] * self.width
            for i, (value, told) in enumerate(zip(bar.x, bar.text, strict=True)):
                if value is not None:
                    size = start, self.y(i) - thick / 2, self.x(bar.xaxis, value) - start, thick, 2
                    yield rect(*size, bar.marker.color)
                    yield rect(*size, "url(#hatch)") if bar.marker.pattern.shape else ""
                    ink = bar.insidetextfont.color
                    yield texts([told], start + 6, self.y(i) + 4, TEXT_SIZE, ink, anchor="start")

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
            size, text = note.font.size or TEXT_SIZE, note.text.removeprefix("<b>").removesuffix("</b>")
            weight = ' font-weight="bold"' if text != note.text else ""
            yield texts(
                [text], x, self.y(note.y) + 4, size, self.ink, anchor=ANCHORS[note.xanchor], extra=weight
            )
