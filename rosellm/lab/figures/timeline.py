"""Draw timelines of decode steps, such as before and after a change: what the host did, and what ran."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rosellm.lab.figures.charts import Chart, ChartError, finish, text_table
from rosellm.lab.figures.palette import PALE, STYLES, TEXT, fill
from rosellm.lab.records.records import number
from rosellm.lab.records.roles import Marked, roles_of
from rosellm.lab.records.trace import PROFILED_STEP, SYNC, Event, Trace
from rosellm.roseinfer.steps.step import STEP_RANGE

MAX_RECTANGLES = 1_000
PIXELS, ZOOM, LANE_PIXELS = 560, 16, 30
WORK = ("operators", "GPU kernels")


class _Lane(NamedTuple):
    """A named sequence of events, in order of start.

    labels: for each event, the label that selects its style.
    """

    name: str
    events: list[Event]
    labels: list[str]


class _Rectangle(NamedTuple):
    """One or more neighbouring events that are drawn as one rectangle.

    start, end: of all events, in µs.
    busy: the µs during which at least one event runs; the drawn width.
    us: the µs of the events, by label.
    first: the earliest event.
    events: number of events.
    """

    start: float
    end: float
    busy: float
    us: Counter[str]
    first: Event
    events: int

    @property
    def label(self) -> str:
        """The label whose events take the most time."""
        return self.us.most_common(1)[0][0]

    @property
    def said(self) -> str:
        name = _short_name(self.first.name)
        return name if self.events == 1 else f"{self.events} × {name} …"


class _Row(NamedTuple):
    """A lane as it is drawn.

    panel: name of the trace.
    y: vertical position, in lanes from the top.
    start, span: where the axis starts on the trace's clock, and how long the trace lasts, in µs.
    """

    panel: str
    y: int
    start: float
    span: float
    lane: _Lane
    rectangles: list[_Rectangle]

    @property
    def busy(self) -> float:
        """The µs during which at least one event runs."""
        return sum(one.busy for one in self.rectangles)

    @property
    def share(self) -> float:
        """The share of the trace during which at least one event runs, from 0 to 1."""
        return self.busy / self.span


def timeline(
    traces: Mapping[str, Trace], title: str, marked: Sequence[Marked] = (), first: float | None = None
) -> Chart:
    """Draw traces of decode steps one above the other, on a common axis in µs; drag to zoom.

    traces: the trace of each panel, by the panel's name.
    marked: work with roles of its own.
    first: the time of the traces at which the axis starts; None starts each trace at its own first event.

    The lanes of a trace are the engine's ranges by depth, operators called from Python, host waits, GPU
    kernels and GPU copies. Operators and kernels are coloured by role. Neighbouring events that a
    ``ZOOM``-fold enlargement could not separate share a rectangle: it is as wide as the events are busy, and
    has the style of the label with the most time. The resolution, stated on the axis in µs, is coarsened
    until there are at most ``MAX_RECTANGLES``. Raises ``ChartError`` for a trace without events.
    """
    panels = {name: _lanes(trace, marked) for name, trace in traces.items()}
    for name, lanes in panels.items():
        if not lanes:
            raise ChartError(f"the trace of {name} holds neither a range nor anything that ran")
    span = max(end - (start if first is None else first) for start, end in map(_extent, panels.values()))
    sight = span / PIXELS / ZOOM
    rows = _rows(panels, sight, first)
    while (drawn := sum(len(row.rectangles) for row in rows)) > MAX_RECTANGLES:
        sight *= 2
        rows = _rows(panels, sight, first)
    chart = _drawn(rows)
    events = sum(len(row.lane.events) for row in rows)
    said = f"{events:,} events in {drawn:,} rectangles: within {number(sight)} µs they may share one"
    headers = ["", "lane", "events", "rectangles", "busy µs", "busy %"]
    counted = ((row, len(row.lane.events), len(row.rectangles)) for row in rows)
    told = [(row.panel, row.lane.name, *numbers, row.busy, row.share * 100) for row, *numbers in counted]
    chart.table = f"{text_table(headers, told)}\n{said}"
    chart.update_xaxes(range=[-span * 0.005, span * 1.005], tickformat=",.6~g")
    chart.update_xaxes(title={"text": f"µs ({said})", "font_size": 11})
    body = LANE_PIXELS * (rows[-1].y + 1)
    finish(chart, title, body, legend=list(dict.fromkeys(bar.name for bar in chart.data)))
    return chart.update_layout(
        barmode="overlay",
        dragmode="zoom",
        uniformtext={"mode": "hide", "minsize": 9},
        legend={"itemclick": False},
    )


def _lanes(trace: Trace, marked: Sequence[Marked]) -> list[_Lane]:
    """Return the lanes of a trace that have events."""
    operators, steps = trace.of("op"), trace.ranges(STEP_RANGE)
    on_gpu = [event for event in trace.events if event.on_gpu]
    roles = list(zip(on_gpu, roles_of(trace, on_gpu, steps, marked), strict=True))
    kernels = [(event, role) for event, role in roles if event.kind == "kernel"]
    waits, copies = trace.of("sync"), [event for event in on_gpu if event.kind != "kernel"]
    lanes = [
        *_nested([one for one in trace.ranges() if one.name != PROFILED_STEP]),
        _Lane("operators", operators, roles_of(trace, operators, steps, marked)),
        _Lane("waits", waits, [SYNC] * len(waits)),
        _Lane("GPU kernels", [event for event, _ in kernels], [role for _, role in kernels]),
        _Lane("GPU copies", copies, ["copies"] * len(copies)),
    ]
    return [lane for lane in lanes if lane.events]


def _nested(ranges: list[Event]) -> list[_Lane]:
    by_depth: dict[int, list[Event]] = defaultdict(list)
    opened: list[float] = []
    for one in sorted(ranges, key=lambda e: (e.start, -e.duration)):
        while opened and opened[-1] <= one.start:
            opened.pop()
        by_depth[len(opened)].append(one)
        opened.append(one.end)
    names = {depth: f"ranges, depth {depth + 1}" if depth else "ranges" for depth in sorted(by_depth)}
    return [_Lane(name, by_depth[i], [_part(e.name) for e in by_depth[i]]) for i, name in names.items()]


def _part(range_name: str) -> str:
    return "the step" if range_name == STEP_RANGE else range_name.rpartition(".")[2]


def _extent(lanes: list[_Lane]) -> tuple[float, float]:
    events = [event for lane in lanes for event in lane.events]
    return min(event.start for event in events), max(event.end for event in events)


def _rows(panels: Mapping[str, list[_Lane]], sight: float, first: float | None) -> list[_Row]:
    """Return the lanes of all panels from top to bottom, with a free line for the name of each panel.

    sight: as in :func:`_merge`.
    first: as in :func:`timeline`.
    """
    rows, y = [], 0
    for name, lanes in panels.items():
        start, end = _extent(lanes)
        axis = start if first is None else first
        for lane in lanes:
            y += 1
            rows.append(_Row(name, y, axis, end - start, lane, _merge(lane, sight)))
        y += 1
    return rows


def _merge(lane: _Lane, sight: float) -> list[_Rectangle]:
    """Return a lane's events as rectangles; one covers all events that end within ``sight`` µs of its start.

    A longer event has a rectangle of its own, from where the events before it end. A merged rectangle's
    width is the time in which its events run, without the gaps between them, so it ends at most ``sight`` µs
    too early.
    """
    merged: list[_Rectangle] = []
    done = float("-inf")
    for event, label in zip(lane.events, lane.labels, strict=True):
        start = min(max(event.start, done), event.end)
        us, busy = Counter({label: event.duration}), event.end - start
        done = max(done, event.end)
        if merged and done - merged[-1].start <= sight:
            last = merged[-1]
            time = last.busy + busy, last.us + us
            merged[-1] = _Rectangle(last.start, done, *time, last.first, last.events + 1)
        else:
            merged.append(_Rectangle(start, event.end, busy, us, event, 1))
    return merged


def _drawn(rows: list[_Row]) -> Chart:
    """Draw the rectangles as bars, label by label in the palette's order, and name the panels and lanes."""
    by_label: dict[str, list[tuple[_Row, _Rectangle]]] = defaultdict(list)
    for row in rows:
        for one in row.rectangles:
            by_label[one.label].append((row, one))
    chart = Chart()
    for label in dict.fromkeys([*STYLES, *by_label]):
        if label in by_label:
            _add_bars(chart, label, by_label[label])
    for row in {row.panel: row for row in reversed(rows)}.values():  # the first row of each panel
        text = f"<b>{row.panel}</b>, {number(row.span)} µs"
        style = {"font": {"size": 12, "color": TEXT}, "showarrow": False}
        chart.add_annotation(x=0, xref="paper", xanchor="left", y=row.y - 1, text=text, **style)
    names = [row.lane.name + f", {row.share:.0%} busy" * (row.lane.name in WORK) for row in rows]
    chart.update_yaxes(range=[rows[-1].y + 0.6, -0.6], tickvals=[row.y for row in rows], ticktext=names)
    return chart.update_yaxes(fixedrange=True, showgrid=False, ticks="", zeroline=False)


def _add_bars(chart: Chart, label: str, bars: list[tuple[_Row, _Rectangle]]) -> None:
    chart.add_bar(
        x=np.array([one.busy for _, one in bars], np.float32),  # plotly stores typed arrays compactly
        y=np.array([row.y for row, _ in bars], np.int8),
        base=np.array([one.start - row.start for row, one in bars], np.float32),
        width=0.8,
        orientation="h",
        name=label,
        marker=fill(*STYLES.get(label, (PALE, ""))),
        texttemplate=label,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        hovertext=[one.said for _, one in bars],
        hovertemplate=f"<b>{label}</b>: %{{hovertext}}<br>from %{{base:.5g}}, %{{x:.4g}} µs<extra></extra>",
    )


def _short_name(name: str) -> str:
    """Shorten ``void at::native::reduce_kernel<512, …>(…)`` to ``reduce_kernel``, or a range to its end."""
    plain = name.replace("(anonymous namespace)::", "").split("<")[0].split("(")[0].strip()
    return (_part(plain) if "::" not in plain else plain.rpartition("::")[2])[:32]
