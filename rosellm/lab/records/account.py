"""Attribute every microsecond of profiled decode steps to a cause, and to what the host was doing.

A step lasts from its first kernel to the first kernel of the next; on a CPU, from call to call.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from rosellm.errors import RoseError
from rosellm.lab.records.roles import Marked, roles_of
from rosellm.lab.records.trace import Event, Trace
from rosellm.roseinfer.steps.step import STEP_RANGE

PROFILED_STEP = "rosellm.lab.ledger.step"
KINDS = ("work", "copies", "gaps", "host")
WORKING = ("work", "copies")  # in the other kinds nothing runs
BETWEEN, LAUNCH, SYNC = "between kernels", "launch latency", "synchronisation"
HOST, OUTSIDE = "host: ", "outside the step"


class LedgerError(RoseError):
    """Steps that cannot be run, or whose trace cannot be read."""


@dataclass(frozen=True)
class Row:
    """One cause: its µs, share, launches (or waits) per step, and floor in µs if known."""

    cause: str
    kind: str
    us: float
    share: float
    launches: float
    floor_us: float | None = None


class Span(NamedTuple):
    """A named interval, in µs."""

    start: float
    end: float
    name: str = ""


def account(
    trace: Trace, floors: Mapping[str, float] | None = None, marked: Sequence[Marked] = ()
) -> tuple[Row, ...]:
    """Return the mean rows over the least disturbed half of the steps, one per ``PROFILED_STEP`` range.

    floors: µs by cause. marked: work to list as separate causes. Raises ``LedgerError`` for fewer than two
    steps, or for a step that launched nothing.
    """
    steps = trace.ranges(PROFILED_STEP)
    if len(steps) < 2:
        raise LedgerError(f"the trace holds {len(steps)} steps; a ledger needs two or more")
    host, work = HostTimeline(trace), _work(trace)
    windows = _least_disturbed_half(_windows(work, steps, trace.on_gpu))
    causes = roles_of(work, trace.of("op"), [step.start for step in steps], host.at, marked)
    launches = Counter(
        (_kind(event), cause)
        for event, cause in zip(work, causes, strict=True)
        if any(window.start <= event.start < window.end for window in windows)
    )
    us: dict[tuple[str, str], float] = defaultdict(float)
    for window in windows:
        for kind, piece in _pieces(work, causes, window, host, trace.on_gpu):
            us[kind, piece.name] += piece.end - piece.start
            launches[kind, piece.name] += kind in ("gaps", "host")
    n, length, floors = len(windows), sum(map(_length, windows)), floors or {}
    rows = [
        Row(cause, kind, us[kind, cause] / n, us[kind, cause] / length, count / n, floors.get(cause))
        for (kind, cause), count in launches.items()
    ]
    return tuple(sorted(rows, key=lambda row: (KINDS.index(row.kind), -row.us)))


def _work(trace: Trace) -> list[Event]:
    kinds = ("kernel", "copy", "memset") if trace.on_gpu else ("op",)
    return [event for event in trace.events if event.kind in kinds]


def _windows(work: list[Event], steps: list[Event], on_gpu: bool) -> list[Span]:
    """Return each step's interval: first kernel to the next step's first; on a CPU, call to call."""
    starts = [_first_kernel(work, step) if on_gpu else step.start for step in steps]
    return [Span(start, end) for start, end in pairwise(starts)]


def _least_disturbed_half(windows: list[Span]) -> list[Span]:
    return sorted(sorted(windows, key=_length)[: (len(windows) + 1) // 2])


def _length(span: Span) -> float:
    return span.end - span.start


def _first_kernel(work: list[Event], step: Event) -> float:
    end = step.start + step.duration
    for event in work:
        if event.kind == "kernel" and step.start <= event.started <= end:
            return event.start
    raise LedgerError("a profiled step launched no kernel; have its sequences ended?")


def _pieces(
    work: list[Event], causes: list[str], window: Span, host: HostTimeline, on_gpu: bool
) -> Iterator[tuple[str, Span]]:
    """Split the window into pieces without gap or overlap, each with its kind and cause."""
    done = window.start
    for event, cause in zip(work, causes, strict=True):
        start, end = min(event.start, window.end), min(event.start + event.duration, window.end)
        if start > done:
            yield from _gap(done, start, event.started if on_gpu else start, host)
            done = start
        if end > done:
            yield _kind(event), Span(done, end, cause)
            done = end
    if done < window.end:
        yield from _gap(done, window.end, window.end, host)


def _gap(start: float, end: float, launched: float, host: HostTimeline) -> Iterator[tuple[str, Span]]:
    """Split an idle interval; the work that follows it was launched at ``launched``."""
    asked = min(max(launched, start), end)
    for span in host.within(start, asked):
        if span.name == SYNC:
            yield "gaps", span
        else:
            yield "host", span._replace(name=HOST + span.name)
    if end > asked:
        yield "gaps", Span(asked, end, LAUNCH if asked > start else BETWEEN)


def _kind(event: Event) -> str:
    return "copies" if event.kind in ("copy", "memset") else "work"


class HostTimeline:
    """What the host is doing at each moment: the innermost engine range, or a synchronisation."""

    def __init__(self, trace: Trace) -> None:
        self._spans = _innermost(trace.ranges() + trace.of("sync"))
        self._starts = [span.start for span in self._spans]

    def at(self, moment: float) -> str:
        i = bisect_right(self._starts, moment) - 1
        return self._spans[i].name if i >= 0 and moment < self._spans[i].end else OUTSIDE

    def within(self, start: float, end: float) -> Iterator[Span]:
        """Split the interval into named pieces."""
        i = max(0, bisect_right(self._starts, start) - 1)
        while start < end:
            span = self._spans[i] if i < len(self._spans) else Span(end, end)
            if start < span.start:
                yield Span(start, min(end, span.start), OUTSIDE)
            if max(start, span.start) < min(end, span.end):
                yield Span(max(start, span.start), min(end, span.end), span.name)
            start, i = max(start, span.end), i + 1


def _innermost(events: list[Event]) -> list[Span]:
    """Flatten nested intervals into consecutive ones, each named after the innermost."""
    spans: list[Span] = []
    opened: list[Span] = []
    done = 0.0

    def name_until(moment: float) -> None:
        nonlocal done
        if opened and moment > done:
            spans.append(Span(done, moment, opened[-1].name))
        done = max(done, moment)

    def close_until(moment: float) -> None:
        while opened and opened[-1].end <= moment:
            name_until(opened[-1].end)
            opened.pop()

    for event in sorted(events, key=lambda e: (e.start, -e.duration)):
        close_until(event.start)
        name_until(event.start)
        opened.append(Span(event.start, event.start + event.duration, _host_name(event)))
    close_until(float("inf"))
    return spans


def _host_name(event: Event) -> str:
    if event.kind == "sync":
        return SYNC
    names = {PROFILED_STEP: OUTSIDE, STEP_RANGE: "between the step's parts"}
    return names.get(event.name, event.name.rpartition(".")[2])
