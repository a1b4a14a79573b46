"""Pages of executed notebooks, their titles and pictures."""

import json
import re
import shutil
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from rosellm.lab.figures.charts import PLOTLY
from rosellm.lab.figures.widgets import FRAMES, WIDGET
from rosellm.lab.records.findings import NOTEBOOKS, OTHERS, finding
from rosellm.lab.records.records import Results, find, number
from rosellm.lab.running.gallery import Outcome, page, picture, publish_gallery, reading_minutes, title

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
        frames = {"label": "batch", "values": ["1", "8"], "first": 1, "figures": figures}
        output = new_output("display_data", {PLOTLY: figures[1], FRAMES: frames})
        text = page(new_notebook(cells=[new_code_cell("explore()", outputs=[output])]), tmp_path)
        (slider,) = re.findall("<input [^>]*>", text)
        assert all(f'{name}="1"' in slider for name in ("max", "value")) and 'type="range"' in slider
        assert 'figures = [[[{"y": [1]}], {}],\n[[{"y": [8]}], {}]]' in text
        assert "displayModeBar: false" in text and "newPlot" not in text

    def test_links_between_notebooks_become_links_between_pages(self, tmp_path):
        (tmp_path / "01_dense.ipynb").touch()
        notebook = new_notebook(cells=[new_markdown_cell("[a](01_dense.ipynb#x) [b](elsewhere.ipynb)")])
        text = page(notebook, tmp_path)
        assert 'href="01_dense.html#x"' in text and 'href="elsewhere.ipynb"' in text

    def test_links_in_a_figure_lead_to_pages_and_are_set_after_each_drawing(self, tmp_path):
        (tmp_path / "01_dense.ipynb").touch()
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
    def publish(self, folder: Path, name: str) -> str:
        notebook = folder / f"{name}.ipynb"
        nbformat.write(new_notebook(cells=[new_markdown_cell("# 02 · Who reads `it`?")]), notebook)
        (folder / "build").mkdir()
        publish_gallery({name: notebook}, [Outcome(name, 1.25, "ok")], folder / "build")
        return (folder / "build" / "index.html").read_text()

    def test_a_card_has_the_question_the_finding_and_the_seconds(self, tmp_path):
        index = self.publish(tmp_path, "02_mask_removal")
        told = finding(find(), "02_mask_removal")
        assert "<h2>02 · Who reads it?</h2>" in index and f"<p>{told}</p>" in index and "1.2 s" in index
        assert re.search(r"tok/s W\d [+−]", told)
        assert find().device_name in index
        assert "http" not in index

    def test_code_in_a_finding_is_set_as_code(self, tmp_path):
        assert "<code>" in self.publish(tmp_path, "25_your_kernel")

    def test_a_notebook_of_ones_own_has_a_card_without_a_finding(self, tmp_path):
        assert "<p></p>" in self.publish(tmp_path, "99_mine")
        assert finding(find(), "99_mine") == "–"

    def test_findings_are_those_of_the_records_now_not_of_an_earlier_run(self, tmp_path):
        self.publish(tmp_path, "02_mask_removal")
        kept = json.loads((tmp_path / "build" / "gallery.json").read_text())
        assert "finding" not in kept["02_mask_removal"]

    @pytest.mark.parametrize("rows", [[], [{"batch_size": 256, "medians_s": {"wall": 1e-5}}]])
    def test_appends_without_a_gpus_time_of_256_tokens_have_no_finding(self, tmp_path, rows):
        (tmp_path / "kv_append.json").write_text(json.dumps({"rows": rows}))
        (notebook,) = (name for name, told in OTHERS.items() if told.__name__ == "_append")
        assert finding(Results(tmp_path), notebook) == "–"

    def test_the_notebook_of_a_recorded_rung_has_a_finding(self):
        recorded = [name for rung, name in NOTEBOOKS.items() if rung in find().rungs("W3")]
        assert len(recorded) > 20
        assert all(finding(find(), name) != "–" for name in recorded)

    def test_mixed_lengths_have_a_finding_as_soon_as_w8_is_recorded(self, tmp_path):
        shutil.copy(find().folder / "ceilings.json", tmp_path)
        assert finding(Results(tmp_path), "30_mixed_lengths") == "–"
        shutil.copy(find().folder / "W7-split_kv.json", tmp_path / "W8-split_kv.json")
        told = finding(Results(tmp_path), "30_mixed_lengths")
        best = number(find().value("W7", "split_kv"))
        assert re.fullmatch(rf"W8: {best} tok/s, [\d.]+ times vLLM's, [\d.]+ % of the floor", told)

    def test_the_notebook_of_two_rungs_has_a_finding_of_each(self):
        told = finding(find(), NOTEBOOKS["identity_pos"])
        assert re.fullmatch(r"`full_batch`: tok/s W\d [^;]+; `identity_pos`: tok/s W\d .+", told)
