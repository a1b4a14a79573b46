"""Attribute each microsecond of a decode step to a cause, next to the cause's floor.

Several consecutive steps are profiled, and only the shorter half of them is used, which excludes steps slowed
down by other load on the machine, and steps that open a KV block. A step lasts from its first kernel to the
first kernel of the next step (on a CPU, from call to call). Its time is of four kinds:

- *work*: kernels by purpose; on a CPU, operators. Where two overlap, as under programmatic dependent
  launch, the time belongs to the one that started first.
- *copies*, by direction.
- *gaps*: nothing runs although work was launched, or all work has ended and the host has not noticed yet.
- *host*: nothing runs because the host has launched nothing; the cause is the part of the engine's step that
  the host executes.

A profiler delays the host. Therefore rows are rescaled so that their sum is an unprofiled step of the same
engine. On a GPU, kernels and copies keep their length as measured by the device, and gaps and host share the
rest of the step in the profiled proportion. If kernels and copies alone take longer than the unprofiled step
(the profiler prevents some overlap), they shrink by a common factor; beyond ``MOST_STRETCHED`` the ledger
counts as disturbed and must not be used in calculations. On a CPU all rows are scaled by a common factor.

A ledger also lists the host's time by Python function, whether or not the device works meanwhile.
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
    """The time of one decode step by cause, in µs.

    name: the rung, or "custom".
    rows: sorted by kind, then by time, largest first; their sum is ``step_us``.
    step_us: mean unprofiled step, measured before and after the profile; the smaller of the two.
    profiled_us: mean length of a profiled step, over the shorter half of the steps.
    busy_us: mean time in kernels and copies in these steps.
    steps: number of profiled steps.
    on_gpu: whether kernels of a GPU were profiled, not operators of a CPU.
    batch: number of sequences.
    context: mean number of cached tokens per sequence.
    functions: the host's time by Python function, costliest first.
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
        """Share of the step in which kernels of a known purpose or copies run."""
        return self.busy - self.unknown

    @property
    def unknown(self) -> float:
        """Share of the step in which kernels of an unknown purpose run."""
        return sum(row.share for row in self.rows if row.cause == OTHER)

    @property
    def busy(self) -> float:
        """Share of the step in which kernels or copies run; on a CPU, operators."""
        return sum(row.share for row in self.rows if row.kind in WORKING)

    @property
    def floor_us(self) -> float | None:
        """The sum of all known lower bounds; None if there are none."""
        floors = [row.floor_us for row in self.rows if row.floor_us is not None]
        return sum(floors) if floors else None

    @property
    def cross_check(self) -> str:
        """A text that states how much of the step is attributed, and how the profiler changed its length."""
        change = percent_change(self.step_us, self.profiled_us)
        told = (
            f"Kernels of a known purpose and copies take {_percent(self.named)} of the step, other kernels "
            f"{_percent(self.unknown)}; for {_percent(1 - self.busy)} nothing runs. Under the profiler, the "
            f"step took {number(self.profiled_us)} µs ({change})."
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
        """Load a ledger from the result of :meth:`as_dict`."""
        values = {name: figures[name] for name in cls.__dataclass_fields__}
        rows = tuple(Row(**row) for row in figures["rows"])
        functions = tuple(HostFunction(**one) for one in figures["functions"])
        return cls(**values | {"rows": rows, "functions": functions})

    def _repr_markdown_(self) -> str:
        """Return a Markdown table of the rows and their sum, followed by :attr:`cross_check`."""
        heads = ["cause", "µs", "share", "launches", "floor, µs"]
        rows = [
            [one.cause, number(one.us), _percent(one.share), _launches(one), number(one.floor_us)]
            for one in self.rows
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
        """Return µs by cause, with a single entry "host" and a single entry "copies"."""
        us: dict[str, float] = defaultdict(float)
        for row in self.rows:
            us[row.kind if row.kind in ("host", "copies") else row.cause] += row.us
        return dict(us)


def _launches(row: Row) -> str:
    return f"{row.launches:.3g}" if row.kind in WORKING else ""  # gaps have none


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def tokens_needed(steps: int = 8) -> int:
    """Return how many tokens per sequence :func:`step_ledger` decodes."""
    return WARM_UP_STEPS + 5 * (steps + 1)


def tokens_before_profile(steps: int = 8) -> int:
    """Return how many tokens per sequence :func:`step_ledger` has decoded halfway through the profile."""
    return WARM_UP_STEPS + 2 * (steps + 1) + steps // 2


def step_ledger(bench: Bench, steps: int = 8, marked: Sequence[Marked] = ()) -> Ledger:
    """Decode with ``bench``, and return the ledger of ``steps`` profiled steps.

    bench: every sequence must be able to generate :func:`tokens_needed` more tokens.
    marked: work to list as separate causes.

    Steps are launched as by a scheduler, ahead of their results where the engine allows. Raises
    ``LedgerError`` for too few steps or tokens, or an unusable trace.
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
    """Profile ``steps`` steps, time others unprofiled, and return the ledger.

    run: runs the given number of consecutive steps of ``engine``, each inside a ``PROFILED_STEP`` range, and
        returns the times (``perf_counter``) at which the host saw each step end.
    batch, context: only recorded in the ledger.
    floors: maps the GPU's ceilings to lower bounds in µs by cause; not used on a CPU, whose caches may
        contain a whole model.
    marked: work to list as separate causes.

    Raises ``LedgerError`` if the trace is unusable.
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
    """Rescale the rows of profiled steps so that their sum is an unprofiled step of ``step_us`` µs.

    The module's description states how.
    """
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
    """Decode ``steps`` steps, launched ahead of their results where possible, as a scheduler does.

    Returns the times (``perf_counter``) at which the host saw each step end.
    """
    engine, ends = bench.engine, []
    for _ in range(steps):
        with record_function(PROFILED_STEP):
            engine.begin_decode(bench.sequences)
            for _ in range(2):  # before and after prefills
                ends += [time.perf_counter() for _ in engine.step.collect(leave=engine.step.run_ahead)]
    return ends + [time.perf_counter() for _ in engine.step.collect()]


def _mean_us(run: Callable[[int], list[float]], steps: int) -> float:
    """Return the mean µs of ``steps`` steps, timed from the end of the step before them to the last end."""
    ends = run(steps + 1)
    return (ends[-1] - ends[0]) / steps * 1e6
