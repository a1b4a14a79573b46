"""Record a call with torch.profiler, and read from the trace what the host and the device did."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from rosellm.roseinfer.steps.step import STEP_RANGE

PROFILED_STEP = "rosellm.lab.ledger.step"
OUTSIDE, SYNC = "outside the step", "synchronisation"
HOST_NAMES = {PROFILED_STEP: OUTSIDE, STEP_RANGE: "between the step's parts"}

RUNTIME = ("cuda_runtime", "cuda_driver")
GPU_KINDS = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "memset"}
LAUNCH = ("grid", "block", "registers per thread", "shared memory", "est. achieved occupancy %")


@dataclass(frozen=True)
class Event:
    """One entry of the trace; times in µs.

    name: name of the kernel, operator or range.
    kind: kernel, copy, memset, op, range, sync (the host waits for the device) or allocation.
    start, duration: when it runs, and for how long.
    started: when the host issued it; for GPU work, the time of the launch.
    n_bytes: bytes copied or allocated, otherwise 0.
    launch: of a kernel, what the profiler tells of ``LAUNCH``; not stored in records.
    """

    name: str
    kind: str
    start: float
    duration: float
    started: float
    n_bytes: int = 0
    launch: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def end(self) -> float:
        return self.start + self.duration

    @property
    def on_gpu(self) -> bool:
        return self.kind in GPU_KINDS.values()


class Trace:
    """The events of one profiled call, sorted by start."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.events = sorted(events, key=lambda e: e.start)

    def as_dict(self, first: float | None = None) -> dict[str, list[str]]:
        """Return a dict for a record; :meth:`from_dict` reads it back.

        names: each name once.
        events: a line per event, with an index into ``names``, and times relative to ``first`` µs,
            by default the first event.

        Allocations are omitted.
        """
        events = [event for event in self.events if event.kind != "allocation"]
        names = sorted({event.name for event in events})
        place = {name: i for i, name in enumerate(names)}
        if first is None:
            first = events[0].start if events else 0.0
        lines = []
        for e in events:
            start, duration, started = (
                f"{us:.3f}" for us in (e.start - first, e.duration, e.started - first)
            )
            lines.append(f"{place[e.name]} {e.kind} {start} {duration} {started} {e.n_bytes}")
        return {"names": names, "events": lines}

    @classmethod
    def from_dict(cls, figures: Mapping[str, list[str]]) -> Trace:
        """Load a trace from the result of :meth:`as_dict`."""
        fields, names = map(str.split, figures["events"]), figures["names"]
        return cls(
            Event(names[int(name)], kind, float(start), float(duration), float(started), int(n_bytes))
            for name, kind, start, duration, started, n_bytes in fields
        )

    def of(self, kind: str, containing: str = "") -> list[Event]:
        return [e for e in self.events if e.kind == kind and containing in e.name]

    def ranges(self, name: str | None = None) -> list[Event]:
        return [e for e in self.of("range") if name in (None, e.name)]

    def within(self, range_name: str) -> Trace:
        """Return the trace of only those events that the host issued inside ranges of this name."""
        ranges = self.ranges(range_name)

        def inside(event: Event) -> bool:
            i = bisect_right(ranges, event.started, key=lambda one: one.start) - 1
            return i >= 0 and event.started <= ranges[i].end

        return Trace(filter(inside, self.events))

    def host_at(self, moments: Iterable[float]) -> list[str]:
        """Return what the host does at each moment.

        moments: times in µs.

        Returns the last part of the innermost range's name, ``SYNC`` while the host waits for the device, or
        ``OUTSIDE`` outside all ranges.
        """
        at = np.array(list(moments))
        names = np.full(len(at), OUTSIDE, dtype=object)
        for event in sorted(self.ranges() + self.of("sync"), key=lambda e: (e.start, -e.duration)):
            part = HOST_NAMES.get(event.name, event.name.rpartition(".")[2])
            names[(event.start <= at) & (at < event.end)] = SYNC if event.kind == "sync" else part
        return names.tolist()

    @property
    def on_gpu(self) -> bool:
        return any(e.on_gpu for e in self.events)

    @property
    def work(self) -> list[Event]:
        """Kernels, copies and memsets on the GPU; on a CPU, the operators called from Python."""
        return [e for e in self.events if e.on_gpu] or self.of("op")

    @property
    def kernels(self) -> int:
        """Number of kernels that ran on the GPU; on a CPU, number of operators called from Python."""
        return len(self.of("kernel" if self.on_gpu else "op"))

    @property
    def host_to_device(self) -> list[Event]:
        return self.of("copy", "HtoD")

    @property
    def allocations(self) -> int:
        """Number of memory blocks taken from the allocators of host and device."""
        return len(self.of("allocation"))

    @property
    def allocated_bytes(self) -> int:
        return sum(e.n_bytes for e in self.of("allocation"))

    def gpu_time(self) -> float:
        """Return the sum of the durations of GPU kernels in µs."""
        return sum(e.duration for e in self.of("kernel"))


def record_trace(run: Callable[[], object]) -> Trace:
    """Profile one call of ``run``, after a first call that warms up the profiler."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler reports its own start and stop
    gc.collect()  # torch warns if memory allocated earlier is freed under the profiler
    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
            schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
            profile_memory=True,
        ) as profiler:
            for _ in range(2):
                run()
                if on_gpu:
                    torch.cuda.synchronize()
                profiler.step()
        return read_trace(path)


def read_trace(path: Path) -> Trace:
    """Return the events of a Chrome trace written by torch.profiler."""
    raw = [e for e in json.loads(path.read_text())["traceEvents"] if "ts" in e]
    runtime = [e for e in raw if e.get("cat") in RUNTIME and "correlation" in e.get("args", {})]
    launches = {e["args"]["correlation"]: e["ts"] for e in runtime}
    events = filter(None, (_event(e, launches) for e in raw))
    return Trace(_outermost_ops(events))


def _event(e: dict[str, Any], launches: dict[int, float]) -> Event | None:
    name, category, args, start = e["name"], e.get("cat"), e.get("args", {}), float(e["ts"])
    started, n_bytes = start, 0
    if category in GPU_KINDS:
        kind, n_bytes = GPU_KINDS[category], int(args.get("bytes", 0))
        started = launches.get(args.get("correlation"), start)
    elif category == "user_annotation" and not name.startswith("ProfilerStep"):
        kind = "range"
    elif category in RUNTIME and name.endswith("Synchronize"):
        kind = "sync"
    elif category == "cpu_op":
        kind = "op"
    elif name == "[memory]" and args.get("Bytes", 0) > 0:
        name, kind, n_bytes = "allocation", "allocation", int(args["Bytes"])
    else:
        return None
    launch = {name: args[name] for name in LAUNCH if name in args}
    return Event(name, kind, start, float(e.get("dur", 0)), started, n_bytes, launch)


def _outermost_ops(events: Iterable[Event]) -> list[Event]:
    """Keep operators called from Python; drop those called by other operators."""
    kept, end = [], float("-inf")
    for event in sorted(events, key=lambda e: (e.start, -e.duration)):
        if event.kind == "op":
            if event.start < end:
                continue
            end = event.end
        kept.append(event)
    return kept
