"""What a reader does in JupyterLab works: run all cells, move the controls with the keyboard."""

from pathlib import Path

import pytest

from rosellm.roseinfer.recipe import BEFORE

pytestmark = pytest.mark.browser

ERROR = '[data-mime-type="application/vnd.jupyter.stderr"]:has-text("Traceback (most recent call last)")'
NOT_FOR_KEYS = ".jupyter-widgets select"  # JupyterLab takes the arrow keys for itself
CONTROLS = ".jupyter-widgets :is([role=slider], input[type=checkbox])"
DRAWN = ".js-plotly-plot .main-svg, .jp-RenderedSVG, .jp-RenderedMarkdown"
FIGURES = """cell => JSON.stringify([
    [...cell.querySelectorAll(".js-plotly-plot")].map(plot => [plot.data, plot.layout.title]),
    [...cell.querySelectorAll(".jp-RenderedSVG, .jp-RenderedMarkdown")].map(shown => shown.innerHTML)])"""
RECORDS = Path(__file__).parents[2] / "notebooks/results/nvidia-h200"
HREFS = (
    """links => links.map(a => [a.textContent, a.getAttributeNS("http://www.w3.org/1999/xlink", "href")])"""
)
REDRAWN = f"([cell, before]) => ({FIGURES})(cell) != before"


def key(control) -> str:
    """The arrow that leads away from where the control stands, or the space that ticks a box."""
    if control.get_attribute("type") == "checkbox":
        return "Space"
    least, now = (float(control.get_attribute(f"aria-value{end}")) for end in ("min", "now"))
    return "ArrowRight" if now == least else "ArrowLeft"


def redrawn_by_key(page, cell, control) -> None:
    """Returns once the key has led to another figure; playwright's TimeoutError if it does not."""
    cell.locator(DRAWN).first.wait_for()
    before = cell.evaluate(FIGURES)
    control.press(key(control))
    page.wait_for_function(REDRAWN, arg=[cell.element_handle(), before], timeout=10_000)


def test_every_cell_runs_without_an_error(page):
    assert page.locator(ERROR).all_inner_texts() == []
    prompts = page.locator(".jp-CodeCell .jp-InputPrompt").all_inner_texts()
    # A folded cell shows no number; had it not run, the numbers after it would be too small.
    assert prompts.count("") == page.locator(".jp-CodeCell .jp-Placeholder-prompt").count()
    assert [(n, prompt) for n, prompt in enumerate(prompts, 1) if prompt not in ("", f"[{n}]:")] == []


def test_every_control_redraws_its_figure_when_a_key_moves_it(page):
    cells = page.locator(".jp-CodeCell").filter(has=page.locator(CONTROLS)).all()
    assert cells and not page.locator(NOT_FOR_KEYS).count()
    for cell in cells:
        for control in cell.locator(CONTROLS).all():
            redrawn_by_key(page, cell, control)
    assert page.locator(ERROR).all_inner_texts() == []


def test_a_rungs_name_in_the_ladders_chart_links_to_its_notebook(page):
    if "00_map" not in page.url:
        pytest.skip("only 00_map draws the ladder")
    links = page.locator(".js-plotly-plot .ytick a").evaluate_all(HREFS)
    recorded = [rung for rung in BEFORE if list(RECORDS.glob(f"W*-{rung}.json"))]  # others are not drawn
    assert ["paged", "01_paged_attention.ipynb"] in links and len(links) >= len(recorded) > 10
