"""The ladder's chart and its links."""

import pytest

from rosellm.lab.figures.charts import ChartError
from rosellm.lab.figures.ladder import ladder_chart
from rosellm.lab.records.notebooks import notebooks_of
from rosellm.lab.records.records import number
from rosellm.roseinfer.recipe import LADDER

VALUES = {rung: 1000.0 * (i + 1) for i, rung in enumerate(LADDER)}


def test_a_notebook_is_its_rungs_by_name_whatever_its_number_and_a_rung_may_have_none(tmp_path):
    for name in ("07_no_mask", "26_my_idea", "03_what_the_kernel_knows", "scratch_paged", "my_other"):
        (tmp_path / f"{name}.ipynb").touch()
    rungs = ["paged", "no_mask", "my_idea", "my_other"]
    assert notebooks_of(rungs, tmp_path) == {"no_mask": "03_what_the_kernel_knows", "my_idea": "26_my_idea"}


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


@pytest.mark.parametrize("values", [{"dense": None}, {"dense": 0.0}, {"dense": -1.0}])
def test_what_a_log_axis_cannot_show_is_refused(values):
    with pytest.raises(ChartError, match="log axis"):
        ladder_chart(values, "tok/s", title="t")
