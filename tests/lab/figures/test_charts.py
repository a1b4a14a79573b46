"""Charts: readable on any page and without colours, small, and with their numbers as text."""

import json
import re
from itertools import combinations

import numpy as np
import plotly.graph_objects as go
import pytest

from rosellm.lab.figures import charts
from rosellm.lab.figures.bars import before_after, waterfall
from rosellm.lab.figures.charts import PLOTLY, ChartError, bundle, show, text_table
from rosellm.lab.figures.lines import step_lines
from rosellm.lab.figures.palette import CAUSES, PALETTE, PARTS, STYLES, TEXT
from rosellm.lab.figures.timeline import timeline
from rosellm.lab.records.account import Row
from rosellm.lab.records.trace import Event, Trace
from rosellm.roseinfer.steps.step import STEP_RANGE
from tests.ledgers import ROWS, ledger_of

# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
SIGHT = {
    "normal": np.eye(3),
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
TO_LMS = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
TO_LAB = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]

NAMES = ("before", "after")


def linear(colour: str) -> np.ndarray:
    srgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def oklab(colour: str, sight: str) -> np.ndarray:
    seen = np.clip(np.array(SIGHT[sight]) @ linear(colour), 0, 1)
    return np.array(TO_LAB) @ np.cbrt(np.array(TO_LMS) @ seen)


def contrast(one: str, other: str) -> float:
    low, high = sorted(linear(c) @ [0.2126, 0.7152, 0.0722] for c in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("sight", SIGHT)
def test_the_palette_stays_apart_for_every_kind_of_sight(sight):
    distances = [np.linalg.norm(oklab(a, sight) - oklab(b, sight)) for a, b in combinations(PALETTE, 2)]
    assert min(distances) > 0.085


@pytest.mark.parametrize("page", ["#ffffff", "#111111"])
def test_the_palette_and_the_text_read_on_light_and_dark_pages(page):
    assert min(contrast(colour, page) for colour in PALETTE) > 2.1
    assert contrast(TEXT, page) > 4


def test_every_part_of_the_step_and_every_cause_looks_different():
    assert not PARTS.keys() & CAUSES.keys()
    assert len(set(STYLES.values())) == len(STYLES)


def gpu_trace(n_kernels: int) -> Trace:
    events = [Event(STEP_RANGE, "range", 0, 5_000, 0)]
    events += [Event(f"{STEP_RANGE}.{part}", "range", 500 * i, 490, 500 * i) for i, part in enumerate(PARTS)]
    names = "gemm_kernel<float, 128>", "_paged_attention_decode_kernel", "elementwise_kernel"
    step = 5_000 / n_kernels
    return Trace(
        events
        + [Event(names[i % 3], "kernel", 40 + i * step, step / 3, i * step) for i in range(n_kernels)]
        + [Event("Memcpy HtoD", "copy", 600, 9, 590, 4096)]
    )


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
        "timeline": timeline({"a": gpu_trace(300), "b": gpu_trace(60)}, "Who waits?"),
    }


@pytest.mark.parametrize("kind", charts_of_every_kind())
def test_every_chart_is_small_on_a_clear_ground_and_comes_with_its_table(kind):
    shown = bundle(charts_of_every_kind()[kind])
    drawn = shown[PLOTLY]
    assert len(json.dumps(drawn)) < (56_000 if kind == "timeline" else 8_000)
    template = drawn["layout"]["template"]["layout"]
    assert template["paper_bgcolor"] == template["plot_bgcolor"] == "rgba(0,0,0,0)"
    assert drawn["layout"]["title"]["text"] and len(shown["text/plain"].splitlines()) >= 3


def test_show_displays_one_bundle_whose_text_is_the_table_given(monkeypatch):
    displayed = []
    monkeypatch.setattr(charts, "display", lambda data, raw: displayed.append((data, raw)))
    show(before_after(["x"], [1 / 3], [2], ["ms"], NAMES, title="t"), "my table")
    show(before_after(["x"], [1 / 3], [2], ["ms"], NAMES, title="t"))
    (first, raw), (second, _) = displayed
    assert raw and set(first) == {PLOTLY, "text/plain"}
    assert first["text/plain"] == "my table" and "0.333" in second["text/plain"]
    assert first[PLOTLY]["data"][0]["x"] == [0.16667], "floats have five digits"


def test_a_table_aligns_texts_left_and_numbers_right():
    table = text_table(["rung", "tok/s", "equal"], [["dense", 9876.543, True], ["no_mask", 12, None]])
    assert table.splitlines() == [
        "rung     tok/s  equal",
        "───────  ─────  ─────",
        "dense    9,877  yes",
        "no_mask     12  –",
    ]


def test_a_table_in_html_has_the_alignment_of_the_text_and_figures_with_a_unit_stand_to_the_right():
    table = charts.Table(["rung", "gain", "field"], [["a<b", "+49.6 % ~", "x"], ["c", "–", "y"]], ["note"])
    sides = re.findall(r'<t[hd] style="text-align: (\w+)">', table._repr_html_())
    assert sides == ["left", "right", "left"] * 3
    assert "a&lt;b" in table._repr_html_() and table._repr_html_().endswith("<p>note</p>")
    assert repr(table).splitlines()[-2:] == ["c             –  y", "note"]


def test_a_table_with_a_row_too_short_is_refused():
    with pytest.raises(ChartError, match="a row of 1 cells does not fit 2 headers"):
        text_table(["a", "b"], [["x"]])


@pytest.mark.parametrize(
    "before, after, told",
    [
        (12, 1, "÷ 12"),
        (1, 2.72, "× 2.72"),
        (310, 298, "−3.9 %"),
        (5, 5, "same"),
        (5, 0, "none"),
        (0, 5, "new"),
    ],
)
def test_a_change_is_told_as_a_reader_would(before, after, told):
    chart = before_after(["x"], [before], [after], ["ms"], NAMES, title="t")
    assert chart.data[1].text[0].endswith(f"<b>{told}</b>")
    assert chart.table.splitlines()[-1].endswith(told)


def test_each_pair_has_its_own_scale():
    chart = before_after(["copies", "step"], [12, 8.0], [6, 4.0], ["", "ms"], NAMES, title="t")
    assert chart.data[0].x == (1, 1) and chart.data[1].x == (0.5, 0.5)
    assert chart.data[0].text == ("12", "8.00 ms") and not chart.layout.xaxis.visible


def test_floors_are_dashed_and_every_line_is_named():
    chart = charts_of_every_kind()["step_lines"]
    assert [(line.name, line.line.dash) for line in chart.data] == [
        ("dense", None),
        ("paged", None),
        ("bytes floor", "dash"),
    ]
    assert chart.data[2].y == (0.06,) * 3 and chart.layout.showlegend


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


def test_figures_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="shorter|longer"):
        before_after(["x"], [1, 2], [1], ["ms"], NAMES, title="t")
    with pytest.raises(ValueError, match="shorter|longer"):
        step_lines([1, 2], {"a": [1]}, "x", "y", title="t")
    with pytest.raises(ChartError, match="log axis needs values above 0"):
        step_lines([1], {"a": [0]}, "x", "y", title="t", log_y=True)
