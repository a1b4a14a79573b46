"""Profile decode steps on both ranks of a tensor-parallel engine: their work on one clock, and their ledgers.

A step that sums over ranks ends no earlier than the slower rank's. Beside the time by cause, a ledger
therefore tells for how long each rank waits for the other one, and how far apart they start. The profilers of
one host share its clock, but a GPU's times are translated to it. Since an all-reduce ends on both ranks as
soon as the later one has sent, the median difference between its ends is taken for the clocks' difference.
The record is MODEL/tensor_parallel_timeline-WORKLOAD.json.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median, median_low
from time import sleep
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rosellm.lab.records.account import WORKING, account, step_windows
from rosellm.lab.records.bench import Bench, make_prompts
from rosellm.lab.records.experiment import Asked, Experiment, Record
from rosellm.lab.records.ledger import WARM_UP_STEPS
from rosellm.lab.records.records import number
from rosellm.lab.records.roles import Marked
from rosellm.lab.records.step_time import step_shape
from rosellm.lab.records.trace import PROFILED_STEP, Event, Trace, read_trace
from rosellm.lab.records.two_gpus import TENSOR_PARALLEL, load_of, refuse
from rosellm.models.families.table import write_arch
from rosellm.roseinfer.recipe import Recipe
from rosellm.roseinfer.steps.resident import ResidentStep
from rosellm.roseinfer.steps.worker import Worker
from rosellm.roseinfer.tensor_parallel import load_ranks

NAME = "tensor_parallel_timeline"
ALL_REDUCE, ALL_GATHER, IDLE = "all-reduce", "all-gather", "idle"
COLLECTIVES = {  # parts of names of kernels, and of a CPU's ranges
    ALL_REDUCE: ("_sum_add_norm_kernel", "AllReduce", "gloo:all_reduce"),
    ALL_GATHER: ("AllGather", "gloo:all_gather"),
}
STEPS = 16  # profiled, and unprofiled before and after
ROOM = 2 * WARM_UP_STEPS + 3 * STEPS + 1
LOOK_S = 0.01


class ProfiledDecode:
    """A worker's ``decode`` in a process that is profiled; each call is inside a ``PROFILED_STEP`` range."""

    def __init__(self, worker: Worker) -> None:
        self._decode = worker.decode
        on_gpu = [ProfilerActivity.CUDA] * (worker.device.type == "cuda")
        self.profiler = profile(activities=[ProfilerActivity.CPU, *on_gpu])
        self.profiler.start()

    def __call__(self, *arguments: Any) -> None:
        with record_function(PROFILED_STEP):
            self._decode(*arguments)


def begin_profile(worker: Worker) -> None:
    """Start to profile the decode steps of this rank; called on every rank."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler reports its own start and stop
    vars(worker)["decode"] = ProfiledDecode(worker)


def end_profile(worker: Worker, folder: str) -> None:
    """Write what this rank has profiled to ``folder/PROCESS.json``."""
    if worker.device.type == "cuda":
        torch.cuda.synchronize(worker.device)
    profiler, begun = vars(worker).pop("decode").profiler, Path(folder) / f"{os.getpid()}.part"
    profiler.stop()
    profiler.export_chrome_trace(str(begun))
    begun.rename(begun.with_suffix(".json"))


def profile_ranks(bench: Bench, steps: int) -> list[Trace]:
    """Decode steps, launched ahead of their results, and return each rank's trace of the last ``steps``.

    Steps before them, in which the profilers start, are not returned.
    """
    group, step = bench.engine.group, bench.engine.step
    assert isinstance(step, ResidentStep)
    call = group.on_all(step.worker.call)
    with tempfile.TemporaryDirectory() as folder:
        call("apply", begin_profile)
        bench.run_ahead(WARM_UP_STEPS + steps)
        call("apply", end_profile, folder)
        while len(paths := list(Path(folder).glob("*.json"))) < group.part.size:
            group.check()
            sleep(LOOK_S)
        paths.sort(key=lambda path: path.stem != str(os.getpid()))  # rank 0 is this process
        return [_last(read_trace(path), steps) for path in paths]


def _last(trace: Trace, steps: int) -> Trace:
    start = trace.ranges(PROFILED_STEP)[-steps].start
    return Trace(e for e in trace.events if e.started >= start)


def collective(event: Event) -> str | None:
    """Return which collective an event is, or None."""
    return next((kind for kind, names in COLLECTIVES.items() if any(n in event.name for n in names)), None)


def marks_of(trace: Trace) -> tuple[Marked, ...]:
    """Return the marks with which a ledger or timeline lists a trace's collectives as causes of their own."""
    roles = {ALL_REDUCE: "norm", ALL_GATHER: "sampling"}
    named = {kind: frozenset(e.name for e in trace.events if collective(e) == kind) for kind in roles}
    return tuple(Marked(kind, role, named[kind]) for kind, role in roles.items())


def ledgers_of(trace: Trace) -> list[dict[str, float]]:
    """Return the µs by cause of each profiled step but the last, whose start ends the one before it."""
    found = []
    for step, following in pairwise(trace.ranges(PROFILED_STEP)):
        both = Trace(e for e in trace.events if step.start <= e.started <= following.end)
        us: dict[str, float] = defaultdict(float)
        for row in account(both, marked=marks_of(trace)):
            on_cpu = collective(Event(row.cause, "", 0, 0, 0))  # a range in which the host sums
            us[row.cause if row.kind in WORKING else on_cpu or IDLE] += row.us
        found.append(dict(us))
    return found


def figures_of(traces: list[Trace]) -> dict[str, Any]:
    """Return the figures of a record from the ranks' traces of the same steps.

    starts_us, ledgers: rank → step → its start on the profilers' clock, and µs by cause.
    step, traces: the step of median length, and rank → what ran in it; times as in ``starts_us``.
    """
    windows = [step_windows(trace) for trace in traces]
    first = min(start for (start, _), *_ in windows)
    lengths = [end - start for start, end in windows[0]]
    step = lengths.index(median_low(lengths))
    return {
        "starts_us": [[round(start - first, 3) for start, _ in own] for own in windows],
        "ledgers": [ledgers_of(trace) for trace in traces],
        "step": step,
        "traces": [_ran(one, *own[step]).as_dict(first) for one, own in zip(traces, windows, strict=True)],
    }


def _ran(trace: Trace, start: float, end: float) -> Trace:
    kinds = ("kernel", "copy", "memset") if trace.on_gpu else ("op", "range")
    return Trace(e for e in trace.events if start <= e.start < end and e.kind in kinds)


@dataclass(frozen=True)
class RankSteps:
    """The recorded steps of two ranks, on the clock of rank 0.

    ledgers: rank → µs by cause of the drawn step.
    traces: rank → what ran in the drawn step.
    skews_us: for each step, by how much rank 1 starts it after rank 0.
    clocks_us: by how much the clock of rank 1 was ahead.
    """

    ledgers: list[dict[str, float]]
    traces: list[Trace]
    skews_us: list[float]
    clocks_us: float

    @classmethod
    def of(cls, figures: Mapping[str, Any]) -> RankSteps:
        """Read the figures of a record."""
        traces = [Trace.from_dict(one) for one in figures["traces"]]
        pairs = zip(*map(all_reduces, traces), strict=True)
        clocks = median(other.end - one.end for one, other in pairs)
        moved = [replace(e, start=e.start - clocks, started=e.started - clocks) for e in traces[1].events]
        skews = [other - one - clocks for one, other in zip(*figures["starts_us"], strict=True)]
        ledgers = [own[figures["step"]] for own in figures["ledgers"]]
        return cls(ledgers, [traces[0], Trace(moved)], skews, clocks)

    @property
    def waits_us(self) -> list[float]:
        """For each rank, the µs of its all-reduces in which it was ready and the other rank was not."""
        ready = [_ready(trace) for trace in self.traces]
        late = [other - one for one, other in zip(*ready, strict=True)]
        return [sum(max(0.0, sign * us) for us in late) for sign in (1, -1)]


def all_reduces(trace: Trace) -> list[Event]:
    return [e for e in trace.events if collective(e) == ALL_REDUCE]


def _ready(trace: Trace) -> list[float]:
    """Return, for each all-reduce, when the work before it has ended."""
    events = [e for e in trace.events if e.kind != "range" or collective(e)]
    ends = accumulate((e.end for e in events), max, initial=float("-inf"))
    return [end for e, end in zip(events, ends, strict=False) if collective(e) == ALL_REDUCE]


def measure(asked: Asked, workload: str) -> Iterator[Record]:
    """Profile steps halfway through a workload's output on two ranks; yield the record, and print it."""
    batch, context = step_shape(asked.workload(workload))
    loaded = load_ranks(2, load_of(asked), asked.best)
    prompts = make_prompts(batch, max(1, context - ROOM // 2), asked.arch.vocab_size)
    bench = Bench(loaded.model, asked.best, prompts, ROOM + 1, build=loaded.build)
    bench.run_ahead(WARM_UP_STEPS)
    before = bench.run_ahead(STEPS)
    traces = profile_ranks(bench, STEPS + 1)
    unprofiled = [seconds * 1e6 for seconds in (*before, *bench.run_ahead(STEPS))]
    assert isinstance(bench.engine.recipe, Recipe)
    figures = {"batch": batch, "context": context, "all_reduce": bench.engine.recipe.all_reduce}
    whole = figures | {"unprofiled_us": unprofiled} | figures_of(traces)
    facts = {"model": asked.model, "model_shape": write_arch(asked.arch), "workload": workload}
    yield asked.record(NAME, **facts, figures=whole)
    print(told(workload, whole), flush=True)


def told(workload: str, figures: Mapping[str, Any]) -> str:
    """Describe the ranks' ledgers in one line each, and the starts in another."""
    steps, unprofiled = RankSteps.of(figures), number(median(figures["unprofiled_us"]))
    lines = [f"{NAME} {workload}: not profiled {unprofiled} µs a step; clocks {steps.clocks_us:+.1f} µs"]
    for rank, (us, waits) in enumerate(zip(steps.ledgers, steps.waits_us, strict=True)):
        causes = ", ".join(f"{cause} {number(one)}" for cause, one in sorted(us.items(), key=lambda x: -x[1]))
        lines.append(f"rank {rank}: {number(sum(us.values()))} µs: {causes}; waits {number(waits)}")
    least, most = min(steps.skews_us), max(steps.skews_us)
    return "\n".join([*lines, f"rank 1 starts {least:+.1f} to {most:+.1f} µs after rank 0"])


EXPERIMENTS = [
    Experiment(
        f"{NAME}-{name}",
        partial(measure, workload=name),
        own_folder=True,
        workloads=[name],
        refuse=partial(refuse, kind=TENSOR_PARALLEL),
    )
    for name in ("D1", "D64", "L8K")
]
