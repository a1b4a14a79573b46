"""Render an executed notebook as an HTML page that needs no network, and find the contents of its card."""

from __future__ import annotations

import base64
import re
from functools import cache
from pathlib import Path

from nbconvert import HTMLExporter
from nbformat import NotebookNode
from traitlets.config import Config

import rosellm
from rosellm.lab.figures.charts import PLOTLY

PAGES = Path(rosellm.__file__).parent / "assets" / "pages"
SHOWN = [PLOTLY, "text/html", "text/markdown", "image/svg+xml", "text/latex", "image/png", "image/jpeg"]
SHOWN += ["text/plain"]


def page(notebook: NotebookNode, folder: Path) -> str:
    """Render an executed notebook as an HTML page.

    folder: folder of the original notebooks; links to them become links to their pages.

    The page loads two files from its own folder: ``plotly.min.js``, which draws the figures, and
    ``pages.js``, which the gallery writes and which lists the existing pages.
    """
    notebook = notebook.copy()
    notebook.metadata = {key: value for key, value in notebook.metadata.items() if key != "widgets"}
    metadata = {"name": title(notebook) or "RoseLLM", "path": str(folder)}
    body, _ = _exporter().from_notebook_node(notebook, resources={"metadata": metadata})
    names = {path.stem for path in folder.glob("*.ipynb")}

    def to_page(link: re.Match[str]) -> str:
        return f"{link[1]}.html" if link[1] in names else link[0]

    return re.sub(r'(?<=")(?:\./)?([\w.-]+)\.ipynb(?=[\\"#?])', to_page, body)


@cache
def _exporter() -> HTMLExporter:
    template = (PAGES / "page.html.j2").read_text(encoding="utf-8")
    shown = Config({"NbConvertBase": {"display_data_priority": SHOWN}})
    no_prompts = {"exclude_input_prompt": True, "exclude_output_prompt": True}
    return HTMLExporter(config=shown, raw_template=template, **no_prompts)


def title(notebook: NotebookNode) -> str:
    """Return a notebook's first Markdown heading, without its markup; "" if there is none."""
    for cell in notebook.cells:
        heading = re.search(r"^#+\s+(.+)$", cell.source, re.MULTILINE)
        if cell.cell_type == "markdown" and heading:
            return re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).strip()
    return ""


def question(notebook: NotebookNode) -> str:
    """Return the line in italics in a notebook's first cell; "" if there is none."""
    asked = re.search(r"^\*([^*\n]+)\*$", notebook.cells[0].source if notebook.cells else "", re.MULTILINE)
    return asked[1] if asked else ""


def reading_minutes(notebook: NotebookNode) -> int:
    """Estimate the minutes to read a notebook, at 200 words of prose or 20 lines of code per minute."""
    words = sum(len(cell.source.split()) for cell in notebook.cells if cell.cell_type == "markdown")
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return max(1, round(words / 200 + sum(bool(line.strip()) for line in code.splitlines()) / 20))


def picture(notebook: NotebookNode) -> str:
    """Return the first PNG or SVG image in a notebook's outputs, as a data URI; "" if there is none."""
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        data = output.get("data", {})
        if "image/png" in data:
            return f"data:image/png;base64,{''.join(data['image/png'].split())}"
        if "image/svg+xml" in data:
            return f"data:image/svg+xml;base64,{base64.b64encode(data['image/svg+xml'].encode()).decode()}"
    return ""
