"""Steps of two ranks on one clock: on processes of a CPU, and made-up ones of two GPUs."""

from __future__ import annotations

import pytest

from rosellm.lab.records.rank_steps import STEPS, RankSteps, figures_of
from rosellm.lab.records.trace import PROFILED_STEP, Event, Trace
from rosellm.roseinfer.exhibits import load_exhibit
from tests.lab.measuring import measured


def made_up(late_us: float, gemm_us: float, clock_us: float) -> Trace:
    """Three steps, 30 µs apart, whose sum ends when that of 19 µs into rank 0's step does."""
    events = []
    for begin in (0.0, 30.0, 60.0):
        launched, start = begin - 20 + clock_us, begin + late_us + clock_us
        summed, ended = start + gemm_us, begin + 19 + clock_us
        events += [
            Event(PROFILED_STEP, "range", launched - 1, 2, launched - 1),
            Event("nvjet_up", "kernel", start, gemm_us, launched),
            Event("_sum_add_norm_kernel", "kernel", summed, ended - summed, launched),
            Event("nvjet_head", "kernel", ended, 5, launched),
        ]
    return Trace(events)


@pytest.fixture
def figures() -> dict:
    return figures_of([made_up(0, 10, 0), made_up(3, 14, 400)]) | {"unprofiled_us": [29.0]}


def test_a_rank_that_is_ready_first_waits_whatever_its_clock_says(figures) -> None:
    steps = RankSteps.of(figures)
    assert steps.clocks_us == 400 and steps.skews_us == [3, 3] and steps.waits_us == [7, 0]
    assert steps.ledgers == [
        {"GEMM": 10, "all-reduce": 9, "head": 5, "idle": 6},
        {"GEMM": 14, "all-reduce": 2, "head": 5, "idle": 9},
    ]


def test_the_chart_has_both_ranks_on_one_axis_and_the_table_their_ledgers(figures) -> None:
    ranks = load_exhibit("ranks_over_time")
    chart = ranks.ranks_over_time(figures, "t", 1)
    starts = {bar.name: sorted(bar.base.tolist()) for bar in chart.data}
    assert starts == {"GEMM": [0, 3], "all-reduce": [10, 17], "head": [19, 19]}
    rows = {name: values for _, name, *values in ranks.ledger_rows("D1", figures)}
    assert rows["all-reduce"] == [9, 2] and rows["the step, profiled"] == [30, 30]
    assert rows["all-reduces: waiting for the other rank"] == [7, 0]


@pytest.mark.slow
def test_both_ranks_of_a_cpu_are_recorded_with_raw_values(tmp_path) -> None:
    figures = measured(tmp_path, "tensor_parallel_timeline-D64", "--model=rose-tiny")["figures"]
    assert len(figures["unprofiled_us"]) == 2 * STEPS
    assert all(len(own) == STEPS for own in figures["starts_us"] + figures["ledgers"])
    steps = RankSteps.of(figures)
    for ledger, trace in zip(steps.ledgers, steps.traces, strict=True):
        assert min(ledger[cause] for cause in ("GEMM", "attention", "all-reduce", "idle")) > 0
        assert sum(e.name == "gloo:all_reduce" for e in trace.events) == 2 * 5  # per layer
    assert min(steps.waits_us) >= 0 < max(steps.waits_us)
