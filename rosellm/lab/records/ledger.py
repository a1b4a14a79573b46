"""Where a decode step's time goes: each microsecond has a cause, and stands beside its floor.

Several consecutive steps are profiled, and the least disturbed half of them counts: other load on a machine,
or a step that opens a block, is no part of a usual step. A step lasts from its first kernel to the first of
the next (on a CPU, from one call to the next):

- *work*: kernels by what they are for; on a CPU, operators. Where two overlap, as they do under programmatic
  dependent launch, the time belongs to the one that started first.
- *copies*, by direction.
- *gaps*: nothing runs although it was launched already, or the host has yet to learn that all has ended.
- *host*: nothing runs because the host has not launched it; it is in this range of the engine.

A profiler delays the host. So the rows of a ledger sum up to an un-profiled step of the same engine: on a GPU
kernels and copies keep the length that the device measured, and gaps and host share what is left of the step
as they did under the profiler. Where kernels alone take longer than the un-profiled step (the profiler keeps
some from overlapping), all of them shrink alike; beyond ``MOST_STRETCHED`` the ledger counts as disturbed,
and nothing is computed from it. On a CPU all rows shrink alike.

Beside them stands all of the host's work, function by function, whether or not something runs meanwhile.
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

from rosellm.lab.records.account import PROFILED_STEP, WORKING, LedgerError, Row, account
from rosellm.lab.records.bench import Bench
from rosellm.lab.records.floors import Ceiling, floors_us, measure_ceiling
from rosellm.lab.records.host_functions import HostFunction, host_functions
from rosellm.lab.records.records import number, percent_change
from rosellm.lab.records.roles import OTHER, Marked
from rosellm.lab.records.trace import record_trace
from rosellm.roseinfer.engine import Engine

WARM_UP_STEPS = 6  # in which an engine also gets as far ahead of its host as it goes
MOST_STRETCHED = 1.1
DISTURBED = "The profiler made the kernels themselves longer: compare nothing with this ledger."


@dataclass(frozen=True)
class Ledger:
    """One decode step, cause by cause; µs.

    rows: of each kind the largest first; they sum up to ``step_us``, the mean of un-profiled steps in the
    less disturbed of two stretches, one before the profile and one after. profiled_us, busy_us: the mean over
    the least disturbed half of ``steps`` profiled steps, of all of it and of its kernels and copies.
    context: mean tokens cached a sequence. functions: the host's work, the costliest functions first.
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
        """Share of the step in which something of a known purpose runs."""
        return self.busy - self.unknown

    @property
    def unknown(self) -> float:
        """Share of the step in which something runs whose purpose is not known."""
        return sum(row.share for row in self.rows if row.cause == OTHER)

    @property
    def busy(self) -> float:
        """Share of the step in which something runs: kernels or copies; on a CPU, operators."""
        return sum(row.share for row in self.rows if row.kind in WORKING)

    @property
    def floor_us(self) -> float | None:
        """What the parts that have a floor take at least, together."""
        floors = [row.floor_us for row in self.rows if row.floor_us is not None]
        return sum(floors) if floors else None

    @property
    def cross_check(self) -> str:
        """How much of the step has a name, and what the profiler did to it, in a sentence or two."""
        change = percent_change(self.step_us, self.profiled_us)
        told = (
            f"Work of a known purpose takes {_percent(self.named)} of the step, other work "
            f"{_percent(self.unknown)}; in {_percent(1 - self.busy)} nothing runs. The profiled step took "
            f"{number(self.profiled_us)} µs ({change})."
        )
        return f"{told} {DISTURBED}" if self.is_disturbed else told

    @property
    def is_disturbed(self) -> bool:
        """Whether the profiler made the kernels so much longer that their times mislead."""
        return self.on_gpu and self.busy_us > MOST_STRETCHED * self.step_us

    def as_dict(self) -> dict[str, Any]:
        """For a record; :meth:`from_dict` reads it back."""
        return asdict(self) | {"named": self.named, "busy": self.busy, "floor_us": self.floor_us}

    @classmethod
    def from_dict(cls, figures: Mapping[str, Any]) -> Ledger:
        """A recorded ledger."""
        values = {name: figures[name] for name in cls.__dataclass_fields__}
        rows = tuple(Row(**row) for row in figures["rows"])
        functions = tuple(HostFunction(**one) for one in figures["functions"])
        return cls(**values | {"rows": rows, "functions": functions})

    def _repr_markdown_(self) -> str:
        """Markdown: the rows, their sum, and how far to trust them."""
        lines = ["| cause | µs | share | launches |", "|:--|--:|--:|--:|"]
        lines += [
            f"| {row.cause} | {number(row.us)} | {_percent(row.share)} | {row.launches:.3g} |"
            for row in self.rows
        ]
        lines.append(f"| **the step** | **{number(self.step_us)}** | {_percent(1)} | |")
        if self.floor_us is not None:
            us = [number(row.floor_us) for row in self.rows]
            column = [" floor, µs |", "--:|", *(f" {one} |" for one in us), f" **{number(self.floor_us)}** |"]
            lines = [line + cell for line, cell in zip(lines, column, strict=True)]
        return "\n".join([*lines, "", self.cross_check])

    def __repr__(self) -> str:
        """The same Markdown, to be read in a terminal."""
        return self._repr_markdown_()

    def us_by_cause(self) -> dict[str, float]:
        """µs by cause; all of the host together, and all copies."""
        together = {"host": "host", "copies": "copies"}
        us: dict[str, float] = defaultdict(float)
        for row in self.rows:
            us[together.get(row.kind, row.cause)] += row.us
        return dict(us)


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def tokens_needed(steps: int = 8) -> int:
    """Tokens a sequence that :func:`step_ledger` decodes."""
    return WARM_UP_STEPS + 5 * (steps + 1)


def tokens_before_profile(steps: int = 8) -> int:
    """Tokens a sequence that it has decoded when half of the profiled steps are done."""
    return WARM_UP_STEPS + 2 * (steps + 1) + steps // 2


def step_ledger(bench: Bench, steps: int = 8, marked: Sequence[Marked] = ()) -> Ledger:
    """Decodes with ``bench`` and accounts for ``steps`` profiled steps; others are timed un-profiled.

    Steps are run as a scheduler runs them, ahead of the host where the engine can; every sequence needs room
    for :func:`tokens_needed` more tokens. marked: work that gets a row of its own. Raises ``LedgerError``.
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
    """Accounts for ``steps`` profiled steps of ``batch`` sequences; others are timed un-profiled.

    run: runs so many consecutive steps of ``engine``, each inside a range ``PROFILED_STEP``, and tells when
    each was seen to end. floors: what this GPU sustains → µs by cause; a CPU, whose caches may hold a whole
    model, has none. Raises ``LedgerError``.
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
    """The rows of profiled steps as those of one that takes ``step_us`` µs, to which they then sum up."""
    busy = sum(row.us for row in rows if row.kind in WORKING)
    idle = sum(row.us for row in rows) - busy
    if not on_gpu or not idle:
        working = waiting = step_us / (busy + idle)
    else:
        working = min(1.0, step_us / busy)
        waiting = (step_us - working * busy) / idle

    def scaled(row: Row) -> Row:
        us = row.us * (working if row.kind in WORKING else waiting)
        return replace(row, us=us, share=us / step_us)

    return tuple(scaled(row) for row in rows)


def _check(bench: Bench, steps: int) -> None:
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise LedgerError(f"steps is {steps!r}; it must be a whole number, 1 or more")
    needed = tokens_needed(steps)
    room = min(s.max_length - len(s.tokens) for s in bench.sequences)
    if room < needed:
        raise LedgerError(
            f"a ledger of {steps} steps decodes {needed} tokens a sequence and the bench has room for "
            f"{room}; give it {needed - room} more new_tokens"
        )


def drive(bench: Bench, steps: int) -> list[float]:
    """Decodes as a scheduler does, ahead of the host where the engine can; when each step was seen to end."""
    engine, ends = bench.engine, []
    for _ in range(steps):
        with record_function(PROFILED_STEP):
            engine.begin_decode(bench.sequences)
            ends += [time.perf_counter() for _ in engine.step.collect(leave=engine.step.run_ahead)]
    return ends + [time.perf_counter() for _ in engine.step.collect()]


def _mean_us(run: Callable[[int], list[float]], steps: int) -> float:
    """Of ``steps`` consecutive steps, from the end of the one before them to the end of the last."""
    ends = run(steps + 1)
    return (ends[-1] - ends[0]) / steps * 1e6
