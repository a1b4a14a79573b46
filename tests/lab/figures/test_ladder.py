"""The ladder's chart and its links."""

import math

import pytest

from rosellm.lab.figures.charts import ChartError
from rosellm.lab.figures.ladder import ladder_chart
from rosellm.lab.records.notebooks import notebooks_of
from rosellm.lab.records.records import number
from rosellm.roseinfer.recipe import LADDER, SIDE_BRANCHES

VALUES = {rung: 1000.0 * (i + 1) for i, rung in enumerate(LADDER)}


def test_a_notebook_is_its_rungs_by_name_whatever_its_number_and_a_rung_may_have_none(tmp_path):
    for name in ("07_no_mask", "26_my_idea", "03_mask_removal", "scratch_paged", "my_other"):
        (tmp_path / f"{name}.ipynb").touch()
    rungs = ["paged", "no_mask", "my_idea", "my_other"]
    assert notebooks_of(rungs, tmp_path) == {"no_mask": "03_mask_removal", "my_idea": "26_my_idea"}


def test_each_rung_links_to_its_notebook():
    chart = ladder_chart(VALUES, "tok/s", title="t")
    assert chart.layout.yaxis.ticktext[:2] == ("dense", '<a href="01_paged_attention.ipynb">paged</a>')
    assert len(chart.layout.yaxis.ticktext) == len(LADDER)
    assert chart.layout.yaxis.fixedrange and chart.layout.xaxis.fixedrange  # nothing lies on the links


def test_a_column_for_the_speed_and_one_for_the_share_of_the_floor():
    chart = ladder_chart(VALUES, "tok/s", {"vLLM": 4000.0}, 50_000.0, title="t")
    speed, told, share = chart.data
    assert list(speed.x) == list(VALUES.values())
    assert list(share.x) == pytest.approx([value / 500 for value in VALUES.values()])
    assert told.text == tuple(f"\u2002{number(value)}" for value in VALUES.values())
    assert len(ladder_chart(VALUES, "tok/s", title="t").data) == 2
    assert "2.00" in chart.table.splitlines()[2]
    assert chart.table.splitlines()[-2].split()[:2] == ["bytes", "floor"]


def test_rivals_and_floor_are_lines_through_all_rungs_and_no_line_crosses_a_name():
    others = {"slow": 500.0, "fast": 9000.0, "middle": 2000.0}
    chart = ladder_chart(VALUES, "tok/s", others, 90_000.0, title="t")
    lines = sorted(chart.layout.shapes, key=lambda line: line.x0)
    assert [line.x0 for line in lines] == [500, 2000, 9000, 90_000]
    assert all(line.y1 > len(LADDER) - 1 for line in lines)
    assert [line.y0 for line in lines] == sorted(line.y0 for line in lines)  # higher up, the farther left
    names = [n.text for n in chart.layout.annotations if n.x in map(math.log10, others.values())]
    assert sorted(names) == ["fast 9.00k", "middle 2.00k", "slow 500"]


def test_side_branches_are_hollow_and_their_shares_hatched():
    dots, _, bars = ladder_chart(VALUES, "tok/s", floor=50_000.0, title="t").data
    hollow = [
        rung for rung, symbol in zip(LADDER, dots.marker.symbol, strict=True) if symbol == "circle-open"
    ]
    hatched = [rung for rung, shape in zip(LADDER, bars.marker.pattern.shape, strict=True) if shape == "/"]
    assert hollow == hatched == [rung for rung in LADDER if rung in SIDE_BRANCHES]
    assert {"autotune", "persistent_kernel"} <= set(hollow)


@pytest.mark.parametrize("values", [{"dense": None}, {"dense": 0.0}, {"dense": -1.0}])
def test_what_a_log_axis_cannot_show_is_refused(values):
    with pytest.raises(ChartError, match="log axis"):
        ladder_chart(values, "tok/s", title="t")
