"""A slider that chooses among figures."""

import plotly.graph_objects as go
import pytest
from IPython.core.interactiveshell import InteractiveShell

from rosellm.lab.figures import slider
from rosellm.lab.figures.charts import PLOTLY, show
from rosellm.lab.figures.lines import step_lines
from rosellm.lab.figures.slider import Control, ControlError, explore


@pytest.fixture(autouse=True)
def shell():
    """As in a notebook: what is displayed can be captured."""
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


def draw(batch):
    series = {"dense": [1, batch], "floor": [1, 1]} if batch > 1 else {"dense": [1, 1]}
    show(step_lines([1, 2], series, "x", "µs", title=f"Batch {batch}?", log_y=batch > 8))


def applied(bundle, step):
    """The visible traces and the layout after a step of the slider, as plotly.js applies it."""
    figure, (visible, changes) = bundle[PLOTLY], step["args"]
    shown = [trace for trace, is_shown in zip(figure["data"], visible["visible"], strict=True) if is_shown]
    return shown, dict(slider._flat(figure["layout"])) | changes


def test_each_step_shows_the_traces_and_the_layout_of_its_value_alone(monkeypatch):
    displayed = []
    monkeypatch.setattr(slider, "display", lambda data, raw: displayed.append(data))
    explore(draw, batch=Control("batch, sequences", [1, 8, 2048], first=8))
    (bundle,) = displayed
    go.Figure(bundle[PLOTLY]["data"], bundle[PLOTLY]["layout"])  # plotly accepts it
    (control,) = bundle[PLOTLY]["layout"]["sliders"]
    assert [step["label"] for step in control["steps"]] == ["1", "8", "2,048"]
    assert control["active"] == 1 and control["currentvalue"]["prefix"] == "batch, sequences: "
    for step, n_lines in zip(control["steps"], (1, 2, 2), strict=True):
        traces, layout = applied(bundle, step)
        value = int(step["label"].replace(",", ""))
        assert len(traces) == n_lines and list(traces[0]["y"]) == [1, value]
        assert layout["title.text"] == f"Batch {value}?"
        assert layout["yaxis.type"] == ("log" if value > 8 else None)
    first = [trace["visible"] for trace in bundle[PLOTLY]["data"]]
    assert first == control["steps"][1]["args"][0]["visible"]


@pytest.mark.parametrize("n_shown", [0, 2])
def test_a_drawing_that_is_not_exactly_one_figure_is_refused(n_shown):
    with pytest.raises(ControlError, match=f"must show exactly one figure; it showed {n_shown}"):
        explore(lambda n: [draw(1) for _ in range(n_shown)], n=Control("n", [1]))


def test_a_control_without_choices_or_with_another_first_one_is_refused():
    with pytest.raises(ControlError, match="batch: there is nothing to choose from"):
        Control("batch", [])
    with pytest.raises(ControlError, match=r"batch: 3 is not among \[1, 2\]"):
        Control("batch", [1, 2], first=3)
