"""Draw a decode step before and after a change, over time: what the host was doing, and what ran."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rosellm.lab.figures.charts import LINE, PLOTLY, TEMPLATE, WIDTH, Chart, ChartError, bundle, text_table
from rosellm.lab.figures.palette import HATCHING, PALE, STYLES, TEXT
from rosellm.lab.records.records import number
from rosellm.lab.records.roles import roles_of
from rosellm.lab.records.trace import PROFILED_STEP, SYNC, Event, Trace
from rosellm.roseinfer.steps.step import STEP_RANGE

MAX_RECTANGLES, MAX_BYTES = 1_500, 56_000
PIXELS, ZOOM, LANE_PIXELS = 560, 16, 30
SOLID = 0.99  # busy share from which neighbours with one label are merged
GAPS_TOLD = ("operators", "GPU kernels")


class _Lane(NamedTuple):
    """Events in order of start, each with the label that selects its style."""

    name: str
    events: list[Event]
    labels: list[str]

    def busy(self) -> float:
        """Return the µs during which at least one event runs."""
        total, done = 0.0, float("-inf")
        for event in self.events:
            end = event.start + event.duration
            total += max(0.0, end - max(event.start, done))
            done = max(done, end)
        return total


class _Panel(NamedTuple):
    """One trace's lanes; ``span`` µs from ``start``."""

    name: str
    lanes: list[_Lane]
    start: float
    span: float


class _Rectangle(NamedTuple):
    """Events drawn as one rectangle, ``busy`` µs wide; ``us`` is the time by label."""

    start: float
    end: float
    busy: float
    us: Counter[str]
    first: Event
    events: int

    @property
    def label(self) -> str:
        """The label with the most time."""
        return self.us.most_common(1)[0][0]

    @property
    def said(self) -> str:
        name = _short_name(self.first.name)
        return name if self.events == 1 else f"{self.events} × {name} …"


def timeline(before_trace: Trace, after_trace: Trace, names: tuple[str, str], title: str) -> Chart:
    """Draw two traces of decode steps, one above the other on a common axis in µs; drag to zoom.

    Lanes: the engine's ranges by depth, operators called from Python, host waits, GPU kernels and GPU copies.
    Operators and kernels are coloured by role; empty space is a gap. Neighbours that a ``ZOOM``-fold
    enlargement could not separate share a rectangle, as wide as their busy time and drawn as the label with
    most time. The resolution, stated on the axis in µs, is coarsened until there are at most
    ``MAX_RECTANGLES`` and ``MAX_BYTES`` of JSON. Raises ``ChartError``.
    """
    if len(names) != 2:
        raise ChartError(f"a timeline has two names, one per trace, not {len(names)}: {', '.join(names)}")
    panels = [_panel(name, trace) for name, trace in zip(names, (before_trace, after_trace), strict=True)]
    span = max(panel.span for panel in panels)
    chart, drawn, sight = _fitting(panels, span / PIXELS / ZOOM)
    lanes = [(panel, lane) for panel in panels for lane in panel.lanes]
    n_events = sum(len(lane.events) for _, lane in lanes)
    said = f"{n_events:,} events in {sum(drawn):,} rectangles: within {number(sight)} µs they may share one"
    rows = [
        (panel.name, lane.name, len(lane.events), n, lane.busy(), lane.busy() / panel.span * 100)
        for (panel, lane), n in zip(lanes, drawn, strict=True)
    ]
    headers = ["", "lane", "events", "rectangles", "busy µs", "busy %"]
    chart.table = f"{text_table(headers, rows)}\n{said}"
    chart.update_xaxes(range=[-span * 0.005, span * 1.005], tickformat=",.6~g")
    chart.update_xaxes(title={"text": f"µs ({said})", "font_size": 11})
    return _laid_out(chart, title, panels)


def _panel(name: str, trace: Trace) -> _Panel:
    lanes = [lane for lane in _lanes(trace) if lane.events]
    if not lanes:
        raise ChartError(f"the trace of {name} holds neither a range nor anything that ran")
    start = min(event.start for lane in lanes for event in lane.events)
    end = max(event.start + event.duration for lane in lanes for event in lane.events)
    return _Panel(name, lanes, start, end - start)


def _lanes(trace: Trace) -> list[_Lane]:
    operators, steps = trace.of("op"), trace.ranges(STEP_RANGE)
    on_gpu = [event for event in trace.events if event.on_gpu]
    work = list(zip(on_gpu, roles_of(trace, on_gpu, steps), strict=True))
    kernels = [(event, role) for event, role in work if event.kind == "kernel"]
    waits = trace.of("sync")
    return [
        *_nested([one for one in trace.ranges() if one.name != PROFILED_STEP]),
        _Lane("operators", operators, roles_of(trace, operators, steps)),
        _Lane("waits", waits, [SYNC] * len(waits)),
        _Lane("GPU kernels", [event for event, _ in kernels], [role for _, role in kernels]),
        _Lane("GPU copies", copies := [e for e in on_gpu if e.kind != "kernel"], ["copies"] * len(copies)),
    ]


def _nested(ranges: list[Event]) -> list[_Lane]:
    by_depth: dict[int, list[Event]] = defaultdict(list)
    opened: list[float] = []
    for one in sorted(ranges, key=lambda e: (e.start, -e.duration)):
        while opened and opened[-1] <= one.start:
            opened.pop()
        by_depth[len(opened)].append(one)
        opened.append(one.start + one.duration)
    return [
        _Lane(
            "ranges" if depth == 0 else f"ranges, depth {depth + 1}", events, [_part(e.name) for e in events]
        )
        for depth, events in sorted(by_depth.items())
    ]


def _part(range_name: str) -> str:
    return "the step" if range_name == STEP_RANGE else range_name.rpartition(".")[2]


def _merge(lane: _Lane, sight: float) -> list[_Rectangle]:
    """Merge events within ``sight`` of each other, or adjacent ones of one label with almost no gap.

    A rectangle is as wide as its events are busy, so it ends at most ``sight`` too early.
    """
    merged: list[_Rectangle] = []
    for event, label in zip(lane.events, lane.labels, strict=True):
        end = event.start + event.duration
        us = Counter({label: event.duration})
        if merged:
            last = merged[-1]
            longer = max(last.end, end)
            busy = last.busy + max(0.0, end - max(event.start, last.end))
            span = longer - last.start
            if span <= sight or (set(last.us) == {label} and busy >= SOLID * span):
                merged[-1] = _Rectangle(last.start, longer, busy, last.us + us, last.first, last.events + 1)
                continue
        before = merged[-1].end if merged else event.start
        merged.append(_Rectangle(event.start, end, end - max(event.start, min(before, end)), us, event, 1))
    return merged


def _fitting(panels: Sequence[_Panel], sight: float) -> tuple[Chart, list[int], float]:
    """Return the bars, their number per lane, and the resolution in µs at which they were merged.

    The resolution is ``sight`` or coarser.
    """
    while True:
        merged = [[_merge(lane, sight) for lane in panel.lanes] for panel in panels]
        drawn = [len(rectangles) for lanes in merged for rectangles in lanes]
        if sum(drawn) <= MAX_RECTANGLES:
            chart = _draw(panels, merged)
            if len(json.dumps(bundle(chart)[PLOTLY])) <= MAX_BYTES:
                return chart, drawn, sight
        sight *= 2


def _draw(panels: Sequence[_Panel], merged: list[list[list[_Rectangle]]]) -> Chart:
    """Draw the bars, with one legend for the ranges and one for the work."""
    by_label: dict[tuple[str, str], list[tuple[int, float, _Rectangle]]] = defaultdict(list)
    y = 0
    for panel, rectangles_of in zip(panels, merged, strict=True):
        for lane, rectangles in zip(panel.lanes, rectangles_of, strict=True):
            y += 1
            legend = "legend2" if lane.name.startswith("ranges") else "legend"
            for one in rectangles:
                by_label[legend, one.label].append((y, one.start - panel.start, one))
        y += 1
    order = {label: i for i, label in enumerate(STYLES)}
    chart = Chart()
    for legend, label in sorted(by_label, key=lambda key: (key[0], order.get(key[1], -1))):
        _add_bars(chart, legend, label, by_label[legend, label])
    return chart


def _add_bars(chart: Chart, legend: str, label: str, bars: list[tuple[int, float, _Rectangle]]) -> None:
    colour, hatch = STYLES.get(label, (PALE, ""))
    chart.add_bar(
        x=np.array([one.busy for _, _, one in bars], np.float32),  # typed arrays are stored packed
        y=np.array([y for y, _, _ in bars], np.int8),
        base=np.array([start for _, start, _ in bars], np.float32),
        width=0.8,
        orientation="h",
        name=label,
        legend=legend,
        marker={"color": colour, "pattern": HATCHING | {"shape": hatch}} if hatch else {"color": colour},
        texttemplate=label,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        hovertext=[one.said for _, _, one in bars],
        hovertemplate=f"<b>{label}</b>: %{{hovertext}}<br>from %{{base:.5g}}, %{{x:.4g}} µs<extra></extra>",
    )


def _short_name(name: str) -> str:
    """``void at::native::reduce_kernel<512, …>(…)`` → ``reduce_kernel``; a range's last part."""
    plain = name.replace("(anonymous namespace)::", "").split("<")[0].split("(")[0].strip()
    return (_part(plain) if "::" not in plain else plain.rpartition("::")[2])[:32]


def _laid_out(chart: Chart, title: str, panels: Sequence[_Panel]) -> Chart:
    ticks, y = {}, 0
    for panel in panels:
        chart.add_annotation(
            x=0,
            xref="paper",
            xanchor="left",
            y=y,
            text=f"<b>{panel.name}</b>, {number(panel.span)} µs",
            font={"size": 12, "color": TEXT},
            showarrow=False,
        )
        for lane in panel.lanes:
            y += 1
            busy = f", {lane.busy() / panel.span:.0%} busy" if lane.name in GAPS_TOLD else ""
            ticks[y] = f"{lane.name}{busy}"
        y += 1
    rows = {legend: _legend_rows(chart, legend) for legend in ("legend", "legend2")}
    foot = (LINE + 4) * (sum(rows.values()) + 1)
    height = 40 + LANE_PIXELS * y + 50 + foot
    chart.update_yaxes(
        range=[y - 0.4, -0.6], fixedrange=True, showgrid=False, ticks="", tickvals=list(ticks), zeroline=False
    )
    chart.update_yaxes(ticktext=list(ticks.values()))
    higher = (LINE + 4) * (rows["legend"] + 0.4) / height
    return chart.update_layout(
        template=TEMPLATE,
        title={"text": title, "font_size": 15, "y": 1 - 8 / height},
        width=WIDTH,
        height=height,
        margin={"l": 20, "r": 20, "t": 40, "b": 50 + foot},
        barmode="overlay",
        dragmode="zoom",
        uniformtext={"mode": "hide", "minsize": 9},
        legend={"itemclick": False},
        legend2=TEMPLATE.layout.legend.to_plotly_json() | {"y": higher, "itemclick": False},
    )


def _legend_rows(chart: Chart, legend: str) -> int:
    """Count the legend's rows; its columns are as wide as the longest entry."""
    names = [bar.name for bar in chart.data if bar.legend == legend]
    columns = PIXELS // (6.2 * max(map(len, names), default=0) + 52)
    return math.ceil(len(names) / max(1, columns))
