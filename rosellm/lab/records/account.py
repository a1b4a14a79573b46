"""Attribute every microsecond of profiled decode steps to a cause.

A step lasts from its first kernel to the first kernel of the next step; on a CPU, from call to call. Time is
cut into pieces wherever a kernel, copy or profiler range begins or ends, or work is launched. Each piece has
one cause: the kernel or copy that runs, or the reason why nothing runs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from rosellm.errors import RoseError
from rosellm.lab.records.roles import Marked, roles_of
from rosellm.lab.records.trace import PROFILED_STEP, SYNC, Event, Trace

KINDS = ("work", "copies", "gaps", "host")
WORKING = ("work", "copies")  # the kinds in which the device works
BETWEEN, LAUNCH, HOST = "between kernels", "launch latency", "host: "


class LedgerError(RoseError):
    """The steps of a ledger cannot be run, or their trace cannot be read."""


@dataclass(frozen=True)
class Row:
    """One cause of time in a decode step.

    cause: its name.
    kind: one of ``KINDS``.
    us: µs per step.
    share: fraction of the step.
    launches: launches per step; waits per step if nothing runs.
    floor_us: lower bound in µs, or None if unknown.
    """

    cause: str
    kind: str
    us: float
    share: float
    launches: float
    floor_us: float | None = None


class _Piece(NamedTuple):
    """A stretch of time with one cause, centred at ``middle`` (µs on the trace's clock)."""

    middle: float
    us: float
    kind: str
    cause: str


def account(
    trace: Trace, floors: Mapping[str, float] | None = None, marked: Sequence[Marked] = ()
) -> tuple[Row, ...]:
    """Return the time of a step by cause, averaged over the shorter half of the profiled steps.

    trace: contains one ``PROFILED_STEP`` range per step; the last step only marks the end of the one before.
    floors: lower bounds in µs by cause.
    marked: work to list as separate causes.

    Rows are sorted by kind, then by time, largest first. Raises ``LedgerError`` for fewer than two steps, or
    for a step that launched nothing.
    """
    windows, floors = _least_disturbed_half(step_windows(trace)), floors or {}
    roles = roles_of(trace, trace.work, trace.ranges(PROFILED_STEP), marked)
    pieces = list(_pieces(trace, roles, [edge for window in windows for edge in window]))
    us: dict[tuple[str, str], float] = defaultdict(float)
    launches: Counter[tuple[str, str]] = Counter()
    for start, end in windows:
        for event, role in zip(trace.work, roles, strict=True):
            launches[_kind(event), role] += start <= event.start < end
        before = ""
        for piece in (one for one in pieces if start <= one.middle < end):
            us[piece.kind, piece.cause] += piece.us
            launches[piece.kind, piece.cause] += piece.kind not in WORKING and piece.cause != before
            before = piece.cause
    n, length = len(windows), sum(end - start for start, end in windows)
    rows = [
        Row(
            cause,
            kind,
            us[kind, cause] / n,
            us[kind, cause] / length,
            launches[kind, cause] / n,
            floors.get(cause),
        )
        for kind, cause in launches
        if launches[kind, cause] or us[kind, cause]
    ]
    return tuple(sorted(rows, key=lambda row: (KINDS.index(row.kind), -row.us)))


def step_windows(trace: Trace) -> list[tuple[float, float]]:
    """Return the start and end of each step except the last, whose start is the end of the one before."""
    steps = trace.ranges(PROFILED_STEP)
    if len(steps) < 2:
        raise LedgerError(f"the trace holds {len(steps)} steps; a ledger needs two or more")
    return list(pairwise(_first_kernel(trace, step) if trace.on_gpu else step.start for step in steps))


def _first_kernel(trace: Trace, step: Event) -> float:
    for kernel in trace.of("kernel"):
        if step.start <= kernel.started <= step.end:
            return kernel.start
    raise LedgerError("a profiled step launched no kernel; have its sequences ended?")


def _least_disturbed_half(windows: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return sorted(sorted(windows, key=lambda one: one[1] - one[0])[: (len(windows) + 1) // 2])


def _pieces(trace: Trace, roles: list[str], edges: list[float]) -> Iterator[_Piece]:
    """Yield the pieces of the trace in order; where work overlaps, a piece belongs to what started first.

    roles: the role of each event of ``trace.work``.
    edges: further times at which to cut, here the limits of steps.
    """
    work = trace.work
    start, end = np.array([e.start for e in work]), np.array([e.end for e in work])
    launched = np.array([e.started for e in work]) if trace.on_gpu else start
    spans = trace.ranges() + trace.of("sync")
    cuts = np.unique([*start, *end, *launched, *edges, *(at for one in spans for at in (one.start, one.end))])
    middle = (cuts[:-1] + cuts[1:]) / 2
    done = np.maximum.accumulate(end)
    first = np.searchsorted(done, middle, side="right").tolist()  # the first work that has not ended
    pieces = zip(middle.tolist(), np.diff(cuts).tolist(), first, trace.host_at(middle), strict=True)
    for at, us, i, host in pieces:
        if i < len(work) and start[i] <= at:
            yield _Piece(at, us, _kind(work[i]), roles[i])
        elif i < len(work) and launched[i] <= at:
            is_ahead = i > 0 and launched[i] <= done[i - 1]
            yield _Piece(at, us, "gaps", BETWEEN if is_ahead else LAUNCH)
        elif host == SYNC:
            yield _Piece(at, us, "gaps", SYNC)
        else:
            yield _Piece(at, us, "host", HOST + host)


def _kind(event: Event) -> str:
    return "copies" if event.kind in ("copy", "memset") else "work"
