"""Count what a stretch of the engine's work did, from a torch.profiler trace."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from rosellm.atomic import replacing

RUNTIME = ("cuda_runtime", "cuda_driver")
GPU_KINDS = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "memset"}


@dataclass(frozen=True)
class Event:
    """One entry of the trace; times in µs.

    kind: kernel, copy, memset, op, range, sync (the host waits for the device) or allocation. ``n_bytes``:
    moved or allocated. ``started``: when the host issued it, which for GPU work is the launch.
    """

    name: str
    kind: str
    start: float
    duration: float
    started: float
    n_bytes: int = 0
    on_gpu: bool = False


class Trace:
    """The events of one profiled call. Ranges are named by ``profile_range``."""

    def __init__(self, events: list[Event]) -> None:
        self.events = sorted(events, key=lambda e: e.start)

    def as_dict(self) -> dict[str, list[str]]:
        """Return a dict for a record: each name once, and a line per event, times relative to the first.

        Allocations are omitted.
        """
        events = [event for event in self.events if event.kind != "allocation"]
        names = sorted({event.name for event in events})
        place, first = {name: i for i, name in enumerate(names)}, events[0].start if events else 0.0
        return {
            "names": names,
            "events": [
                f"{place[e.name]} {e.kind} {e.start - first:.3f} {e.duration:.3f} {e.started - first:.3f} "
                f"{e.n_bytes}"
                for e in events
            ],
        }

    @classmethod
    def from_dict(cls, figures: Mapping[str, list[str]]) -> Trace:
        """Load a recorded trace."""
        events = []
        for line in figures["events"]:
            name, kind, start, duration, started, n_bytes = line.split()
            a, us, asked = map(float, (start, duration, started))
            on_gpu = kind in GPU_KINDS.values()
            events.append(Event(figures["names"][int(name)], kind, a, us, asked, int(n_bytes), on_gpu))
        return cls(events)

    def ranges(self, name: str | None = None) -> list[Event]:
        return [e for e in self.events if e.kind == "range" and name in (None, e.name)]

    def within(self, range_name: str) -> Trace:
        """Return only what the host issued inside ranges of this name."""
        spans = [(r.start, r.start + r.duration) for r in self.ranges(range_name)]
        starts = [start for start, _ in spans]

        def inside(event: Event) -> bool:
            i = bisect_right(starts, event.started) - 1
            return i >= 0 and event.started <= spans[i][1]

        return Trace([e for e in self.events if inside(e)])

    def of(self, kind: str, containing: str = "") -> list[Event]:
        return [e for e in self.events if e.kind == kind and containing in e.name]

    @property
    def kernels(self) -> int:
        """Number of kernels run on the GPU; on a CPU, of operators called from Python."""
        return len(self.of("kernel")) if self.on_gpu else len(self.of("op"))

    @property
    def on_gpu(self) -> bool:
        return any(e.on_gpu for e in self.events)

    @property
    def host_to_device(self) -> list[Event]:
        return self.of("copy", "HtoD")

    @property
    def allocations(self) -> int:
        """Number of tensor memory blocks taken from the allocator, host and device."""
        return len(self.of("allocation"))

    @property
    def allocated_bytes(self) -> int:
        return sum(e.n_bytes for e in self.of("allocation"))

    def gpu_time(self) -> float:
        """Return the sum of the durations of GPU kernels in µs."""
        return sum(e.duration for e in self.of("kernel"))


def record_trace(run: Callable[[], object]) -> Trace:
    """Profile one call of ``run``, after another that warms up the profiler."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler reports its own start and stop
    gc.collect()  # torch warns if memory allocated earlier is freed under the profiler
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=1),
            on_trace_ready=partial(_export, path=path),
            profile_memory=True,
            acc_events=True,
        ) as profiler:
            for _ in range(2):
                run()
                if on_gpu:
                    torch.cuda.synchronize()
                profiler.step()
        return read_trace(path)


def _export(profiler: profile, path: Path) -> None:
    with replacing(path) as unfinished:
        profiler.export_chrome_trace(str(unfinished))


def read_trace(path: Path) -> Trace:
    """Return the events of a Chrome trace written by torch.profiler."""
    raw = [e for e in json.loads(Path(path).read_text())["traceEvents"] if "ts" in e]
    launches = {
        e["args"]["correlation"]: e["ts"]
        for e in raw
        if e.get("cat") in RUNTIME and "correlation" in e.get("args", {})
    }
    events = [event for e in raw if (event := _event(e, launches)) is not None]
    return Trace(_outermost_ops(events))


def _event(e: dict, launches: dict[int, float]) -> Event | None:
    category, args, start = e.get("cat"), e.get("args", {}), float(e["ts"])
    duration = float(e.get("dur", 0))
    if category in GPU_KINDS:
        launched = launches.get(args.get("correlation"), start)
        return Event(
            e["name"], GPU_KINDS[category], start, duration, launched, int(args.get("bytes", 0)), True
        )
    if category == "user_annotation" and not e["name"].startswith("ProfilerStep"):
        return Event(e["name"], "range", start, duration, start)
    if category in RUNTIME and e["name"].endswith("Synchronize"):
        return Event(e["name"], "sync", start, duration, start)
    if category == "cpu_op":
        return Event(e["name"], "op", start, duration, start)
    if e["name"] == "[memory]" and args.get("Bytes", 0) > 0:
        return Event(
            "allocation", "allocation", start, 0.0, start, int(args["Bytes"]), args.get("Device Type") == 1
        )
    return None


def _outermost_ops(events: list[Event]) -> list[Event]:
    """Keep operators called from Python; drop those called by other operators."""
    kept, end = [], float("-inf")
    for event in sorted(events, key=lambda e: (e.start, -e.duration)):
        if event.kind == "op":
            if event.start < end:
                continue
            end = event.start + event.duration
        kept.append(event)
    return kept
