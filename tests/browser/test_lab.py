"""What a reader does in JupyterLab works: run all cells, move the sliders."""

import pytest

pytestmark = pytest.mark.browser

ERROR = '[data-mime-type="application/vnd.jupyter.stderr"]:has-text("Traceback (most recent call last)")'
SHOWN = "plot => JSON.stringify([plot.layout.title.text, plot.data.map(trace => trace.visible)])"


def moved_to_each_end(plot):
    """What a figure shows after a click on either end of its slider."""
    rail = plot.locator(".slider-rail-touch-rect")
    rail.scroll_into_view_if_needed()
    width = rail.bounding_box()["width"]
    for x in (2, width - 2):
        rail.click(position={"x": x, "y": 5}, force=True)
        plot.page.wait_for_timeout(500)
        yield plot.evaluate(SHOWN)


def test_every_cell_runs_without_an_error(page):
    assert page.locator(ERROR).all_inner_texts() == []
    prompts = page.locator(".jp-CodeCell .jp-InputPrompt").all_inner_texts()
    # A folded cell shows no number; had it not run, the numbers after it would be too small.
    assert prompts.count("") == page.locator(".jp-CodeCell .jp-Placeholder-prompt").count()
    assert [(n, prompt) for n, prompt in enumerate(prompts, 1) if prompt not in ("", f"[{n}]:")] == []


def test_every_slider_shows_another_figure_when_it_is_moved(page):
    plots = page.locator(".js-plotly-plot").filter(has=page.locator(".slider-container")).all()
    assert plots
    for plot in plots:
        first, last = moved_to_each_end(plot)
        assert first != last
