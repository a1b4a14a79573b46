"""Pages of executed notebooks, and the index with a card for each."""

import json
import re
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from rosellm.lab.figures.charts import PLOTLY
from rosellm.lab.records.notebooks import ACTS
from rosellm.lab.running.execution import Outcome
from rosellm.lab.running.gallery import SHORT_PATH, publish_gallery
from rosellm.lab.running.page import page, picture, question

FOLDER = Path(__file__).parents[3] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
SVG = "<svg xmlns='http://www.w3.org/2000/svg'></svg>"


def page_showing(folder: Path, **data: object) -> str:
    """The page of a notebook with one output, of these MIME types."""
    output = new_output("display_data", {name.replace("__", "/"): value for name, value in data.items()})
    return page(new_notebook(cells=[new_code_cell("show()", outputs=[output])]), folder)


class TestPages:
    def test_a_figure_is_drawn_from_its_data_and_links_in_it_lead_to_pages(self, tmp_path):
        nbformat.write(new_notebook(), tmp_path / "01_dense.ipynb")
        layout = {"yaxis": {"ticktext": ['<a href="01_dense.ipynb">dense</a>', "</script>"]}}
        figure = {"data": [{"y": [1, 2]}], "layout": layout}
        text = page_showing(tmp_path, **{PLOTLY: figure, "image__png": PNG, "text__plain": "table"})
        (drawn,) = re.findall(r"<script>draw\((.*)\)</script>", text)
        assert '"y": [1, 2]' in drawn and r"<a href=\"01_dense.html\">dense" in drawn and "</s" not in drawn
        assert PNG not in text and "table</pre>" not in text

    def test_a_page_asks_nothing_of_a_network_and_the_notebook_stays_as_it_was(self, tmp_path):
        notebook = new_notebook(cells=[new_markdown_cell("# x")], metadata={"widgets": {"state": {}}})
        text = page(notebook, tmp_path)
        assert re.findall(r"""(?:src|href)=["']https?:|import\(["']https?:|url\(["']?https?:""", text) == []
        assert re.findall(r'<script src="([^"]+)"', text) == ["plotly.min.js", "pages.js"]
        assert "widgets" in notebook.metadata

    def test_links_between_notebooks_become_links_between_pages(self, tmp_path):
        nbformat.write(new_notebook(), tmp_path / "01_dense.ipynb")
        notebook = new_notebook(cells=[new_markdown_cell("[a](01_dense.ipynb#x) [b](elsewhere.ipynb)")])
        text = page(notebook, tmp_path)
        assert 'href="01_dense.html#x"' in text and 'href="elsewhere.ipynb"' in text

    def test_two_sources_compared_are_one_block_with_the_differing_lines_marked(self, tmp_path):
        lines = "`f` → `g`\n```diff\n  def f():\n\n-     return 1\n+     return 2\n```"
        text = page_showing(tmp_path, text__markdown=lines).partition('data-mime-type="text/markdown"')[2]
        (block,) = re.findall(r"<pre>(.*?)</pre>", text, re.DOTALL)
        marked = re.findall(r'<span class="(g[id])">([^<]*)', block)
        assert marked == [("gd", "-     return 1"), ("gi", "+     return 2")]

    def test_folded_inputs_are_closed_and_exercises_open_and_a_solution_is_closed(self):
        notebook = nbformat.read(NOTEBOOKS[1], 4)
        text = page(notebook, FOLDER)
        folded = ["hide-input" in cell.metadata.get("tags", []) for cell in notebook.cells]
        assert text.count('<details class="code">') == sum(folded) > 3
        open_code = re.sub(r'<details class="code">.*?</details>', "", text, flags=re.DOTALL)
        assert '<span class="n">exercise</span>' in open_code
        assert ">open_rung<" in text and ">open_rung<" not in open_code
        (solution,) = re.findall(r"<details><summary>Solution</summary>(.*?)</details>", text, re.DOTALL)
        assert '<div class="highlight">' in solution and "def" in solution


class TestCards:
    def publish(self, folder: Path, *names: str, status: str = "ok", error: str = "", outputs=()) -> str:
        """The index after notebooks that share a title."""
        build = folder / "build"
        build.mkdir(exist_ok=True)
        for name in names:
            first = new_markdown_cell("# 02 · Who reads `it`?\n\n*Does anybody?*")
            cells = [first, new_code_cell("show()", outputs=list(outputs))]
            nbformat.write(new_notebook(cells=cells), folder / f"{name}.ipynb")
            (build / f"{name}.html").touch()
        paths = {name: folder / f"{name}.ipynb" for name in names}
        publish_gallery(paths, [Outcome(name, 1.25, status, error) for name in names], build)
        return (build / "index.html").read_text()

    def test_a_card_has_title_and_question_and_a_failure_says_so(self, tmp_path):
        index = self.publish(tmp_path, "02_a")
        assert "<h3>02 · Who reads it?</h3>" in index and "<p>Does anybody?</p>" in index
        assert "http" not in index and "failed" not in index.partition("</style>")[2]
        picture = new_output("display_data", {"image/png": PNG})
        failure = {"status": "failed", "error": "ValueError: <x>"}
        index = self.publish(tmp_path, "02_a", **failure, outputs=[picture])
        assert '<b class="failed">failed</b> ValueError: &lt;x&gt;' in index and "1 failed" in index
        assert f'<img src="data:image/png;base64,{PNG}"' in index

    def test_every_page_is_told_which_others_are_there(self, tmp_path):
        for names in (("00_a", "03_c"), ("01_b",)):
            self.publish(tmp_path, *names)
        told = (tmp_path / "build/pages.js").read_text().removeprefix("const PAGES = ").rstrip(";\n")
        assert json.loads(told) == dict.fromkeys(("00_a", "01_b", "03_c"), "02 · Who reads it?")
        (tmp_path / "00_a.ipynb").unlink()
        self.publish(tmp_path, "01_b")
        assert list(json.loads((tmp_path / "build/gallery.json").read_text())) == ["01_b", "03_c"]

    def test_the_picture_is_the_first_of_the_outputs_if_there_is_one(self):
        outputs = [new_output("display_data", {"image/svg+xml": SVG}), new_output("stream", text="x")]
        outputs += [new_output("display_data", {"image/png": PNG})]
        for ordered, kind in ((outputs, "svg+xml"), (outputs[::-1], "png")):
            found = picture(new_notebook(cells=[new_code_cell("x", outputs=ordered)]))
            assert found.startswith(f"data:image/{kind};base64,")
        assert picture(new_notebook(cells=[new_code_cell("x", outputs=outputs[1:2])])) == ""


def test_every_notebook_is_in_one_act_and_asks_a_question_and_the_short_path_is_the_start():
    """What a reader adds has a higher number, and no act."""
    in_acts = sorted(number for act in ACTS for number in act.numbers)
    numbers = [path.stem[:2] for path in NOTEBOOKS]
    assert in_acts == [number for number in numbers if number <= in_acts[-1]]
    assert set(SHORT_PATH) <= set(numbers)
    assert [path.stem for path in NOTEBOOKS if not question(nbformat.read(path, 4)).endswith("?")] == []
