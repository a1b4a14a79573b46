"""Controls and the figures that they redraw, in a real kernel without a page."""

from ast import literal_eval

import nbformat
import pytest
from ipywidgets import SelectionSlider
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from rosellm.lab.figures.charts import PLOTLY
from rosellm.lab.figures.widgets import FRAMES, WIDGET, Control, ControlError, _difference, merged
from rosellm.lab.running.gallery import without_widgets
from rosellm.lab.running.notebook_workers import kernel_environment

SET_UP = """
import sys; sys.path.insert(0, {root!r})
import ipywidgets, plotly.graph_objects as go
from rosellm.lab.figures.charts import show, text_table
from rosellm.lab.figures.widgets import Control, explore
made = []
ipywidgets.Widget.on_widget_constructed(made.append)

def draw(batch, kind):
    if kind == "broken":
        raise ValueError(f"no {{batch}}")
    show(go.Figure(go.Bar(x=["a"], y=[batch])), text_table(["kind", "batch"], [[kind, batch]]))
"""
EXPLORE = """
made.clear()
sizes, kinds = Control("batch, sequences", [1, 8, 64], first=8), Control("kind", ["paged", "broken"])
explore(draw, batch=sizes, kind=kinds)
kinds = (ipywidgets.SelectionSlider, ipywidgets.Output)
batch, kind, live = [one for one in made if isinstance(one, kinds)]
"""
REFUSED = """
for draw in (lambda on: None, lambda on: [show(go.Figure()), show(go.Figure())]):
    try: explore(draw, on=Control("on", [1]))
    except ValueError as error: print(error)
"""
CELLS = {
    "untouched": EXPLORE,
    "moved": EXPLORE,
    "live": "batch.value = 64; print(live.outputs[0]['data'])",
    "error": "kind.value = 'broken'; print(live.outputs[0])",
    "single": "explore(lambda batch: draw(batch, 'paged'), batch=sizes)",
    "refused": REFUSED,
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory, pytestconfig) -> dict[str, list[nbformat.NotebookNode]]:
    """Each cell's outputs after the whole notebook has run in a real kernel."""
    sources = [SET_UP.format(root=str(pytestconfig.rootpath)), *CELLS.values()]
    notebook = new_notebook(cells=[new_code_cell(source) for source in sources])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in kernel_environment(tmp_path_factory.mktemp("kernels")).items():
            patch.setenv(name, value)
        NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    return dict(zip(CELLS, (cell.outputs for cell in notebook.cells[1:]), strict=True))


@pytest.mark.slow
def test_the_first_drawing_is_an_ordinary_output_beside_a_view_that_is_all_widget(outputs):
    view, picture = outputs["untouched"]
    assert set(view.data) == {WIDGET}
    assert picture.data[PLOTLY]["data"][0]["y"] == [8]
    assert picture.data["text/plain"].splitlines()[-1].split() == ["paged", "8"]


def test_a_control_redraws_in_the_output_widget_which_takes_the_place_of_the_first_drawing(outputs):
    redrawn = literal_eval(outputs["live"][0].text)
    assert redrawn[PLOTLY]["data"][0]["y"] == [64]
    assert redrawn["text/plain"].splitlines()[-1].split() == ["paged", "64"]
    assert outputs["moved"][1].data == {"text/html": ""}


def test_an_error_while_redrawing_is_shown_as_a_cell_would_show_it(outputs):
    error = literal_eval(outputs["error"][0].text)
    assert (error["output_type"], error["ename"], error["evalue"]) == ("error", "ValueError", "no 64")
    assert error["traceback"][-1] == "ValueError: no 64"


def test_a_single_controls_figures_are_all_drawn_in_advance_for_pages_without_a_kernel(outputs):
    frames = outputs["single"][1].data[FRAMES]
    assert (frames["label"], frames["values"], frames["first"]) == ("batch, sequences", ["1", "8", "64"], 1)
    shown = outputs["single"][1].data[PLOTLY]
    figures = [merged(shown, one) for one in frames["figures"]]
    assert [figure["data"][0]["y"] for figure in figures] == [[1], [8], [64]]
    assert frames["figures"] == [{"data": [{"y": [1]}]}, {}, {"data": [{"y": [64]}]}]
    assert FRAMES not in outputs["untouched"][1].data


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"data": [{"y": [1], "x": 2}], "layout": {"a": {"b": 1}}}, {"data": [{"y": [3]}], "layout": {}}),
        ({"data": [{"y": [1]}]}, {"data": [{"y": [1]}, {"y": [2]}]}),
        ({"data": [], "layout": {"a": 1}}, {"data": [{}], "layout": {"a": [1, 2]}}),
    ],
)
def test_a_figure_is_the_one_shown_and_its_difference_and_null_is_what_it_lacks(old, new):
    def without_nulls(one):
        if isinstance(one, dict):
            return {key: without_nulls(value) for key, value in one.items() if value is not None}
        return [without_nulls(item) for item in one] if isinstance(one, list) else one

    assert without_nulls(merged(old, _difference(new, old))) == without_nulls(new)


def test_what_a_commit_keeps_is_the_first_drawing(outputs):
    notebook = new_notebook(cells=[new_code_cell(outputs=outputs["untouched"])])
    (kept,) = without_widgets(notebook).cells[0].outputs
    assert PLOTLY in kept.data


def test_a_drawing_that_is_not_exactly_one_thing_is_refused(outputs):
    told = "the drawing must show exactly one thing; it showed"
    assert outputs["refused"][0].text == f"{told} 0\n{told} 2\n"


def test_numbers_and_texts_are_on_a_slider_that_begins_as_told():
    batches = Control("batch, sequences", [1, 64, 2048]).widget()
    assert isinstance(batches, SelectionSlider) and batches.description == "batch, sequences"
    assert batches.value == 1 and not batches.continuous_update
    assert [text for text, _ in batches.options] == ["1", "64", "2,048"]
    rungs = Control("rung", ["dense", "paged"], first="paged").widget()
    assert rungs.value == "paged"


@pytest.mark.parametrize(
    "values, first, told", [([], None, "nothing to choose"), ([1, 2], 3, r"3 is not among \[1, 2\]")]
)
def test_a_control_that_cannot_be_is_refused(values, first, told):
    with pytest.raises(ControlError, match=told):
        Control("x", values, first)
