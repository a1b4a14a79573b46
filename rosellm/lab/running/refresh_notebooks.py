"""Execute the notebooks in place for a commit: ``python -m rosellm.lab.running.refresh_notebooks``.

Uses default parameters, and stores fresh outputs, with a PNG for every plotly figure (for readers without
JavaScript), but nothing that differs between machines: no widget state, no timings, a fixed kernel name.
"""

import rosellm.lab.running.spared_imports  # noqa: F401, I001  (before any module that reads notebooks)
import base64
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import kaleido
import nbformat
import plotly.graph_objects as go
from nbformat import NotebookNode
from nbstripout import strip_output
from PIL import Image

from rosellm.atomic import write_text
from rosellm.command_line import OneLineParser, command
from rosellm.lab.figures.charts import PLOTLY
from rosellm.lab.running.execution import NotebookError, execute, run_here
from rosellm.lab.running.interruption import Interruption
from rosellm.lab.running.run_notebooks import parsed

KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE = {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"}
LANGUAGE |= {"pygments_lexer": "ipython3"}
PASSING_KEYS = [f"metadata.{key}" for key in ("papermill", "signature", "vscode", "widgets")]
PASSING_KEYS += [f"cell.metadata.{key}" for key in ("papermill", "execution", "ExecuteTime")]
PASSING_KEYS += ["cell.metadata.collapsed", "cell.metadata.scrolled"]
PNG_COLOURS = 96

Renderer = Callable[[dict[str, Any]], bytes]


def renewed(committed: NotebookNode, executed: NotebookNode) -> NotebookNode:
    """Copy the executed notebook's outputs into the committed notebook, in place, and return the latter.

    Metadata that differs between machines is removed.
    """
    for cell, made in zip(committed.cells, executed.cells, strict=True):
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = made.outputs, made.execution_count
    strip_output(committed, keep_output=True, keep_count=True, keep_id=True, extra_keys=PASSING_KEYS)
    committed.metadata["kernelspec"] = dict(KERNELSPEC)
    committed.metadata["language_info"] = dict(LANGUAGE)
    return committed


def add_pictures(notebook: NotebookNode, render: Renderer) -> NotebookNode:
    """Add a PNG, drawn by ``render``, to every plotly output of a notebook, in place; return the notebook."""
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        if PLOTLY in output.get("data", {}):
            output.data["image/png"] = base64.b64encode(render(output.data[PLOTLY])).decode()
    return notebook


def draw(figure: dict[str, Any]) -> bytes:
    """Draw a plotly figure, given as JSON, and return the PNG file.

    With only ``PNG_COLOURS`` colours, the file has a fifth of the size. Raises NotebookError if the machine
    has no browser that can draw.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # plotly passes its server an ignored option
            png = go.Figure(figure["data"], figure.get("layout"), skip_invalid=True).to_image("png")
    except RuntimeError as error:
        raise NotebookError(f"no PNG can be made: {' '.join(str(error).split())}") from None
    small, colours = BytesIO(), Image.Quantize.FASTOCTREE
    Image.open(BytesIO(png)).quantize(PNG_COLOURS, method=colours).save(small, "png", optimize=True)
    return small.getvalue()


@contextmanager
def browser() -> Iterator[Renderer]:
    """Yield a renderer that draws all figures in one browser. Raises NotebookError without a browser."""
    draw({"data": []})  # without a browser, kaleido's server would hang; a single drawing raises an error
    kaleido.start_sync_server(silence_warnings=True)
    try:
        yield draw
    finally:
        kaleido.stop_sync_server(silence_warnings=True)


def refresh(
    notebooks: Sequence[Path],
    renderer: Renderer | None,
    timeout: float = 300.0,
    interruption: Interruption | None = None,
    folder: Path | None = None,
) -> list[Path]:
    """Execute notebooks in place, two at a time; return the finished notebooks.

    renderer: draws the PNG that is added to each figure; None adds no PNG.
    timeout: seconds per notebook.
    interruption: ends the run early.
    folder: working folder of the kernels; None means each notebook's folder.

    Raises NotebookError for the first notebook that fails. A failed or unfinished notebook is unchanged.
    """
    there, done = {path.stem: path for path in notebooks}, []
    tasks = {name: partial(execute, path, {}, timeout, folder) for name, path in there.items()}
    for name, finished in run_here(tasks, 2, interruption or Interruption()):
        path, error = there[name], finished.error or finished.value.outcome.error
        if error:
            raise NotebookError(f"{name} is left as it was: {error}")
        executed = nbformat.reads(finished.value.files[path.name].decode(), as_version=4)
        notebook = renewed(nbformat.read(path, as_version=4), executed)
        if renderer:
            add_pictures(notebook, renderer)
        write_text(path, nbformat.writes(notebook) + "\n")
        done.append(path)
    return done


@command
def main(argv: list[str] | None = None) -> None:
    """Run the command; exit with 2 for a usage error or a failed notebook, 130 or 143 if interrupted."""
    parser = OneLineParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--without-png", action="store_true", help="for a machine without Chrome or Chromium")
    given, notebooks = parsed(parser, argv)
    with Interruption() as interruption, nullcontext() if given.without_png else browser() as renderer:
        done = refresh(notebooks, renderer, given.timeout, interruption)
    interruption.exit_unless_done((path.stem for path in done), [path.stem for path in notebooks])


if __name__ == "__main__":
    sys.exit(main())
