"""The gallery opens from the file system without a network: figures are drawn, links lead on."""

from pathlib import Path

import nbformat
import pytest

from rosellm.lab.running.execution import Outcome
from rosellm.lab.running.gallery import publish_gallery
from rosellm.lab.running.page import page
from tests.browser.test_lab import moved_to_each_end

pytestmark = pytest.mark.browser

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SHOWN = ("00_map", "01_paged_attention", "33_arrivals")
NARROW = 420
PLOT = ".js-plotly-plot .main-svg"
MIDDLE_OF_A_LINK = """() => {
  const link = document.querySelector(".js-plotly-plot .ytick a");
  link.scrollIntoView({block: "center"});
  const box = link.getBoundingClientRect();
  return [box.x + box.width / 2, box.y + box.height / 2];
}"""


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gallery")
    paths = {name: NOTEBOOKS / f"{name}.ipynb" for name in SHOWN}
    for name, path in paths.items():
        (folder / f"{name}.html").write_text(page(nbformat.read(path, as_version=4), NOTEBOOKS))
    publish_gallery(paths, [Outcome(name, 1.0, "ok") for name in SHOWN], folder)
    return folder


@pytest.fixture
def offline(chromium):
    """A page without a network, and the addresses that it asked for."""
    context = chromium.new_context(offline=True)
    context.set_default_timeout(30_000)
    page, asked = context.new_page(), []
    page.on("request", lambda request: asked.append(request.url))
    yield page, asked
    context.close()


def test_the_index_shows_a_picture_a_card_and_leads_to_pages_that_lead_on(gallery, offline):
    shown, asked = offline
    shown.goto((gallery / "index.html").as_uri())
    assert shown.locator("article").count() == len(SHOWN)
    assert shown.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
    shown.locator("article a").first.click()
    shown.wait_for_url("**/00_map.html")
    shown.locator(PLOT).first.wait_for()
    way = shown.locator("nav.way").first.locator("a")
    assert [a.get_attribute("href") for a in way.all()] == ["index.html", "01_paged_attention.html"]
    anchors = [a.get_attribute("href") for a in shown.locator("nav.contents a").all()]
    assert len(anchors) > 3 and all(shown.locator(f'[id="{anchor[1:]}"]').count() for anchor in anchors)
    links = shown.locator('main a[href*=".html"]:not([href^=http])').all()
    assert {link.get_attribute("href").partition("#")[0] for link in links} <= {
        "index.html",
        *(f"{name}.html" for name in SHOWN),
    }
    assert {url.partition(":")[0] for url in asked} <= {"file", "data", "blob"}


def test_a_figures_slider_moves_without_a_kernel(gallery, offline):
    shown, _asked = offline
    shown.goto((gallery / "00_map.html").as_uri())
    plot = shown.locator(".js-plotly-plot").filter(has=shown.locator(".slider-container")).first
    first, last = moved_to_each_end(plot)
    assert "of 1 sequence," in first and "of 256 sequences," in last


@pytest.mark.parametrize("name", ["index", *SHOWN])
def test_on_a_narrow_screen_nothing_runs_out_of_the_right_edge(gallery, offline, name):
    shown, _asked = offline
    shown.set_viewport_size({"width": NARROW, "height": 900})
    shown.goto((gallery / f"{name}.html").as_uri())
    if name != "index":
        shown.locator(PLOT).first.wait_for()
    assert shown.evaluate("document.scrollingElement.scrollWidth") <= NARROW


def test_a_rungs_name_in_the_ladders_chart_leads_to_its_page(gallery, offline):
    shown, _asked = offline
    shown.goto((gallery / "00_map.html").as_uri())
    shown.locator(".js-plotly-plot .ytick a").first.wait_for(state="attached")
    x, y = shown.evaluate(MIDDLE_OF_A_LINK)
    shown.mouse.click(x, y)
    shown.wait_for_url("**/01_paged_attention.html")


def test_a_page_follows_the_readers_dark_theme(gallery, chromium):
    grounds = []
    for scheme in ("light", "dark"):
        shown = chromium.new_page(offline=True, color_scheme=scheme)
        shown.goto((gallery / "01_paged_attention.html").as_uri())
        grounds.append(shown.evaluate("getComputedStyle(document.body).backgroundColor"))
        shown.close()
    assert grounds == ["rgb(255, 255, 255)", "rgb(17, 17, 17)"]


def test_a_swipe_over_a_chart_scrolls_the_page(gallery, chromium):
    """A touch that zooms instead would hold a phone's reader at the chart."""
    shown = chromium.new_page(offline=True, has_touch=True, viewport={"width": NARROW, "height": 900})
    shown.goto((gallery / "01_paged_attention.html").as_uri())
    plot = shown.locator(f"{PLOT} .nsewdrag").first
    plot.wait_for(state="attached")
    plot.evaluate("plot => plot.scrollIntoView({block: 'center'})")
    before, touch = shown.evaluate("scrollY"), shown.context.new_cdp_session(shown)
    for kind, y in (("touchStart", 500), *(("touchMove", 500 - 20 * i) for i in range(1, 11))):
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": 200, "y": y}]})
    touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    shown.wait_for_function(f"scrollY > {before + 100}")
    shown.close()
