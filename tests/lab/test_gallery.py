"""Pages of executed notebooks, their titles and pictures."""

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from rosellm.lab.gallery import PLOTLY, WIDGET, page, picture, title

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

    def test_links_between_notebooks_become_links_between_pages(self, tmp_path):
        (tmp_path / "01_dense.ipynb").touch()
        notebook = new_notebook(cells=[new_markdown_cell("[a](01_dense.ipynb#x) [b](elsewhere.ipynb)")])
        text = page(notebook, tmp_path)
        assert 'href="01_dense.html#x"' in text and 'href="elsewhere.ipynb"' in text

    @pytest.mark.parametrize(
        ("source", "expected"),
        [("# Why *paged* `KV`?", "Why paged KV?"), ("text\n\n## [a](b)\n# c", "a"), ("no heading", "")],
    )
    def test_the_title_is_the_first_heading_without_markup(self, source, expected):
        assert title(new_notebook(cells=[new_code_cell("# x"), new_markdown_cell(source)])) == expected


class TestPicture:
    drawing = "<svg xmlns='http://www.w3.org/2000/svg'></svg>"

    def test_a_png_output_comes_before_svg_and_markdown(self, tmp_path):
        outputs = [new_output("display_data", {kind: data}) for kind, data in self.kinds()]
        cells = [new_markdown_cell(self.drawing), new_code_cell("x", outputs=outputs)]
        assert picture(new_notebook(cells=cells), tmp_path) == f"data:image/png;base64,{PNG}"

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
