"""Draw the KV pool over time: who holds its blocks, and what happens to each request."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from rosellm.lab.figures.charts import Chart, ChartError, finish, text_table
from rosellm.lab.figures.palette import HATCHING, INK, PALE, PALETTE, PAPER, TEXT
from rosellm.roseinfer.exhibits import load_exhibit

_pool_log = load_exhibit("pool_log")
KINDS, PoolLog = _pool_log.KINDS, _pool_log.PoolLog

MAX_MOMENTS, POOL_HEIGHT = 200, 270
MARKS = {  # symbols; colours belong to the requests
    "preempted": "x",
    "evicted": "diamond",
    "cancelled": "square",
    "failed": "cross",
    "finished": "circle",
}


def pool_chart(log: PoolLog, title: str) -> Chart:
    """Draw the log's pool at each moment, and its events."""
    holders = sorted({request for moment in log.moments for request in moment.requests})
    return pool_over_time(
        {str(one): [moment.requests.get(one, 0) for moment in log.moments] for one in holders},
        log.engine.num_kv_blocks,
        {kind: [(h.moment, h.who) for h in log.happenings if h.kind == kind] for kind in KINDS},
        cached=[moment.cached for moment in log.moments],
        lost=[moment.lost for moment in log.moments],
        title=title,
    )


def pool_over_time(
    requests: Mapping[str, Sequence[int]],
    n_blocks: int,
    marks: Mapping[str, Sequence[tuple[int, str]]],
    *,
    cached: Sequence[int],
    lost: Sequence[int],
    title: str,
) -> Chart:
    """Draw who holds a pool's blocks after each step: requests from the bottom up, the prefix cache on top.

    Requests are distinguished by colour and labelled where there is room; cached and lost blocks are those
    that no request holds; white is free. marks: key of ``MARKS`` → (step, request) of each event, drawn above
    the pool. In a long run only every k-th step is drawn, but every mark.
    """
    lengths = {name: len(column) for name, column in {"cached": cached, "lost": lost, **requests}.items()}
    if len(set(lengths.values())) > 1:
        raise ChartError(f"lengths differ: {', '.join(f'{name} {n}' for name, n in lengths.items())}")
    if not cached:
        raise ChartError("there is no step to draw")
    bands = {**requests, "prefix cache": cached, "nobody": lost}
    totals = [sum(blocks) for blocks in zip(*bands.values(), strict=True)]
    if max(totals) > n_blocks:
        raise ChartError(f"{max(totals)} blocks are held, of a pool of {n_blocks}")
    every = math.ceil(len(cached) / MAX_MOMENTS)
    styles = {name: (PALETTE[i % 6], "/" * (i // 6 % 2)) for i, name in enumerate(requests)}
    styles |= {"prefix cache": (PALE, ""), "nobody": (TEXT, "x")}
    chart, below, labels = Chart(), [0] * len(cached), []
    for name, blocks in bands.items():
        if any(blocks):
            _add_band(chart, name, blocks[::every], every, *styles[name], legend=name not in requests)
        if name in requests:
            labels += _band_label(name, blocks, below, n_blocks)
        below = [low + high for low, high in zip(below, blocks, strict=True)]
    for x, y, name in labels:
        ink = ink_on(styles[name][0])
        chart.add_annotation(x=x, y=y, text=name, showarrow=False, font={"size": 11, "color": ink})
    used = [name for name in marks if marks[name]]
    for i, name in enumerate(used):
        times = Counter(step for step, _ in marks[name])
        _add_marks(chart, name, times, n_blocks * (1.06 + 0.08 * i), len(cached))
    chart.add_hline(y=n_blocks, line={"color": TEXT, "width": 1})
    ticks = sorted({0, n_blocks // 4, n_blocks // 2, n_blocks * 3 // 4, n_blocks})
    chart.update_yaxes(range=[0, n_blocks * (1.03 + 0.08 * len(used))], tickvals=ticks, title_text="blocks")
    chart.update_xaxes(range=[-0.5, len(cached) * 1.02 + 1], showgrid=False, title_text="step")
    chart.table = text_table(
        [f"pool of {n_blocks} blocks", "times", "first at step"],
        [(name, len(marks[name]), min(step for step, _ in marks[name])) for name in used]
        + [("most blocks held", max(totals), totals.index(max(totals)))],
    )
    return finish(chart, title, POOL_HEIGHT, legend=[one.name for one in chart.data if one.showlegend])


def _add_band(
    chart: Chart, name: str, blocks: Sequence[int], every: int, colour: str, hatch: str, legend: bool
) -> None:
    said = name if legend else f"request {name}"
    chart.add_scatter(
        x0=0,
        dx=every,
        y=list(blocks),
        name=said,
        showlegend=legend,
        mode="lines",
        stackgroup="pool",
        line={"width": 0, "shape": "hvh", "color": colour},
        fillcolor=colour,
        fillpattern=HATCHING | {"shape": hatch} if hatch else None,
        hovertemplate=f"{said}: %{{y}} blocks<extra>step %{{x}}</extra>",
    )


def _add_marks(chart: Chart, name: str, times: Counter[int], y: float, n_steps: int) -> None:
    """Draw a mark at each step, with a count where it happened several times and there is room."""
    gaps = [after - step for step, after in pairwise([*times, n_steps])]
    told = [
        str(n) if n > 1 and gap / n_steps * 640 > 20 else ""
        for n, gap in zip(times.values(), gaps, strict=True)
    ]
    chart.add_scatter(
        x=list(times),
        y=[y] * len(times),
        name=name,
        showlegend=True,
        mode="markers+text",
        marker={"symbol": MARKS[name], "size": 8, "color": TEXT},
        text=told,
        textposition="middle right",
        textfont={"size": 10, "color": TEXT},
        hovertemplate=f"{name}<extra>step %{{x}}</extra>",
    )


def _band_label(
    name: str, blocks: Sequence[int], below: Sequence[int], n_blocks: int
) -> list[tuple[float, float, str]]:
    """Return a request's label in the middle of its longest stay, or [] if it would be illegible."""
    stays, start = [(0, 0)], 0
    for end in range(len(blocks) + 1):
        if end == len(blocks) or not blocks[end]:
            stays.append((end - start, start))
            start = end + 1
    length, start = max(stays)
    middle = start + length // 2
    if length / len(blocks) * 600 < 8 * len(name) or blocks[middle] / n_blocks * POOL_HEIGHT < 13:
        return []
    return [(middle, below[middle] + blocks[middle] / 2, name)]


def ink_on(colour: str) -> str:
    return PAPER if luminance(colour) < 0.2 else INK


def luminance(colour: str) -> float:
    """Return the relative luminance of ``#rrggbb`` (WCAG 2)."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
