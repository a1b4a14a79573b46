"""The notebooks' charts: one palette that reads on light and dark pages, and one way to show a figure."""

from __future__ import annotations

import json
import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import plotly.graph_objects as go
from IPython.display import display

from rosellm.errors import RoseError
from rosellm.lab.records.records import number, percent_change
from rosellm.lab.records.trace import Event, Trace
from rosellm.roseinfer.steps.step import STEP_RANGE

PLOTLY = "application/vnd.plotly.v1+json"

# Apart under deuteranopia, protanopia and tritanopia; contrast of 2.2 or more with white and with #111111.
BLUE, ORANGE, GREEN = "#366fae", "#f35e01", "#1fa46f"
SKY, MAGENTA, VIOLET, PALE = "#1da7ff", "#ae2e69", "#8a42ff", "#9db2bc"
PALETTE = (BLUE, ORANGE, GREEN, SKY, MAGENTA, VIOLET, PALE)
TEXT, GRID, INK, PAPER = "#7a7f87", "rgba(127,127,127,0.25)", "#10151c", "#ffffff"
HATCHING = {"fillmode": "overlay", "fgcolor": INK, "fgopacity": 0.35, "size": 6, "solidity": 0.25}
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross")

# The parts of the decode step: colour and hatching, the same in every chart.
PARTS = {
    "reserve": (PALE, ""),
    "build_block_tables": (VIOLET, ""),
    "h2d_block_tables": (SKY, ""),
    "stage_tokens": (SKY, "/"),
    "build_mask": (MAGENTA, ""),
    "model": (BLUE, ""),
    "kv_append": (ORANGE, ""),
    "sample": (GREEN, ""),
    "commit": (PALE, "/"),
}
# The causes of a step's ledger, likewise.
CAUSES = {
    "inputs": (SKY, "/"),
    "mask": (ORANGE, "/"),
    "embedding": (MAGENTA, "/"),
    "norm": (VIOLET, ""),
    "layers": (BLUE, "x"),
    "GEMM": (BLUE, ""),
    "attention": (GREEN, ""),
    "append": (ORANGE, ""),
    "elementwise": (VIOLET, "/"),
    "views": (GREEN, "/"),
    "head": (BLUE, "/"),
    "sampling": (MAGENTA, ""),
    "copies": (SKY, ""),
    "other": (PALE, "x"),
    "between kernels": (PALE, ""),
    "launch latency": (PALE, "."),
    "synchronisation": (PALE, "|"),
    "host": (PALE, "/"),
}
STYLES = PARTS | CAUSES
# What a GPU kernel is for, by a piece of its name, the first that is found.
WORK = {
    "attention": ("attention", "flash", "fmha", "sdpa"),
    "KV append": ("kv_append", "index_put", "index_select", "gather", "scatter"),
    "matrix product": ("gemm", "gemv", "nvjet", "cublas", "cutlass", "addmm", "matmul", "splitk", "linear"),
    "other work": ("",),
}
WORK_COLOURS = dict(zip((*WORK, "copy"), (GREEN, ORANGE, BLUE, PALE, SKY), strict=True))

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
        "yaxis": AXIS,
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
    }
)


class ChartError(RoseError):
    """Figures that do not fit together, or that cannot be drawn."""


class Chart(go.Figure):
    """A plotly figure that also knows its numbers as a text table."""

    table = ""


def text_table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """An aligned table: text to the left, numbers to the right as ``records.number`` writes them."""
    rows = [list(row) for row in rows]
    for row in rows:
        if len(row) != len(headers):
            raise ChartError(f"a row of {len(row)} cells does not fit {len(headers)} headers: {row}")
    written = [list(map(str, headers)), *([_cell(value) for value in row] for row in rows)]
    columns = list(zip(*written, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [
        any(isinstance(row[i], (int, float)) and not isinstance(row[i], bool) for row in rows)
        for i in range(len(headers))
    ]
    written.insert(1, ["─" * width for width in widths])
    pads = [str.rjust if to_right else str.ljust for to_right in right]
    padded = ([pad(cell, w) for pad, cell, w in zip(pads, line, widths, strict=True)] for line in written)
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def show(figure: go.Figure, table: str | None = None) -> None:
    """Displays a figure as one bundle: plotly's JSON, and ``table`` (or else the chart's own) as plain text.

    ``make refresh`` adds the PNG for readers without JavaScript.
    """
    display(bundle(figure, table), raw=True)


def bundle(figure: go.Figure, table: str | None = None) -> dict[str, Any]:
    """What :func:`show` displays, by MIME type; floats have five significant digits."""
    drawn = _rounded(json.loads(figure.to_json()))
    drawn["config"] = {"displayModeBar": False}
    text = table if table is not None else getattr(figure, "table", "")
    return {PLOTLY: drawn, "text/plain": text or figure.layout.title.text or "a figure"}


def before_after(
    labels: Sequence[str],
    before: Sequence[float],
    after: Sequence[float],
    unit: str | Sequence[str],
    names: tuple[str, str] = ("before", "after"),
    *,
    title: str,
) -> Chart:
    """Two horizontal bars a label, the change written beside the second.

    With one ``unit`` all bars share an axis; with one unit a label, each pair is drawn to its own scale.
    """
    _same_length(labels=labels, before=before, after=after)
    shared = isinstance(unit, str)
    units = [unit] * len(labels) if shared else list(unit)
    _same_length(labels=labels, unit=units)
    scales = [1 if shared else max(pair) or 1 for pair in zip(before, after, strict=True)]
    texts = [
        [_with_unit(b, u) for b, u in zip(before, units, strict=True)],
        [f"{_with_unit(a, u)}  <b>{_change(b, a)}</b>" for b, a, u in zip(before, after, units, strict=True)],
    ]
    chart = Chart()
    for name, values, text, colour in zip(names, (before, after), texts, (PALE, BLUE), strict=True):
        scaled = [value / scale for value, scale in zip(values, scales, strict=True)]
        chart.add_bar(
            x=scaled, y=_wrapped(labels, 24), orientation="h", name=name, text=text, marker_color=colour
        )
    chart.update_traces(textposition="outside", cliponaxis=False, hoverinfo="name+text+y")
    longest = max((*before, *after)) if shared else 1
    chart.update_xaxes(range=[0, (longest or 1) * 1.32], title_text=unit if shared else None, visible=shared)
    chart.update_yaxes(autorange="reversed", showgrid=False, ticks="")
    chart.table = text_table(
        ["", *names, "unit", "change"],
        [[*row, _change(row[1], row[2])] for row in zip(labels, before, after, units, strict=True)],
    )
    return finish(chart, title, 54 * len(labels), legend=names, has_axis=shared)


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
    """A line with markers a series, named at its end; ``floors`` (a value, or one for each x) are dashed."""
    floors = {
        name: [f] * len(x) if isinstance(f, (int, float)) else list(f) for name, f in (floors or {}).items()
    }
    _same_length(x=x, **series, **floors)
    chart, styles = Chart(), {}
    for i, (name, values) in enumerate(series.items()):
        styles[name] = (PALETTE[i % len(PALETTE)], "●")
        marker = {"symbol": SYMBOLS[i % len(SYMBOLS)], "size": 8, "color": styles[name][0]}
        chart.add_scatter(x=list(x), y=list(values), name=name, mode="lines+markers", marker=marker)
    for name, values in floors.items():
        styles[name] = (TEXT, "┄")
        chart.add_scatter(
            x=list(x), y=values, name=name, mode="lines", line={"color": TEXT, "dash": "dash", "width": 1.5}
        )
    lines = {**series, **floors}
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


def stacked_time(
    rows: Mapping[str, Mapping[str, float]], *, title: str, unit: str = "ms", with_values: bool = False
) -> Chart:
    """Where a step's time goes: one horizontal bar a row, one segment a part of it, the total at its end.

    The engine's parts and a ledger's causes come in their order and always have the same colour; other names
    follow. with_values writes a segment's figure beside its name.
    """
    if not rows:
        raise ChartError("there is no row to draw")
    used = {part for parts in rows.values() for part in parts}
    parts = [p for p in STYLES if p in used] + sorted(used - STYLES.keys())
    totals = [sum(row.values()) for row in rows.values()]
    chart, labels = Chart(), _wrapped(rows, 24)
    for part, (colour, hatch) in zip(parts, map(_part_style, parts, range(len(parts))), strict=True):
        values = [row.get(part) for row in rows.values()]
        names = [f"{part} {number(v)}" if with_values else part for v in values]
        fits = [bool(v) and v / max(totals) * 520 > 7.5 * len(n) for v, n in zip(values, names, strict=True)]
        chart.add_bar(
            x=values,
            y=labels,
            orientation="h",
            name=part,
            text=[name if fit else "" for name, fit in zip(names, fits, strict=True)],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            insidetextfont_color=_ink_on(colour),
            marker=fill(colour, hatch),
            hovertemplate=f"{part}: %{{x:.4g}} {unit}<extra>%{{y}}</extra>",
        )
    for label, total in zip(labels, totals, strict=True):
        text = f"<b>{number(total)} {unit}</b>"
        chart.add_annotation(x=total, y=label, text=text, showarrow=False, xanchor="left", xshift=4)
    chart.update_layout(barmode="stack")
    chart.update_xaxes(range=[0, max(totals) * 1.15], title_text=unit)
    chart.update_yaxes(autorange="reversed", showgrid=False, ticks="")
    cells = ([part, *(row.get(part) for row in rows.values())] for part in parts)
    chart.table = text_table([f"part, {unit}", *rows], [*cells, ["total", *totals]])
    return finish(chart, title, 46 * len(rows), legend=parts)


def waterfall(
    before: tuple[str, float],
    changes: Mapping[str, float],
    after: tuple[str, float],
    unit: str,
    *,
    title: str,
    smallest: float = 0.005,
) -> Chart:
    """From one total to another: a bar for each, named, and between them a bar for every change.

    Changes come from the largest saving to the largest cost; those below ``smallest`` of the larger total are
    one bar, "the rest". Raises ``ChartError`` where the changes do not lead from one total to the other.
    """
    (first, start), (last, end) = before, after
    if not math.isclose(start + sum(changes.values()), end, rel_tol=1e-6, abs_tol=1e-9):
        raise ChartError(
            f"the changes add up to {number(sum(changes.values()))} {unit}, and {first} and {last} are "
            f"{number(end - start)} {unit} apart"
        )
    limit = smallest * max(start, end)
    steps = sorted(((c, v) for c, v in changes.items() if abs(v) >= limit), key=lambda step: step[1])
    small = [value for value in changes.values() if 0 < abs(value) < limit]
    steps += [("the rest", sum(small))] if small else []
    reached = list(accumulate((value for _, value in steps), initial=start))
    labels = [f"<b>{first}</b>", *(cause for cause, _ in steps), f"<b>{last}</b>"]
    lengths = [start, *(value for _, value in steps), end]
    texts = [f"{'+' if 0 < i <= len(steps) and v > 0 else ''}{number(v)}" for i, v in enumerate(lengths)]
    chart = Chart()
    chart.add_bar(
        x=lengths,
        y=list(range(len(labels))),
        base=[0, *reached[:-1], 0],
        orientation="h",
        marker_color=[BLUE, *(GREEN if value < 0 else ORANGE for _, value in steps), BLUE],
        hovertext=[f"{label}: {text} {unit}" for label, text in zip(labels, texts, strict=True)],
        hoverinfo="text",
    )
    rights = [start, *(max(pair) for pair in pairwise(reached)), end]
    for y, (right, text) in enumerate(zip(rights, texts, strict=True)):
        chart.add_annotation(x=right, y=y, text=text, showarrow=False, xanchor="left", xshift=4)
    chart.update_xaxes(range=[0, max(start, end, *reached) * 1.15], title_text=unit)
    chart.update_yaxes(
        autorange="reversed", showgrid=False, ticks="", tickvals=list(range(len(labels))), ticktext=labels
    )
    chart.table = text_table(["", f"change, {unit}"], [(first, start), *steps, (last, end)])
    return finish(chart, title, 30 * len(labels))


MAX_MOMENTS, POOL_HEIGHT = 200, 270
MARKS = {
    "preempted": (MAGENTA, "x"),
    "evicted": (ORANGE, "diamond"),
    "cancelled": (VIOLET, "square"),
    "failed": (TEXT, "cross"),
    "finished": (GREEN, "circle"),
}


def pool_over_time(
    requests: Mapping[str, Sequence[int]],
    n_blocks: int,
    marks: Mapping[str, Sequence[tuple[int, str]]],
    *,
    cached: Sequence[int],
    lost: Sequence[int],
    title: str,
) -> Chart:
    """Who holds the blocks of a pool after each step: requests from the bottom up, the prefix cache on top.

    Requests are told apart by colour and by their names, written where there is room; cached and lost blocks
    are those that no request holds, the white rest is free. marks: ``MARKS`` → (step, who) of each; they
    stand above the pool. Of a long run every k-th step is drawn, and every mark.
    """
    _same_length(cached=cached, lost=lost, **requests)
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
        ink = _ink_on(styles[name][0])
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
    """A mark at each step, with a number where it happened more than once and there is room for one."""
    colour, symbol = MARKS[name]
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
        marker={"symbol": symbol, "size": 8, "color": colour},
        text=told,
        textposition="middle right",
        textfont={"size": 10, "color": colour},
        hovertemplate=f"{name}<extra>step %{{x}}</extra>",
    )


def _band_label(
    name: str, blocks: Sequence[int], below: Sequence[int], n_blocks: int
) -> list[tuple[float, float, str]]:
    """Where a request's name goes: the middle of its longest stay, if it can be read there."""
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


MAX_TIMELINE_BYTES = 55_000


def timeline(trace: Trace, title: str) -> Chart:
    """One traced step over time, µs: the host's ranges above what ran; what is too close to see is merged.

    On a GPU what ran are kernels and copies; on a CPU, operators. A merged bar is drawn as what it mostly is.
    """
    lanes = _lanes(trace)
    if not lanes:
        raise ChartError("the trace holds neither a range nor anything that ran")
    start = min(e.start for events in lanes.values() for e in events)
    span = max(e.start + e.duration for events in lanes.values() for e in events) - start
    sight = span / 1500
    chart = _draw_lanes(lanes, start, span, sight)
    while len(json.dumps(bundle(chart)[PLOTLY])) > MAX_TIMELINE_BYTES:
        sight *= 2
        chart = _draw_lanes(lanes, start, span, sight)
    chart.update_layout(barmode="overlay", bargap=0.25)
    chart.update_xaxes(range=[-span * 0.005, span * 1.005], title_text="µs")
    chart.update_yaxes(autorange="reversed", showgrid=False, ticks="")
    busy = {lane: sum(e.duration for e in events) for lane, events in lanes.items()}
    chart.table = text_table(
        ["lane", "events", "busy µs", "busy %"],
        [(lane, len(events), busy[lane], busy[lane] / span * 100) for lane, events in lanes.items()],
    )
    return finish(chart, title, 46 * len(lanes), legend=[bar.name for bar in chart.data if bar.showlegend])


def _lanes(trace: Trace) -> dict[str, list[Event]]:
    lanes = {
        "host ranges": [e for e in trace.ranges() if e.name != STEP_RANGE],
        "operators": [] if trace.on_gpu else trace.of("op"),
        "GPU kernels": trace.of("kernel"),
        "copies": trace.of("copy") + trace.of("memset"),
    }
    return {lane: sorted(events, key=lambda e: e.start) for lane, events in lanes.items() if events}


class _Run(NamedTuple):
    """Events drawn as one bar."""

    events: list[Event]
    kinds: Counter[str]
    start: float
    end: float

    @property
    def kind(self) -> str:
        """What most of its time is."""
        return self.kinds.most_common(1)[0][0]

    @property
    def said(self) -> str:
        first = self.events[0].name.removeprefix(f"{STEP_RANGE}.")[:40]
        return first if len(self.events) == 1 else f"{len(self.events)} × {first} …"


def _draw_lanes(lanes: dict[str, list[Event]], start: float, span: float, sight: float) -> Chart:
    chart = Chart()
    for lane, events in lanes.items():
        by_kind: dict[str, list[_Run]] = {}
        for run in _merge(events, sight):
            by_kind.setdefault(run.kind, []).append(run)
        for i, (kind, runs) in enumerate(by_kind.items()):
            colour, hatch = (WORK_COLOURS[kind], "") if kind in WORK_COLOURS else _part_style(kind, i)
            lengths = [run.end - run.start for run in runs]
            names = [kind if length / span * 580 > 7.5 * len(kind) else "" for length in lengths]
            chart.add_bar(
                x=lengths,
                y=[lane] * len(runs),
                base=[run.start - start for run in runs],
                orientation="h",
                name=kind,
                showlegend=all(bar.name != kind for bar in chart.data),
                marker=fill(colour, hatch),
                text=names if any(names) else None,
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                insidetextfont_color=_ink_on(colour),
                hovertext=[run.said for run in runs],
                hovertemplate="%{hovertext}<br>from %{base:.4g}, %{x:.4g} µs<extra></extra>",
            )
    return chart


def _merge(events: list[Event], sight: float) -> list[_Run]:
    """Events, in order of start, joined if at most ``sight`` apart and of one kind, or no longer together."""
    runs: list[_Run] = []
    kind_of = cache(_kind)
    for event in events:
        kind, end = kind_of(event.kind, event.name), event.start + event.duration
        last = runs[-1] if runs else None
        joins = last is not None and event.start - last.end <= sight
        if last and joins and (set(last.kinds) == {kind} or end - last.start <= sight):
            last.events.append(event)
            last.kinds[kind] += event.duration
            runs[-1] = last._replace(end=max(last.end, end))
        else:
            runs.append(_Run([event], Counter({kind: event.duration}), event.start, end))
    return runs


def _kind(event_kind: str, name: str) -> str:
    """What an event is drawn as: its part of the step, "copy", or the work that its name tells of."""
    if event_kind == "range":
        return name.removeprefix(f"{STEP_RANGE}.")
    if event_kind in ("copy", "memset"):
        return "copy"
    return next(kind for kind, pieces in WORK.items() if any(piece in name.lower() for piece in pieces))


def _part_style(part: str, i: int) -> tuple[str, str]:
    return STYLES.get(part, (PALETTE[i % len(PALETTE)], ""))


def finish(chart: Chart, title: str, body: int, legend: Sequence[str] = (), has_axis: bool = True) -> Chart:
    """Title, size and margins; ``body`` is the height of the plot in pixels, without the axis below it."""
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


def _name_at_right(chart: Chart, named: dict, low: float, high: float, height: int, log: bool) -> None:
    """Writes each line's name and value right of the plot, moved apart where they would overlap."""
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
    """``wanted`` positions (ascending) moved apart to ``gap`` where closer, below ``top`` if they fit."""
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
        return min(0.0, *values), max(*values, 0.0) * 1.08 or 1.0
    if min(values) <= 0:
        raise ChartError("a log axis needs values above 0")
    return math.log10(min(values) / 1.25), math.log10(max(values) * 1.25)


def log_ticks(low: float, high: float) -> dict[str, Any]:
    """Ticks of a log axis from ``10**low`` to ``10**high``, the fewer a decade the more decades there are."""
    steps = (1, 2, 5) if high - low < 1.8 else (1, 3) if high - low < 3.2 else (1,)
    ticks = [s * 10.0**k for k in range(math.floor(low), math.ceil(high)) for s in steps]
    return {"tickvals": ticks, "ticktext": [_tick(tick) for tick in ticks]}


def _tick(value: float) -> str:
    size, suffix = next(((s, x) for s, x in ((1e6, "M"), (1e3, "k")) if value >= s), (1, ""))
    return f"{value / size:.9g}{suffix}"


def _change(before: float, after: float) -> str:
    if before == after:
        return "same"
    if not before or not after:
        return "none" if not after else "new"
    if after >= 2 * before or before >= 2 * after:
        times = max(after / before, before / after)
        told = number(times) if times >= 100 else f"{times:.3g}"
        return f"× {told}" if after > before else f"÷ {told}"
    return percent_change(before, after)


def _with_unit(value: float, unit: str) -> str:
    return f"{number(value)} {unit}".rstrip()


def short(value: float | None) -> str:
    """Three significant digits with a k or M: ``114k``, ``1.91k``."""
    for size, suffix in ((1e6, "M"), (1e3, "k")):
        if value is not None and abs(value) >= size * 0.9995:
            return number(float(value / size)) + suffix
    return number(value)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value) if value is None or isinstance(value, (int, float)) else str(value)


def _wrapped(labels: Iterable[str], characters: int) -> list[str]:
    return ["<br>".join(textwrap.wrap(label, characters)) for label in labels]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def fill(colour: str, hatch: str) -> dict[str, Any]:
    return {"color": colour, "pattern": HATCHING | {"shape": hatch}} if hatch else {"color": colour}


def _ink_on(colour: str) -> str:
    return PAPER if _luminance(colour) < 0.2 else INK


def _luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb`` (WCAG 2)."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _same_length(**columns: Sequence[Any]) -> None:
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ChartError(f"lengths differ: {', '.join(f'{name} {n}' for name, n in lengths.items())}")
