"""A process's first seconds as bars."""

import pytest

from rosellm.roseinfer.exhibits import load_exhibit

first_runs_chart = load_exhibit("first_runs").first_runs_chart


PARTS = {"import": 2.0, "load": 1.0, "build": 0.5, "warm_up": 3.0}
RUNS = [{"first_token_s": 0.25, "seconds": 1.0}, {"seconds": 0.75}, {"seconds": 0.5}]


def test_the_bars_of_a_process_add_up_to_all_its_seconds_in_order():
    cold = {"parts_s": PARTS | {"warm_up": 0.0}, "runs": RUNS}
    chart = first_runs_chart({"warm": {"parts_s": PARTS, "runs": RUNS}, "cold": cold}, "title")
    assert [bar.name for bar in chart.data][3:5] == ["warm up", "until the first token"]
    totals = [sum(bar.x[i] for bar in chart.data) for i in range(2)]
    assert totals == pytest.approx([8.75, 5.75])
    assert [bar.x[0] for bar in chart.data][4:] == [0.25, 0.75, 0.75, 0.5]
    assert "rest of run 1" in chart.table and chart.layout.barmode == "stack"
