"""The timeline of two traces: every event once, nested ranges below each other, gaps kept, small."""

import json
from collections import Counter

import pytest
import torch
from torch.profiler import record_function

from rosellm.lab.figures.charts import PLOTLY, Chart, ChartError, bundle
from rosellm.lab.figures.timeline import MAX_RECTANGLES, timeline
from rosellm.lab.records.records import find
from rosellm.lab.records.trace import Event, Trace, record_trace
from rosellm.roseinfer.recipe import BEFORE
from rosellm.roseinfer.steps.step import STEP_RANGE

NAMES = ("cuda_graph", "resident")


def gpu_step(n_kernels: int, gap: float = 0.5, start: float = 1_000.0) -> Trace:
    """A step of 2 µs kernels, launched from the model's range, ``gap`` µs between them."""
    pitch = 2 + gap
    names = "nvjet_hsh_gemm", "paged_attention_kernel", "void at::native::layer_norm_<4>(int)"
    end = n_kernels * pitch
    events = [
        Event(STEP_RANGE, "range", start, end + 20, start),
        Event(f"{STEP_RANGE}.reserve", "range", start + 1, 4, start + 1),
        Event(f"{STEP_RANGE}.model", "range", start + 6, end, start + 6),
        Event(f"{STEP_RANGE}.kv_append", "range", start + 7, 3, start + 7),
        Event("cudaStreamSynchronize", "sync", start + end + 6, 9, start + end + 6),
        Event("Memcpy HtoD (Pinned -> Device)", "copy", start + 4, 1, start + 2, 64),
    ]
    events += [
        Event(names[i % 3], "kernel", start + 10 + i * pitch, 2, start + 10 + i) for i in range(n_kernels)
    ]
    return Trace(events)


def drawn(before: Trace, after: Trace) -> Chart:
    return timeline(dict(zip(NAMES, (before, after), strict=True)), "t")


def rectangles(chart) -> list[tuple[int, float, float, str]]:
    """Lane, start, end and label."""
    return sorted(
        (y, base, base + x, bar.name)
        for bar in chart.data
        for y, base, x in zip(bar.y, bar.base, bar.x, strict=True)
    )


def lanes(chart) -> dict[int, str]:
    return dict(zip(chart.layout.yaxis.tickvals, chart.layout.yaxis.ticktext, strict=True))


def test_a_small_step_is_drawn_event_by_event_and_each_trace_begins_at_zero():
    before, after = gpu_step(9), gpu_step(6, start=77.0)
    chart = drawn(before, after)
    found = rectangles(chart)
    assert len(found) == len(before.events) + len(after.events)
    kernels = [y for y, lane in lanes(chart).items() if lane.startswith("GPU kernels")]
    for y, n in zip(kernels, (9, 6), strict=True):
        starts = [start for lane, start, _, _ in found if lane == y]
        assert starts == pytest.approx([10 + 2.5 * i for i in range(n)])


@pytest.mark.parametrize("n_kernels", [400, 2_000])
def test_a_long_step_stays_small_and_says_from_where_on_it_merges(n_kernels):
    chart = drawn(gpu_step(n_kernels), gpu_step(n_kernels, gap=5.0))
    found = rectangles(chart)
    assert len(found) <= MAX_RECTANGLES
    assert len(json.dumps(bundle(chart)[PLOTLY])) < 60_000
    said = chart.table.splitlines()[-1]
    assert said.startswith(f"{2 * (n_kernels + 6):,} events in {len(found):,} rectangles: within ")
    assert chart.layout.xaxis.title.text == f"µs ({said})"


@pytest.mark.parametrize("after", sorted(find().figures("timelines")))
def test_a_recorded_step_has_lanes_as_wide_as_they_are_busy_and_a_style_for_each_entry(after):
    recorded = find().figures("timelines", after)
    chart = timeline({name: Trace.from_dict(recorded[name]) for name in (BEFORE[after], after)}, "t")
    styles = {bar.name: (bar.marker.color, bar.marker.pattern.shape) for bar in chart.data}
    assert len(styles) == len(chart.data) == len(set(styles.values())) > 5
    widths = Counter()
    for y, start, end, _ in rectangles(chart):
        widths[y] += end - start
    shares = [line.split()[-2:] for line in chart.table.splitlines()[2:-1]]
    told = [float(busy.replace(",", "")) for busy, _ in shares]
    assert list(widths.values()) == pytest.approx(told, rel=0.01)


def test_a_gap_that_can_be_seen_survives_merging():
    early, late = gpu_step(600), gpu_step(600, start=1_000.0 + 4_000)
    kernels = [*early.of("kernel"), *late.of("kernel")]
    chart = drawn(Trace(kernels), Trace(kernels))
    one = [(start, end) for y, start, end, _ in rectangles(chart) if y == 1]
    assert not [pair for pair in one if pair[0] < 3_000 < pair[1]]


def test_on_a_cpu_operators_are_drawn_below_the_ranges():
    def step() -> None:
        with record_function(STEP_RANGE), record_function(f"{STEP_RANGE}.model"):
            torch.ones(8, 8) @ torch.ones(8, 8)

    trace = record_trace(step)
    chart = drawn(trace, trace)
    first, second, third = list(lanes(chart).values())[:3]
    assert (first, second) == ("ranges", "ranges, depth 2") and third.startswith("operators, ")
    assert {"GEMM", "model", "the step"} <= {bar.name for bar in chart.data}


def test_a_trace_of_nothing_is_refused():
    with pytest.raises(ChartError, match="the trace of resident holds neither"):
        drawn(gpu_step(3), Trace([]))
