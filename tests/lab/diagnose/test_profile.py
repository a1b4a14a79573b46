"""What a trace of a GPU's steps is counted as; and of a CPU's."""

import pytest

from rosellm.lab.diagnose.profile import calls_in, copies_of, share_of
from rosellm.lab.records.trace import PROFILED_STEP, Event, Trace


def kernel(name: str, start: float, duration: float, launched: float) -> Event:
    return Event(name, "kernel", start, duration, launched)


def on_host(name: str, start: float, end: float, kind: str = "op") -> Event:
    return Event(name, kind, start, end - start, start)


def steps(n: int) -> list[Event]:
    return [on_host(PROFILED_STEP, i * 100, i * 100 + 90, "range") for i in range(n)]


def gpu_step(t: float) -> list[Event]:
    """`cat` launches a kernel of 20 µs that runs when the operator has returned, `linear` one of 30."""
    return [
        on_host("aten::cat", t + 5, t + 8),
        on_host("aten::linear", t + 10, t + 14),
        kernel("CatArrayBatchedCopy", t + 20, 20, launched=t + 6),
        kernel("nvjet", t + 40, 30, launched=t + 12),
    ]


def test_on_a_gpu_copies_are_the_kernels_that_copying_operators_launched():
    trace = Trace(steps(3) + [event for t in (0, 100, 200) for event in gpu_step(t)])
    copies, most = copies_of(trace)
    assert [event.name for event in copies] == ["CatArrayBatchedCopy"] * 3 and most == "cat"
    assert share_of(copies, trace, step_us=100.0) == pytest.approx(0.2)
    graph = [kernel(f"k{i}", 20 + 2 * i, 2, launched=10) for i in range(9)]
    assert calls_in(trace) == 6 and calls_in(Trace([*steps(1), *graph])) == 1  # a graph is one launch
