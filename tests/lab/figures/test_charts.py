"""Charts: readable on any page and without colours, small, and with their numbers as text."""

import json
import re

import plotly.graph_objects as go
import pytest

from rosellm.lab.figures import charts
from rosellm.lab.figures.bars import before_after, waterfall
from rosellm.lab.figures.charts import PLOTLY, ChartError, bundle, show, text_table
from rosellm.lab.figures.ladder import ladder_chart
from rosellm.lab.figures.lines import step_lines
from rosellm.lab.figures.palette import CAUSES, PARTS, STYLES
from rosellm.lab.records.account import Row
from rosellm.roseinfer.recipe import LADDER
from tests.ledgers import ROWS, ledger_of

NAMES = ("before", "after")
LADDER_VALUES = {rung: 1000.0 * (i + 1) for i, rung in enumerate(LADDER)}


def test_every_part_of_the_step_and_every_cause_looks_different():
    assert not PARTS.keys() & CAUSES.keys()
    assert len(set(STYLES.values())) == len(STYLES)


def charts_of_every_kind() -> dict[str, go.Figure]:
    return {
        "before_after": before_after(["copies"], [12], [1], [""], NAMES, title="Fewer copies?"),
        "step_lines": step_lines(
            [16, 64, 960],
            {"dense": [1.9, 2.2, 10.1], "paged": [1.8, None, 2.6]},
            "cached tokens",
            "ms a step",
            title="How does a step grow?",
            log_x=True,
            log_y=True,
            floors={"bytes floor": 0.06},
        ),
        "waterfall": waterfall(ledger_of(ROWS, "a"), ledger_of(ROWS[:2], "b")),
        "ladder": ladder_chart(LADDER_VALUES, "tok/s", {"one": 1.0, "other": 2.0}, 1e6, title="t"),
    }


@pytest.mark.parametrize("kind", charts_of_every_kind())
def test_every_chart_is_small_on_a_clear_ground_and_comes_with_its_table(kind):
    shown = bundle(charts_of_every_kind()[kind])
    drawn = shown[PLOTLY]
    assert len(json.dumps(drawn)) < 9_000
    template = drawn["layout"]["template"]["layout"]
    assert template["paper_bgcolor"] == template["plot_bgcolor"] == "rgba(0,0,0,0)"
    assert drawn["layout"]["title"]["text"] and len(shown["text/plain"].splitlines()) >= 3


def test_show_displays_one_bundle_whose_text_is_the_charts_table(monkeypatch):
    displayed = []
    monkeypatch.setattr(charts, "display", lambda data, raw: displayed.append((data, raw)))
    show(before_after(["x"], [1 / 3], [2], ["ms"], NAMES, title="t"))
    ((first, raw),) = displayed
    assert raw and set(first) == {PLOTLY, "text/plain"} and "0.333" in first["text/plain"]
    assert first[PLOTLY]["data"][0]["x"] == [0.16667], "floats have five digits"


def test_a_table_in_html_has_the_alignment_of_the_text_and_figures_with_a_unit_stand_to_the_right():
    table = charts.Table(["rung", "gain", "field"], [["a<b", "+49.6 % ~", "x"], ["c", "–", "y"]], ["note"])
    sides = re.findall(r'<t[hd] style="text-align: (\w+)">', table._repr_html_())
    assert sides == ["left", "right", "left"] * 3
    assert "a&lt;b" in table._repr_html_() and table._repr_html_().endswith("<p>note</p>")
    assert repr(table).splitlines()[-2:] == ["c             –  y", "note"]


def test_a_log_axis_has_few_ticks_in_short_numbers():
    chart = step_lines([1, 2], {"a": [3, None], "b": [900, 2000]}, "x", "y", title="t", log_y=True)
    assert chart.layout.yaxis.ticktext == ("1", "3", "10", "30", "100", "300", "1k", "3k")


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ChartError, match="log axis needs values above 0"):
        step_lines([1], {"a": [0]}, "x", "y", title="t", log_y=True)
    with pytest.raises(ChartError, match="a row of 1 cells does not fit 2 headers"):
        text_table(["a", "b"], [["x"]])


def test_a_waterfall_goes_from_savings_to_costs_and_keeps_small_changes_together():
    after = {"GEMM": 40.0, "norm": 15.0, "head": 10.2, "between kernels": 14.9, "host: sample": 10.0}
    kinds = {"between kernels": "gaps", "host: sample": "host"}
    rows = [Row(cause, kinds.get(cause, "work"), us, us / 90.1, 1) for cause, us in after.items()]
    chart = waterfall(ledger_of(ROWS, "old"), ledger_of(rows, "new"))
    (bars,) = chart.data
    assert bars.y == ("<b>old</b>", "GEMM", "copies", "norm", "the rest", "<b>new</b>")
    assert bars.x == pytest.approx([100, -20, -5, 15, 0.1, 90.1])
    assert bars.measure == ("absolute", *["relative"] * 4, "total")
    assert bars.text == ("100", "−20.0", "−5.00", "+15.0", "+0.100", "90.1")
    assert chart.table.splitlines()[-1].split() == ["new", "90.1"]
