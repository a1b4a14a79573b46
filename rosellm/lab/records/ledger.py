"""Attribute each microsecond of a decode step to a cause, next to the cause's floor.

Several consecutive steps are profiled, and the least disturbed half counts, which excludes other load on the
machine and steps that open a KV block. A step lasts from its first kernel to the first of the next (on a CPU,
from call to call):

- *work*: kernels by purpose; on a CPU, operators. Where two overlap, as under programmatic dependent
  launch, the time belongs to the one that started first.
- *copies*, by direction.
- *gaps*: nothing runs although work was launched, or the host has yet to notice that all has ended.
- *host*: nothing runs because the host has not launched it; named after the engine's range it is in.

A profiler delays the host. So rows are rescaled to sum up to an unprofiled step of the same engine: on a GPU
kernels and copies keep their device-measured length, and gaps and host share the rest of the step in the
profiled proportion. If kernels alone take longer than the unprofiled step (the profiler prevents some
overlap), all shrink alike; beyond ``MOST_STRETCHED`` the ledger counts as disturbed and must not be used in
calculations. On a CPU all rows shrink alike.

A ledger also lists all of the host's work by function, whether or not something runs meanwhile.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from torch.profiler import record_function

from rosellm.lab.records.account import WORKING, LedgerError, Row, account
from rosellm.lab.records.bench import Bench
from rosellm.lab.records.floors import Ceiling, floors_us, measure_ceiling
from rosellm.lab.records.host_functions import HostFunction, host_functions
from rosellm.lab.records.records import number, percent_change
from rosellm.lab.records.roles import OTHER, Marked
from rosellm.lab.records.trace import PROFILED_STEP, record_trace
from rosellm.roseinfer.engine import Engine

WARM_UP_STEPS = 6  # also fills the steps that the engine runs ahead
MOST_STRETCHED = 1.1
DISTURBED = "The profiler made the kernels themselves longer: compare nothing with this ledger."


@dataclass(frozen=True)
class Ledger:
    """One decode step by cause; times in µs.

    rows: by kind, largest first; they sum up to ``step_us``, the mean unprofiled step in the less disturbed
    of two stretches, one before the profile and one after. profiled_us, busy_us: the mean length, and the
    mean time in kernels and copies, over the least disturbed half of ``steps`` profiled steps. context: mean
    cached tokens per sequence. functions: the host's work, costliest functions first.
    """

    name: str
    rows: tuple[Row, ...]
    step_us: float
    profiled_us: float
    busy_us: float
    steps: int
    on_gpu: bool
    batch: int
    context: float
    functions: tuple[HostFunction, ...]

    @property
    def named(self) -> float:
        """Share of the step in which work of a known purpose runs."""
        return self.busy - self.unknown

    @property
    def unknown(self) -> float:
        """Share of the step in which work of an unknown purpose runs."""
        return sum(row.share for row in self.rows if row.cause == OTHER)

    @property
    def busy(self) -> float:
        """Share of the step in which kernels or copies run; on a CPU, operators."""
        return sum(row.share for row in self.rows if row.kind in WORKING)

    @property
    def floor_us(self) -> float | None:
        """The sum of all known floors; None if there are none."""
        floors = [row.floor_us for row in self.rows if row.floor_us is not None]
        return sum(floors) if floors else None

    @property
    def cross_check(self) -> str:
        """State how much of the step is attributed, and the profiler's effect on it."""
        change = percent_change(self.step_us, self.profiled_us)
        told = (
            f"Work of a known purpose takes {_percent(self.named)} of the step, other work "
            f"{_percent(self.unknown)}; in {_percent(1 - self.busy)} nothing runs. The profiled step took "
            f"{number(self.profiled_us)} µs ({change})."
        )
        return f"{told} {DISTURBED}" if self.is_disturbed else told

    @property
    def is_disturbed(self) -> bool:
        """Whether the profiler lengthened the kernels so much that their times mislead."""
        return self.on_gpu and self.busy_us > MOST_STRETCHED * self.step_us

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for a record; :meth:`from_dict` reads it back."""
        return asdict(self) | {"named": self.named, "busy": self.busy, "floor_us": self.floor_us}

    @classmethod
    def from_dict(cls, figures: Mapping[str, Any]) -> Ledger:
        """Load a recorded ledger."""
        values = {name: figures[name] for name in cls.__dataclass_fields__}
        rows = tuple(Row(**row) for row in figures["rows"])
        functions = tuple(HostFunction(**one) for one in figures["functions"])
        return cls(**values | {"rows": rows, "functions": functions})

    def _repr_markdown_(self) -> str:
        """Return Markdown: the rows, their sum, and how reliable they are."""
        heads = ["cause", "µs", "share", "launches", "floor, µs"]
        rows = [
            [row.cause, number(row.us), _percent(row.share), f"{row.launches:.3g}", number(row.floor_us)]
            for row in self.rows
        ]
        ends = f"**{number(self.step_us)}**", _percent(1), "", f"**{number(self.floor_us)}**"
        n = len(heads) - (self.floor_us is None)
        lines = [f"| {' | '.join(row[:n])} |" for row in [heads, *rows, ["**the step**", *ends]]]
        lines.insert(1, "|:--|" + (n - 1) * "--:|")
        return "\n".join([*lines, "", self.cross_check])

    def __repr__(self) -> str:
        """Return the same Markdown for a terminal."""
        return self._repr_markdown_()

    def us_by_cause(self) -> dict[str, float]:
        """Return µs by cause; host and copies are each one entry."""
        us: dict[str, float] = defaultdict(float)
        for row in self.rows:
            us[row.kind if row.kind in ("host", "copies") else row.cause] += row.us
        return dict(us)


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def tokens_needed(steps: int = 8) -> int:
    """Return how many tokens per sequence :func:`step_ledger` decodes."""
    return WARM_UP_STEPS + 5 * (steps + 1)


def tokens_before_profile(steps: int = 8) -> int:
    """Return how many tokens per sequence it has decoded halfway through the profiled steps."""
    return WARM_UP_STEPS + 2 * (steps + 1) + steps // 2


def step_ledger(bench: Bench, steps: int = 8, marked: Sequence[Marked] = ()) -> Ledger:
    """Decode with ``bench`` and account for ``steps`` profiled steps; others are timed unprofiled.

    Steps run as in a scheduler, ahead of the host where the engine can; every sequence needs room for
    :func:`tokens_needed` more tokens. marked: work that gets a separate row. Raises ``LedgerError``.
    """
    _check(bench, steps)
    engine, batch = bench.engine, len(bench.sequences)
    there = fmean(len(s.tokens) for s in bench.sequences)
    context = there + WARM_UP_STEPS + 2 * steps + 1 + (steps - 1) / 2
    floors = partial(floors_us, engine.config, batch, context, engine.model.dtype.itemsize)
    return take_ledger(partial(drive, bench), engine, steps, batch, context, floors, marked)


def take_ledger(
    run: Callable[[int], list[float]],
    engine: Engine,
    steps: int,
    batch: int,
    context: float,
    floors: Callable[[Ceiling], Mapping[str, float]],
    marked: Sequence[Marked] = (),
) -> Ledger:
    """Account for ``steps`` profiled steps of ``batch`` sequences; others are timed unprofiled.

    run: runs that many consecutive steps of ``engine``, each inside a ``PROFILED_STEP`` range, and returns
    when the host saw each end. floors: maps the GPU's ceiling to µs by cause; not used on a CPU, whose caches
    may hold a whole model. Raises ``LedgerError``.
    """
    run(WARM_UP_STEPS)
    unprofiled = [_mean_us(run, steps)]
    trace = record_trace(lambda: run(steps + 1))
    unprofiled.append(_mean_us(run, steps))
    functions = host_functions(lambda: run(steps + 1), steps + 1)
    on_gpu = engine.device.type == "cuda"
    known = floors(measure_ceiling(engine.device, engine.model.dtype)) if on_gpu else None
    rows, step_us = account(trace, known, marked), min(unprofiled)
    return Ledger(
        name=engine.rung or "custom",
        rows=of_unprofiled(rows, step_us, trace.on_gpu),
        step_us=step_us,
        profiled_us=sum(row.us for row in rows),
        busy_us=sum(row.us for row in rows if row.kind in WORKING),
        steps=steps,
        on_gpu=trace.on_gpu,
        batch=batch,
        context=context,
        functions=functions,
    )


def of_unprofiled(rows: Sequence[Row], step_us: float, on_gpu: bool) -> tuple[Row, ...]:
    """Rescale the rows of profiled steps to sum up to an unprofiled step of ``step_us`` µs."""
    busy = sum(row.us for row in rows if row.kind in WORKING)
    idle = sum(row.us for row in rows) - busy
    if not on_gpu or not idle:
        working = waiting = step_us / (busy + idle)
    else:
        working = min(1.0, step_us / busy)
        waiting = (step_us - working * busy) / idle

    us = (row.us * (working if row.kind in WORKING else waiting) for row in rows)
    return tuple(replace(row, us=new, share=new / step_us) for row, new in zip(rows, us, strict=True))


def _check(bench: Bench, steps: int) -> None:
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise LedgerError(f"steps is {steps!r}; it must be a whole number, 1 or more")
    needed = tokens_needed(steps)
    room = min(s.max_length - len(s.tokens) for s in bench.sequences)
    if room < needed:
        raise LedgerError(
            f"a ledger of {steps} steps decodes {needed} tokens per sequence, and the bench has room for "
            f"{room}; give it {needed - room} more new_tokens"
        )


def drive(bench: Bench, steps: int) -> list[float]:
    """Decode as a scheduler does, ahead of the host where possible; return when each end was seen."""
    engine, ends = bench.engine, []
    for _ in range(steps):
        with record_function(PROFILED_STEP):
            engine.begin_decode(bench.sequences)
            for _ in range(2):  # before and after prefills
                ends += [time.perf_counter() for _ in engine.step.collect(leave=engine.step.run_ahead)]
    return ends + [time.perf_counter() for _ in engine.step.collect()]


def _mean_us(run: Callable[[int], list[float]], steps: int) -> float:
    """Return the mean of ``steps`` steps, from the end of the preceding step to the end of the last."""
    ends = run(steps + 1)
    return (ends[-1] - ends[0]) / steps * 1e6
