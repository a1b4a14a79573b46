"""Draw a recorded decode step of two ranks on one time axis, and tabulate where its time goes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rosellm.lab.figures.charts import Chart
from rosellm.lab.figures.timeline import timeline
from rosellm.lab.records.rank_steps import RankSteps, all_reduces, marks_of
from rosellm.lab.records.roles import Marked, kernel_role
from rosellm.lab.records.trace import Trace
from rosellm.roseinfer.tensor_parallel import SUMS_A_LAYER

HEADS = ("", "µs", "rank 0", "rank 1")


def ranks_over_time(figures: Mapping[str, Any], title: str, layer: int, n_layers: int = 2) -> Chart:
    """Draw ``n_layers`` layers of the step, from ``layer`` on; what follows the last layer belongs to it.

    layer: 1 or more.
    """
    steps = RankSteps.of(figures)
    ends = [[e.end for e in all_reduces(trace)] for trace in steps.traces]
    before, last = SUMS_A_LAYER * (layer - 1), SUMS_A_LAYER * (layer - 1 + n_layers)
    starts = [
        own[before - 1] if before else t.events[0].start for own, t in zip(ends, steps.traces, strict=True)
    ]
    first, end = min(starts), max(own[last - 1] if last < len(own) else math.inf for own in ends)
    drawn = {
        f"rank {rank}": Trace(e for e in trace.events if first <= e.start < end)
        for rank, trace in enumerate(steps.traces)
    }
    marked = [mark for trace in drawn.values() for mark in marks_of(trace)]
    if end < math.inf:  # the last GEMM is not the head's
        names = {event.name for trace in drawn.values() for event in trace.events}
        marked.append(Marked("GEMM", "GEMM", frozenset(it for it in names if kernel_role(it) == "GEMM")))
    return timeline(drawn, title, marked, first)


def ledger_rows(name: str, figures: Mapping[str, Any]) -> list[Sequence[Any]]:
    """Return ``HEADS`` of the step's ledgers: each cause, its sum, waits and starts, and unprofiled steps."""
    steps, unprofiled = RankSteps.of(figures), median(figures["unprofiled_us"])
    causes = sorted({*steps.ledgers[0], *steps.ledgers[1]}, key=lambda one: -steps.ledgers[0].get(one, 0.0))
    rows: list[Sequence[Any]] = [(one, *(own.get(one, 0.0) for own in steps.ledgers)) for one in causes]
    rows.append(("the step, profiled", *(sum(own.values()) for own in steps.ledgers)))
    rows.append(("the step, not profiled", unprofiled, None))
    rows.append(("all-reduces: waiting for the other rank", *steps.waits_us))
    rows.append(("starts after rank 0, median", None, median(steps.skews_us)))
    rows.append(("starts after rank 0, least", None, min(steps.skews_us)))
    rows.append(("starts after rank 0, most", None, max(steps.skews_us)))
    return [(name, *row) for row in rows]
