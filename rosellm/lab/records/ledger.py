"""Where a decode step's time goes: each microsecond has a named cause, and stands beside its floor.

Several consecutive steps are profiled, and the quieter half of them counts: what else a machine does at
times, or a step that opens a block, is not what a usual step costs. A step lasts from its first kernel to the
first kernel of the next (on a CPU, from one call to the next), so the rows of a ledger sum up to the step:

- *work*: kernels by what they are for; on a CPU, operators. Where two overlap, as they do under programmatic
  dependent launch, the time belongs to the one that started first.
- *copies*, by direction.
- *gaps*: nothing runs although it was launched already, or the host is yet to learn that all has ended.
- *host*: nothing runs because the host has not launched it; it is in this range of the engine.

Beside them stands all of the host's work, function by function, whether or not something runs meanwhile.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from torch.profiler import record_function

from rosellm.errors import RoseError
from rosellm.lab.records.bench import Bench
from rosellm.lab.records.host_functions import HostFunction, host_functions, host_table
from rosellm.lab.records.records import number, percent_change
from rosellm.lab.records.roles import OTHER, roles_of
from rosellm.lab.records.trace import Event, Trace, record_trace
from rosellm.models.config import ModelConfig
from rosellm.models.model import GPT
from rosellm.roseinfer.recipe import Recipe
from rosellm.roseinfer.steps.step import STEP_RANGE

if TYPE_CHECKING:  # a machine that only measures need not be able to draw
    from rosellm.lab.figures import charts

PROFILED_STEP = "rosellm.lab.ledger.step"
WARM_UP_STEPS = 6  # in which an engine also gets as far ahead of its host as it goes
KINDS = ("work", "copies", "gaps", "host")
BETWEEN, LAUNCH, SYNC = "between kernels", "launch latency", "synchronisation"
HOST, OUTSIDE = "host: ", "outside the step"
MOST_DISTURBANCE = 1.2
DISTURBED = "Read gaps and host rows with care: the profiler made them longer."


class LedgerError(RoseError):
    """Steps that cannot be run, or whose trace cannot be read."""


@dataclass(frozen=True)
class Row:
    """One cause: its µs, share and launches (or waits) a step, and its floor in µs if that is known."""

    cause: str
    kind: str
    us: float
    share: float
    launches: float
    floor_us: float | None = None


@dataclass(frozen=True)
class Ledger:
    """One decode step, cause by cause; µs.

    rows: of each kind the largest first; they sum up to ``step_us``, the mean over the quieter half of
    ``steps`` profiled steps. unprofiled_us: the mean of steps that nothing watched, in the quieter of two
    stretches, one before the profile and one after. context: mean tokens cached a sequence.
    functions: the host's work, the costliest functions first.
    """

    name: str
    rows: tuple[Row, ...]
    step_us: float
    unprofiled_us: float
    steps: int
    on_gpu: bool
    batch: int
    context: float
    functions: tuple[HostFunction, ...]

    @property
    def coverage(self) -> float:
        """Share of the step that has a named cause."""
        return 1 - sum(row.share for row in self.rows if row.cause == OTHER)

    @property
    def busy(self) -> float:
        """Share of the step in which something runs: kernels or copies; on a CPU, operators."""
        return sum(row.share for row in self.rows if row.kind in ("work", "copies"))

    @property
    def floor_us(self) -> float | None:
        """What the parts that have a floor take at least, together."""
        floors = [row.floor_us for row in self.rows if row.floor_us is not None]
        return sum(floors) if floors else None

    @property
    def cross_check(self) -> str:
        """The profiled step beside the un-profiled one, in a sentence."""
        change = percent_change(self.unprofiled_us, self.step_us)
        told = (
            f"The profiled step takes {number(self.step_us)} µs, an un-profiled one "
            f"{number(self.unprofiled_us)} µs ({change}); named causes cover {_percent(self.coverage)} of it."
        )
        return f"{told} {DISTURBED}" if self.is_disturbed else told

    @property
    def is_disturbed(self) -> bool:
        """Whether the profiled step is so much longer than an un-profiled one that its gaps mislead."""
        return self.step_us > MOST_DISTURBANCE * self.unprofiled_us

    def as_dict(self) -> dict[str, Any]:
        """For a record; :meth:`from_dict` reads it back."""
        return asdict(self) | {"coverage": self.coverage, "busy": self.busy, "floor_us": self.floor_us}

    @classmethod
    def from_dict(cls, figures: Mapping[str, Any]) -> Ledger:
        """A recorded ledger."""
        values = {name: figures[name] for name in cls.__dataclass_fields__}
        rows = tuple(Row(**row) for row in figures["rows"])
        functions = tuple(HostFunction(**one) for one in figures["functions"])
        return cls(**values | {"rows": rows, "functions": functions})

    def table(self) -> str:
        """Markdown: the rows, their sum, and the cross-check against the un-profiled step."""
        lines = ["| cause | µs | share | launches | floor, µs |", "|:--|--:|--:|--:|--:|"]
        for row in self.rows:
            cells = (
                row.cause,
                number(row.us),
                _percent(row.share),
                f"{row.launches:.3g}",
                number(row.floor_us),
            )
            lines.append(f"| {' | '.join(cells)} |")
        total = f"**{number(self.step_us)}** | {_percent(1)} | | **{number(self.floor_us)}**"
        lines.append(f"| **the step** | {total} |")
        return "\n".join([*lines, "", self.cross_check])

    def show(self, title: str | None = None) -> None:
        """Displays the chart, then the table of causes and that of the host's functions."""
        from rosellm.lab.figures import charts, compare

        charts.show(self.chart(title))
        compare.say(f"{self.table()}\n\n{host_table(self.functions)}")

    def chart(self, title: str | None = None) -> charts.Chart:
        """One bar of the step and, where it is known, one of the floor."""
        bars = {self.name: _segments(self.rows)}
        floors = {row.cause: row.floor_us for row in self.rows if row.floor_us is not None}
        if floors:
            bars["floor"] = floors
        title = title or f"Where a step's {number(self.step_us)} µs go, batch {self.batch}"
        from rosellm.lab.figures import charts

        return charts.stacked_time(bars, title=title, unit="µs", with_values=True)


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def waterfall(before: Ledger, after: Ledger, title: str | None = None) -> charts.Chart:
    """From one step's time to another's, cause by cause."""
    old, new = _segments(before.rows), _segments(after.rows)
    changes = {cause: new.get(cause, 0.0) - old.get(cause, 0.0) for cause in {**old, **new}}
    title = title or f"{before.name} → {after.name}: what became of each microsecond, batch {after.batch}"
    ends = (before.name, before.step_us), (after.name, after.step_us)
    from rosellm.lab.figures import charts

    return charts.waterfall(ends[0], changes, ends[1], "µs", title=title)


def live_waterfall(
    model: GPT, before: str | Recipe, after: str | Recipe, prompts: list[list[int]], steps: int = 8
) -> charts.Chart:
    """From a decode step of one recipe to one of another, both measured here and now on the same prompts.

    The prompts must leave room for :func:`tokens_needed` new tokens. Raises ``LedgerError``.
    """
    room = tokens_needed(steps) + 1
    return waterfall(*(step_ledger(Bench(model, one, prompts, room), steps) for one in (before, after)))


def _segments(rows: Iterable[Row]) -> dict[str, float]:
    """µs by cause; all of the host together, and all copies."""
    together = {"host": "host", "copies": "copies"}
    us: Counter[str] = Counter()
    for row in rows:
        us[together.get(row.kind, row.cause)] += row.us
    return dict(us)


def tokens_needed(steps: int = 8) -> int:
    """Tokens a sequence that :func:`step_ledger` decodes."""
    return WARM_UP_STEPS + 5 * (steps + 1)


def tokens_before_profile(steps: int = 8) -> int:
    """Tokens a sequence that it has decoded when half of the profiled steps are done."""
    return WARM_UP_STEPS + 2 * (steps + 1) + steps // 2


def step_ledger(
    bench: Bench, steps: int = 8, *, ceiling: Ceiling | None = None, save_to: Path | None = None
) -> Ledger:
    """Decodes with ``bench`` and accounts for ``steps`` profiled steps; others are timed un-profiled.

    Steps are run as a scheduler runs them, ahead of the host where the engine can; every sequence needs room
    for :func:`tokens_needed` more tokens. ceiling: what floors are computed from; None measures this GPU's,
    and a CPU, whose caches may hold a whole model, has none. save_to keeps the Chrome trace. Raises
    ``LedgerError``.
    """
    engine, batch = bench.engine, len(bench.sequences)
    _check(bench, steps)
    drive(bench, WARM_UP_STEPS)
    unprofiled = [_mean_us(bench, steps)]
    cached = fmean(len(s.tokens) for s in bench.sequences) + steps
    trace = record_trace(lambda: drive(bench, steps + 1), save_to)
    context = cached + (steps - 1) / 2
    unprofiled.append(_mean_us(bench, steps))
    functions = host_functions(lambda: drive(bench, steps + 1), steps + 1)
    if ceiling is None and engine.device.type == "cuda":
        ceiling = measure_ceiling(engine.device, engine.model.dtype)
    itemsize = engine.model.dtype.itemsize
    rows = account(trace, ceiling and floors_us(engine.config, batch, context, itemsize, ceiling))
    return Ledger(
        name=engine.rung or "custom",
        rows=rows,
        step_us=sum(row.us for row in rows),
        unprofiled_us=min(unprofiled),
        steps=steps,
        on_gpu=trace.on_gpu,
        batch=batch,
        context=context,
        functions=functions,
    )


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
            ends += [time.perf_counter() for _ in engine.collect(leave=engine.run_ahead)]
    return ends + [time.perf_counter() for _ in engine.collect()]


def _mean_us(bench: Bench, steps: int) -> float:
    """Of ``steps`` consecutive steps, from the end of the one before them to the end of the last."""
    ends = drive(bench, steps + 1)
    return (ends[-1] - ends[0]) / steps * 1e6


class Span(NamedTuple):
    """A stretch of time, µs, and what it is called."""

    start: float
    end: float
    name: str = ""


def account(trace: Trace, floors: Mapping[str, float] | None = None) -> tuple[Row, ...]:
    """Rows of the mean of the quieter half of the steps, each from one ``PROFILED_STEP`` range to the next.

    floors: µs by cause. Raises ``LedgerError`` for fewer than two steps, or one that launched nothing.
    """
    steps = trace.ranges(PROFILED_STEP)
    if len(steps) < 2:
        raise LedgerError(f"the trace holds {len(steps)} steps; a ledger needs two or more")
    host, work = HostTimeline(trace), _work(trace)
    windows = _quieter_half(_windows(work, steps, trace.on_gpu))
    causes = roles_of(work, trace.of("op"), [step.start for step in steps], host.at)
    launches = Counter(
        (_kind(event), cause)
        for event, cause in zip(work, causes, strict=True)
        if any(window.start <= event.start < window.end for window in windows)
    )
    us: Counter[tuple[str, str]] = Counter()
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
    """Each step from its first kernel to that of the next; on a CPU, from call to call."""
    starts = [_first_kernel(work, step) if on_gpu else step.start for step in steps]
    return [Span(start, end) for start, end in pairwise(starts)]


def _quieter_half(windows: list[Span]) -> list[Span]:
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
    """The window cut into pieces without gap or overlap, each with its kind and cause."""
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
    """Nothing runs from start to end; what runs then was asked for at ``launched``."""
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
    """What the host is in at each moment: the innermost range of the engine, or a synchronisation."""

    def __init__(self, trace: Trace) -> None:
        self._spans = _innermost(trace.ranges() + trace.of("sync"))
        self._starts = [span.start for span in self._spans]

    def at(self, moment: float) -> str:
        i = bisect_right(self._starts, moment) - 1
        return self._spans[i].name if i >= 0 and moment < self._spans[i].end else OUTSIDE

    def within(self, start: float, end: float) -> Iterator[Span]:
        """The stretch cut into pieces, each with a name."""
        i = max(0, bisect_right(self._starts, start) - 1)
        while start < end:
            span = self._spans[i] if i < len(self._spans) else Span(end, end)
            if start < span.start:
                yield Span(start, min(end, span.start), OUTSIDE)
            if max(start, span.start) < min(end, span.end):
                yield Span(max(start, span.start), min(end, span.end), span.name)
            start, i = max(start, span.end), i + 1


def _innermost(events: list[Event]) -> list[Span]:
    """Nested stretches as consecutive ones, each named after the innermost."""
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


@dataclass(frozen=True)
class Ceiling:
    """The most that a device does: bytes moved and floating-point operations a µs."""

    bytes_per_us: float
    flops_per_us: float


@lru_cache(maxsize=8)
def measure_ceiling(device: torch.device, dtype: torch.dtype) -> Ceiling:
    """A GPU's, from a copy of 1 GiB and a product of two 8192 × 8192 matrices."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a = torch.randn(8192, 8192, device=device, dtype=dtype)
    out = torch.empty_like(a)
    copied, multiplied = (
        triton.testing.do_bench(run, warmup=10, rep=40, return_mode="min") * 1e3
        for run in (lambda: target.copy_(source), lambda: torch.mm(a, a, out=out))
    )
    return Ceiling(2 * source.numel() / copied, 2 * 8192**3 / multiplied)


def floors_us(
    config: ModelConfig, batch: int, context: float, itemsize: int, ceiling: Ceiling
) -> dict[str, float]:
    """µs by cause for ``batch`` rows with ``context`` cached tokens each: the longer of bytes and operations.

    Weights are read once a step, each part's inputs read and its outputs written once; logits need not be.
    """
    c, f, layers, vocab = config.d_model, config.d_ff, config.n_layers, config.vocab_size
    heads, qkv = config.n_heads * config.head_dim, config.qkv_width
    kv = config.kv_bytes_per_token(itemsize)
    weights = c * qkv + heads * c + 2 * c * f
    elements = {
        "GEMM": layers * (weights + qkv + 2 * c + f + batch * (qkv + heads + 3 * c + 2 * f)),
        "head": vocab * c + batch * c,
        "norm": (2 * layers + 1) * (2 * c + 2 * batch * c),
        "elementwise": layers * batch * (2 * f + 6 * c),
        "embedding": 3 * batch * c,
        "attention": layers * batch * 2 * heads,
    }
    n_bytes = {cause: n * itemsize for cause, n in elements.items()} | {"append": 2 * batch * kv}
    n_bytes["attention"] += batch * (context + 1) * kv
    n_bytes["layers"] = n_bytes["GEMM"] + n_bytes["attention"]  # all of them in one kernel
    flops = {
        "GEMM": 2 * batch * layers * weights,
        "head": 2 * batch * vocab * c,
        "attention": 4 * batch * layers * heads * (context + 1),
    }
    return {
        cause: max(n / ceiling.bytes_per_us, flops.get(cause, 0) / ceiling.flops_per_us)
        for cause, n in n_bytes.items()
    }
