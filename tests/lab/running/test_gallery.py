"""Pages of executed notebooks, their titles and pictures."""

import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from rosellm.lab.figures.charts import PLOTLY
from rosellm.lab.figures.widgets import FRAMES, WIDGET
from rosellm.lab.records.notebooks import ACTS
from rosellm.lab.running.gallery import (
    SHORT_PATH,
    Outcome,
    page,
    picture,
    publish_gallery,
    question,
    reading_minutes,
    title,
)

FOLDER = Path(__file__).parents[3] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="


class TestPages:
    def test_figures_are_drawn_from_their_data_and_widgets_are_left_out(self, tmp_path):
        figure = new_output(
            "display_data", {PLOTLY: {"data": [{"y": [1, 2]}], "layout": {}}, "image/png": PNG}
        )
        widget = new_output("display_data", {WIDGET: {"model_id": "x"}, "text/plain": "IntSlider(value=3)"})
        notebook = new_notebook(cells=[new_code_cell("show()", outputs=[figure, widget])])
        notebook.metadata["widgets"] = {"state": {}}
        text = page(notebook, tmp_path)
        assert 'Plotly.newPlot("figure-0", [{"y": [1, 2]}], {}' in text
        assert '<script src="plotly.min.js"></script>' in text
        assert PNG not in text and "IntSlider" not in text
        assert len(notebook.cells[0].outputs) == 2 and "widgets" in notebook.metadata

    def test_figures_drawn_in_advance_are_chosen_by_a_slider_and_no_toolbar_covers_a_title(self, tmp_path):
        figures = [{"data": [{"y": [n]}], "layout": {}} for n in (1, 8)]
        differences = [{"data": [{"y": [1]}]}, {}]
        frames = {"label": "batch", "values": ["1", "8"], "first": 1, "figures": differences}
        output = new_output("display_data", {PLOTLY: figures[1], FRAMES: frames})
        text = page(new_notebook(cells=[new_code_cell("explore()", outputs=[output])]), tmp_path)
        (slider,) = re.findall("<input [^>]*>", text)
        assert all(f'{name}="1"' in slider for name in ("max", "value")) and 'type="range"' in slider
        assert 'figures = [[[{"y": [1]}], {}],\n[[{"y": [8]}], {}]]' in text
        assert "displayModeBar: false" in text and "newPlot" not in text

    def test_links_between_notebooks_become_links_between_pages(self, tmp_path):
        nbformat.write(new_notebook(), tmp_path / "01_dense.ipynb")
        notebook = new_notebook(cells=[new_markdown_cell("[a](01_dense.ipynb#x) [b](elsewhere.ipynb)")])
        text = page(notebook, tmp_path)
        assert 'href="01_dense.html#x"' in text and 'href="elsewhere.ipynb"' in text

    def test_links_in_a_figure_lead_to_pages_and_are_set_after_each_drawing(self, tmp_path):
        nbformat.write(new_notebook(), tmp_path / "01_dense.ipynb")
        layout = {"yaxis": {"ticktext": ['<a href="01_dense.ipynb">dense</a>', "other"]}}
        figure = new_output("display_data", {PLOTLY: {"data": [], "layout": layout}})
        text = page(new_notebook(cells=[new_code_cell("show()", outputs=[figure])]), tmp_path)
        assert r"<a href=\"01_dense.html\">dense<\/a>" in text
        assert 'const targets = {"dense": "01_dense.html"};' in text
        assert 'figure.on("plotly_afterplot", link)' in text

    def test_a_page_asks_nothing_of_a_network(self, tmp_path):
        text = page(new_notebook(cells=[new_markdown_cell("# x")]), tmp_path)
        assert re.findall(r"""(?:src|href)=["']https?:|import\(["']https?:|url\(["']?https?:""", text) == []
        assert re.findall(r'<script src="([^"]+)"', text) == ["plotly.min.js"]

    @pytest.mark.parametrize(
        ("source", "expected"),
        [("# Why *paged* `KV`?", "Why paged KV?"), ("text\n\n## [a](b)\n# c", "a"), ("no heading", "")],
    )
    def test_the_title_is_the_first_heading_without_markup(self, source, expected):
        assert title(new_notebook(cells=[new_code_cell("# x"), new_markdown_cell(source)])) == expected


def test_a_notebook_takes_a_minute_for_200_words_or_20_lines_of_code():
    cells = [new_markdown_cell("word " * 600), new_code_cell("x = 1\n\n" * 40)]
    assert reading_minutes(new_notebook(cells=cells)) == 5


class TestPicture:
    drawing = "<svg xmlns='http://www.w3.org/2000/svg'></svg>"

    def test_the_first_output_comes_before_later_ones_and_markdown(self, tmp_path):
        outputs = [new_output("display_data", {kind: data}) for kind, data in self.kinds()]
        for ordered, kind in ((outputs, "svg+xml"), (outputs[::-1], "png")):
            cells = [new_markdown_cell("![x](missing.png)"), new_code_cell("x", outputs=ordered)]
            found = picture(new_notebook(cells=cells), tmp_path)
            assert found.startswith(f"data:image/{kind};base64,")

    def kinds(self):
        return [("image/svg+xml", self.drawing), ("image/png", PNG)]

    def test_markdown_may_attach_inline_or_name_a_picture(self, tmp_path):
        (tmp_path / "flow.svg").write_text(self.drawing)
        attached = new_markdown_cell("![x](attachment:x.png)", attachments={"x.png": {"image/png": PNG}})
        drawn = picture(new_notebook(cells=[new_markdown_cell(self.drawing)]), tmp_path)
        assert picture(new_notebook(cells=[attached]), tmp_path) == f"data:image/png;base64,{PNG}"
        assert drawn.startswith("data:image/svg+xml;base64,")
        for source in ("![x](flow.svg)", '<img alt="x" src="flow.svg">'):
            assert picture(new_notebook(cells=[new_markdown_cell(source)]), tmp_path) == drawn

    def test_without_one_there_is_none(self, tmp_path):
        assert picture(new_notebook(cells=[new_markdown_cell("![x](missing.png)")]), tmp_path) == ""


class TestCards:
    def publish(self, folder: Path, name: str, status: str = "ok", error: str = "") -> str:
        notebook = folder / f"{name}.ipynb"
        first = new_markdown_cell("# 02 · Who reads `it`?\n\n*Does anybody?*")
        nbformat.write(new_notebook(cells=[first]), notebook)
        (folder / "build").mkdir(exist_ok=True)
        publish_gallery({name: notebook}, [Outcome(name, 1.25, status, error)], folder / "build")
        return (folder / "build" / "index.html").read_text()

    def test_a_card_has_the_title_and_the_question_of_its_notebook(self, tmp_path):
        index = self.publish(tmp_path, "02_mask_removal")
        assert "<h3>02 · Who reads it?</h3>" in index and "<p>Does anybody?</p>" in index
        assert "http" not in index and "failed" not in index.partition("</style>")[2]

    def test_a_notebook_that_failed_says_so(self, tmp_path):
        index = self.publish(tmp_path, "02_mask_removal", "failed", "ValueError: <x>")
        assert '<b class="failed">failed</b> ValueError: &lt;x&gt;' in index

    def test_a_notebook_of_ones_own_stands_apart(self, tmp_path):
        assert "<h2>Yours</h2>" in self.publish(tmp_path, "99_mine")


class TestLinks:
    def publish(self, folder: Path, *names: str) -> dict[str, str]:
        """Pages of notebooks that share a title; each text leads to 05."""
        for name in names:
            cells = [new_markdown_cell("# Same & title\n\n[on](05_e.ipynb#x)")]
            nbformat.write(new_notebook(cells=cells), folder / f"{name}.ipynb")
        (folder / "05_e.ipynb").touch()
        build = folder / "build"
        build.mkdir(exist_ok=True)
        for name in names:
            (build / f"{name}.html").write_text(page(nbformat.read(folder / f"{name}.ipynb", 4), folder))
        paths = {name: folder / f"{name}.ipynb" for name in names}
        publish_gallery(paths, [Outcome(name, 1.0, "ok") for name in names], build)
        return {path.stem: path.read_text() for path in build.glob("*.html")}

    def links(self, text: str) -> list[str]:
        """From the top of a page."""
        return re.findall(r'href="(\w+\.html)"', re.findall(r'<nav class="way">.*?</nav>', text)[0])

    def test_a_page_leads_to_the_pages_beside_it_that_exist_and_to_no_other(self, tmp_path):
        texts = self.publish(tmp_path, "00_a", "03_c")
        assert self.links(texts["00_a"]) == ["index.html", "03_c.html"]
        assert self.links(texts["03_c"]) == ["00_a.html", "index.html"]
        assert "← Same &amp; title" in texts["03_c"] and 'href="05_e.html' not in texts["03_c"]

    def test_a_page_made_later_is_linked_from_those_made_before(self, tmp_path):
        self.publish(tmp_path, "00_a", "03_c")
        texts = self.publish(tmp_path, "01_b", "05_e")
        assert self.links(texts["00_a"]) == ["index.html", "01_b.html"]
        assert self.links(texts["03_c"]) == ["01_b.html", "index.html", "05_e.html"]
        assert '<a href="05_e.html#x"' in texts["00_a"]

    def test_the_short_path_is_announced_once_all_its_pages_are_there(self, tmp_path):
        part, told = self.publish(tmp_path, "00_a", "01_b")["index"], "the short path, about an hour"
        assert "<b>Start with" in part and told not in part
        rest = [f"{number}_x" for number in SHORT_PATH[2:]]
        assert told in self.publish(tmp_path, *rest)["index"]

    def test_without_sections_a_page_has_no_contents(self, tmp_path):
        assert '<nav class="contents">' not in self.publish(tmp_path, "00_a")["00_a"]


def test_two_sources_compared_are_one_block_of_a_page_with_the_differing_lines_marked(tmp_path):
    lines = "`f` → `g`\n```diff\n  def f():\n\n-     return 1\n+     return 2\n```"
    cell = new_code_cell("pair", outputs=[new_output("display_data", {"text/markdown": lines})])
    text = page(new_notebook(cells=[cell]), tmp_path).partition('data-mime-type="text/markdown"')[2]
    (block,) = re.findall(r"<pre>(.*?)</pre>", text, re.DOTALL)
    marked = re.findall(r'<span class="(g[id])">([^<]*)', block)
    assert marked == [("gd", "-     return 1"), ("gi", "+     return 2")]


def test_every_notebook_is_in_one_act_and_the_short_path_is_the_start():
    """What a reader adds has a higher number, and no act."""
    in_acts = sorted(number for act in ACTS for number in act.numbers)
    numbers = [path.stem[:2] for path in NOTEBOOKS]
    assert in_acts == [number for number in numbers if number <= in_acts[-1]]
    assert set(SHORT_PATH) <= set(numbers)


def test_every_notebook_asks_a_question():
    assert [path.stem for path in NOTEBOOKS if not question(nbformat.read(path, 4)).endswith("?")] == []


class TestBuiltPages:
    @pytest.fixture(scope="class")
    @classmethod
    def pages(cls) -> dict[str, str]:
        return {path.stem: page(nbformat.read(path, 4), FOLDER) for path in NOTEBOOKS[1:8:3]}

    def test_a_solution_is_closed_with_its_code_inside(self, pages):
        for text in pages.values():
            (solution,) = re.findall(r"<details><summary>Solution</summary>(.*?)</details>", text, re.DOTALL)
            assert '<div class="highlight">' in solution and "def" in solution

    def test_folded_inputs_are_closed_and_exercises_are_open(self, pages):
        for name, text in pages.items():
            tags = [
                cell.metadata.get("tags", []) for cell in nbformat.read(FOLDER / f"{name}.ipynb", 4).cells
            ]
            assert text.count('<details class="code">') == sum("hide-input" in one for one in tags) > 3
            open_code = re.sub(r'<details class="code">.*?</details>', "", text, flags=re.DOTALL)
            assert '<span class="n">exercise</span>' in open_code
            assert ">open_rung<" in text and ">open_rung<" not in open_code

    def test_a_page_leads_to_its_sections(self, pages):
        text = pages["04_autotune"]
        anchors = re.findall(r'<nav class="contents">(.*?)</nav>', text)
        targets = re.findall(r'href="#([^"]+)"', anchors[0])
        assert len(targets) > 4 and all(f'<h2 id="{target}"' in text for target in targets)

    def test_figures_take_the_width_of_the_page(self, pages):
        figures = re.findall(r"Plotly.newPlot\(.*", pages["04_autotune"])
        assert figures and not [one for one in figures if '"width": 760' in one]
