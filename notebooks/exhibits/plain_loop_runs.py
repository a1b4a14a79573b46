"""Time the steps of plain torch loops, of transformers' ``generate``, and of three rungs of the engine.

All alternate, on equal prompts, and each is profiled for a few steps. In float32 there is one sequence, and
neither transformers nor the engine. The record is DIR/MODEL/plain_loops.json, rewritten after each part.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from statistics import median
from typing import Any

from rosellm.bench.workloads import MODERN_MODEL
from rosellm.lab.diagnose import steps
from rosellm.lab.diagnose.profile import calls_in, mean_us
from rosellm.lab.records.account import WORKING, Row, account
from rosellm.lab.records.bench import get_model, make_prompts
from rosellm.lab.records.experiment import Asked, Experiment, Record, in_parts
from rosellm.lab.records.floors import Ceiling, floors_us, measure_ceiling
from rosellm.lab.records.ledger import of_unprofiled
from rosellm.lab.records.records import number
from rosellm.lab.records.roles import roles_of
from rosellm.lab.records.trace import PROFILED_STEP, Trace, record_trace
from rosellm.lab.records.turns import in_turns
from rosellm.roseinfer.exhibits import load_exhibit

plain = load_exhibit("plain_loops")
NAME = "plain_loops"
DTYPES, BATCHES, CONTEXT = ("float32", "bfloat16"), (1, 8), 512
TIMED, TRACED, TURNS = steps.ROOM - 2, 4, 5  # steps of a turn and of a profile, and turns
RUNGS = "dense", "cuda_graph", "split_kv"
CAUSES = "GEMM", "attention", "head"


def measure_part(asked: Asked, dtype: str, batch: int, theirs: Callable[..., Any]) -> dict[str, Any]:
    """Measure all loops at a batch size; in float32 only the plain ones that are not compiled.

    theirs: loads a model of transformers, as ``load_transformers`` does.

    Returns a dict:
    seconds: duration of this function.
    read_bytes: bytes that a step must read.
    equal_tokens: plain loop → share of its tokens that are those of the first loop.
    loops: name → the figures of :func:`figures_of`, and ``first_s``, the seconds of the turn that compiles.
    """
    start = time.perf_counter()
    gpt, context = get_model(asked.model, asked.device, dtype, asked.load_format), _context(asked)
    prompts = make_prompts(batch, context, gpt.config.vocab_size)
    everything = dtype == DTYPES[-1]
    kinds = plain.LOOPS if everything else plain.LOOPS[:-1]
    loops = {kind.__name__: kind(gpt, prompts, steps.ROOM) for kind in kinds}
    sides: list[steps.Steps] = [plain.as_steps(one) for one in loops.values()]
    if everything:
        other = theirs(asked.model, asked.load_format, gpt)
        sides += [steps.TransformersSteps(other, batch, context, static) for static in (False, True)]
        sides += [steps.EngineSteps(gpt, rung, batch, context) for rung in RUNGS]
    first_s = {one.name: _first_s(one) for one in sides}
    turns = {one.name: partial(mean_us, one, TIMED) for one in sides}
    turns_us = in_turns(turns, asked["repeats"], warm_up=False)
    tokens = {name: one.tokens[:, context:] for name, one in loops.items()}
    first = next(iter(tokens.values()))
    found = {one.name: {"first_s": first_s[one.name]} | figures_of(one, turns_us[one.name]) for one in sides}
    return {
        "seconds": time.perf_counter() - start,
        "read_bytes": sides[0].work.read_bytes,
        "equal_tokens": {name: (own == first).float().mean().item() for name, own in tokens.items()},
        "loops": found,
    }


def _first_s(one: steps.Steps) -> float:
    start = time.perf_counter()
    mean_us(one, TIMED)
    return time.perf_counter() - start


def figures_of(one: steps.Steps, turns_us: list[float]) -> dict[str, Any]:
    """Profile a few steps, and return figures.

    turns_us: mean µs per step of each turn, measured without a profiler.

    Returns a dict:
    us, tok_s: of the median turn.
    turns_us: the argument.
    launches: launches per step; on a CPU, operators called from Python.
    busy: share of the step in which the device works.
    kernels: for an engine on a GPU, the figures of :func:`kernel_figures`.
    """
    us = median(turns_us)
    one.prepare()
    trace = record_trace(lambda: one.run(TRACED))
    rows = of_unprofiled(account(trace), us, trace.on_gpu)
    figures = {
        "us": us,
        "tok_s": one.work.batch / us * 1e6,
        "turns_us": turns_us,
        "launches": calls_in(trace.within(PROFILED_STEP)) / len(trace.ranges(PROFILED_STEP)),
        "busy": sum(row.share for row in rows if row.kind in WORKING),
    }
    if trace.on_gpu and isinstance(one, steps.EngineSteps):
        figures["kernels"] = kernel_figures(one, trace, rows)
    return figures


def kernel_figures(one: steps.EngineSteps, trace: Trace, rows: Sequence[Row]) -> dict[str, Any]:
    """Return figures of ``CAUSES`` as a kernel profiler has them, and ``peak_GB_s``, the fastest read.

    For each cause: µs, launches and necessary bytes per step, GB/s, its share of the peak, and of the longest
    kernel its name, µs and ``trace.LAUNCH``.
    """
    work, ceiling = one.work, measure_ceiling(one.work.device, one.work.dtype)
    per_byte = Ceiling(bytes_per_us=1.0, flops_per_us=math.inf)  # floors in µs are then numbers of bytes
    n_bytes = floors_us(one.model.config, work.batch, one.context, work.dtype.itemsize, per_byte)
    roles = roles_of(trace, trace.work, trace.ranges(PROFILED_STEP))
    figures: dict[str, Any] = {"peak_GB_s": ceiling.bytes_per_us / 1e3}
    for row in (row for row in rows if row.cause in CAUSES):
        events = (event for event, role in zip(trace.work, roles, strict=True) if role == row.cause)
        longest = max(events, key=lambda event: event.duration)
        rate = n_bytes[row.cause] / row.us
        figures[row.cause] = {
            "us": row.us,
            "launches": row.launches,
            "bytes": n_bytes[row.cause],
            "GB_s": rate / 1e3,
            "share_of_peak": rate / ceiling.bytes_per_us,
            "kernel": longest.name,
            "kernel_us": longest.duration,
            **longest.launch,
        }
    return figures


def measure(asked: Asked) -> Iterator[Record]:
    """Measure each dtype and batch size; print the result after each."""
    theirs, batches = cache(steps.load_transformers), asked.size.batches(*BATCHES)
    pairs = [(DTYPES[0], batches[0]), *((DTYPES[-1], batch) for batch in batches)]
    parts = {
        f"{dtype}, {batch}": partial(measure_part, asked, dtype, batch, theirs) for dtype, batch in pairs
    }

    def told(part: str, figures: dict[str, Any]) -> str:
        us = " · ".join(f"{name} {number(one['us'])}" for name, one in figures["loops"].items())
        return f"{part}, {figures['seconds']:.0f} s; µs per step: {us}"

    facts = {"model": asked.model, "load_format": asked.load_format, "size": asked.size.name}
    begun = asked.record(NAME, **facts, figures={"context": _context(asked)})
    yield from in_parts(asked, begun, parts, told, "parts", list(parts).index)


def _context(asked: Asked) -> int:
    return min(CONTEXT, asked.size.prompt)


def _refuse(asked: Asked) -> None:
    steps.check_sizes(max(BATCHES), _context(asked), asked.arch.n_positions)


EXPERIMENTS = [Experiment(NAME, measure, {"repeats": TURNS}, MODERN_MODEL, own_folder=True, refuse=_refuse)]
