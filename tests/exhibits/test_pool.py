"""The picture of a pool of blocks over time."""

import json

import pytest

from rosellm.lab.figures.charts import PLOTLY, Chart, ChartError, bundle
from rosellm.roseinfer.exhibits import load_exhibit

pool_over_time = load_exhibit("pool").pool_over_time


def pool(steps: int = 12, **changes) -> Chart:
    """Two requests of which the younger is preempted twice at step 3, beside two cached blocks."""
    figures = {
        "requests": {"1": [2] * steps, "2": [2, 2, 3] + [0] * (steps - 3)},
        "n_blocks": 8,
        "marks": {"preempted": [(3, "request 2"), (3, "request 3")], "evicted": [], "finished": [(9, "1")]},
        "cached": [2] * steps,
        "lost": [0] * steps,
    }
    return pool_over_time(**(figures | changes), title="Who holds the blocks?")


def test_a_pool_is_stacked_from_the_oldest_request_to_the_prefix_cache():
    chart = pool()
    bands = [one for one in chart.data if one.stackgroup]
    assert [(one.name, one.y[2]) for one in bands] == [
        ("request 1", 2),
        ("request 2", 3),
        ("prefix cache", 2),
    ]
    assert len({one.fillcolor for one in bands}) == 3
    assert [(one.text, one.y) for one in chart.layout.annotations] == [("1", 1), ("2", 3)]
    assert chart.table.splitlines()[-1].split()[-2:] == ["7", "2"]


def test_what_happens_to_a_pool_is_marked_above_it_and_counted_where_it_happens_together():
    marks = {one.name: one for one in pool().data if one.mode == "markers+text"}
    assert set(marks) == {"preempted", "finished"}
    assert (marks["preempted"].x, marks["preempted"].text) == ((3,), ("2",))
    assert all(y > 8 for one in marks.values() for y in one.y)
    assert len({(one.marker.symbol, one.y[0]) for one in marks.values()}) == 2


def test_blocks_that_nobody_holds_are_drawn_as_such():
    assert [one.name for one in pool(lost=[1] * 12).data if one.stackgroup][-1] == "nobody"


def test_of_a_long_run_every_kth_step_of_a_pool_is_drawn_and_every_mark():
    chart = pool(1_000, marks={"finished": [(999, "1")]})
    assert all(len(one.y) == 200 and one.dx == 5 for one in chart.data if one.stackgroup)
    assert chart.data[-1].x == (999,) and len(json.dumps(bundle(chart)[PLOTLY])) < 8_000


@pytest.mark.parametrize(
    ("steps", "changes", "told"),
    [
        (12, {"cached": [1]}, "lengths differ: cached 1, lost 12, 1 12, 2 12"),
        (0, {"requests": {}, "lost": [], "cached": []}, "there is no step to draw"),
        (12, {"n_blocks": 6}, "7 blocks are held, of a pool of 6"),
    ],
)
def test_a_pool_that_does_not_fit_is_refused(steps, changes, told):
    with pytest.raises(ChartError, match=told):
        pool(steps, **changes)
