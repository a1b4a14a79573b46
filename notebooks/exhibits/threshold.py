"""Draw how top-k and top-p sampling narrows down a vocabulary: tiles, candidates, and drawn tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rosellm.lab.figures.charts import Chart, ChartError, finish, text_table
from rosellm.lab.figures.palette import BLUE, GREEN, ORANGE, PALE, TEXT
from rosellm.lab.records.records import number

Point = tuple[int, float]  # tile, logit
DRAWN = "drawn, in order"


def threshold_chart(
    maxima: Sequence[float],
    width: int,
    bound: float,
    candidates: Sequence[Point],
    tried: Sequence[Point],
    lowest_kept: float,
    title: str,
) -> Chart:
    """Draw a row's tiles by position and largest logit, the bound that few reach, and the tokens of those.

    maxima ``[TILES]``: the largest of each tile's ``width`` logits. bound: minimum for a tile to be read.
    candidates: the logits in read tiles that reach it. tried: tokens drawn in order; the last one is kept.
    lowest_kept: the smallest logit that the definition keeps. Raises ``ChartError``.
    """
    read = [top for top in maxima if top >= bound]
    if not read or not tried or not lowest_kept >= bound:
        raise ChartError("the bound must be reached by a tile and not exceed what is kept; draw a token")
    passed = [(tile, top) for tile, top in enumerate(maxima) if top < bound]
    kept = [point for point in candidates if point[1] >= lowest_kept]
    others = [point for point in candidates if point[1] < lowest_kept]
    chart = Chart()
    _scatter(chart, "largest logit of a tile that is not read", passed, _marker(PALE, "circle", 3))
    _scatter(chart, "candidate that is not kept", others, _marker(BLUE, "x", 7))
    _scatter(chart, "candidate that is kept", kept, _marker(GREEN, "circle", 7))
    _number(chart, tried)
    _level(chart, bound, "bound", "dash", "top")
    _level(chart, lowest_kept, "last kept", "dot", "bottom")
    chart.update_layout(margin_r=100)
    chart.update_xaxes(title_text=f"tile of {width} tokens", showgrid=False)
    chart.update_yaxes(title_text="logit")
    chart.table = text_table(
        ["tokens", "number", "logits from"],
        [
            ["of the vocabulary", width * len(maxima), None],
            ["in tiles that are read", width * len(read), None],
            ["candidates", len(candidates), bound],
            ["kept", len(kept), lowest_kept],
            [DRAWN, len(tried), min(logit for _, logit in tried)],
        ],
    )
    return finish(chart, title, 300, legend=[trace.name for trace in chart.data])


def _marker(colour: str, symbol: str, size: int) -> dict[str, Any]:
    return {"color": colour, "symbol": symbol, "size": size}


def _scatter(chart: Chart, name: str, points: Sequence[Point], marker: dict, **more: Any) -> None:
    if points:
        tiles, logits = zip(*points, strict=True)
        options = {"mode": "markers", "marker": marker} | more
        chart.add_scatter(x=list(tiles), y=list(logits), name=name, **options)


def _number(chart: Chart, tried: Sequence[Point]) -> None:
    """Draw numbered rings around the drawn tokens."""
    ring = {"color": "rgba(0,0,0,0)", "size": 17, "line": {"color": ORANGE, "width": 2}}
    texts = [f"<b>{i}</b>" for i in range(1, len(tried) + 1)]
    font = {"color": ORANGE, "size": 14}
    texted = {"mode": "markers+text", "text": texts, "textposition": "top center", "textfont": font}
    _scatter(chart, DRAWN, tried, ring, **texted)


def _level(chart: Chart, level: float, name: str, dash: str, yanchor: str) -> None:
    """Draw a horizontal line, labelled at the right of the plot."""
    chart.add_hline(level, line={"color": TEXT, "dash": dash, "width": 1.2})
    place = {"x": 1, "xref": "paper", "xanchor": "left", "xshift": 6, "y": level, "yanchor": yanchor}
    chart.add_annotation(**place, text=f"{name} {number(level)}", font_size=11, showarrow=False)
