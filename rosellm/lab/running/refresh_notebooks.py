"""Execute the notebooks in place for a commit: ``python -m rosellm.lab.running.refresh_notebooks``.

Uses default parameters, and stores fresh outputs, with a PNG for every plotly figure (for readers without
JavaScript), but nothing that differs between machines: no widget state, no timings, a fixed kernel name.
"""

import argparse
import base64
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import kaleido
import nbformat
import plotly.graph_objects as go
import psutil
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from nbstripout import strip_output
from PIL import Image
from tqdm import tqdm

from rosellm.atomic import write_text
from rosellm.command_line import OneLineParser
from rosellm.errors import RoseError
from rosellm.lab.figures.charts import PLOTLY
from rosellm.lab.running.gallery import without_widgets
from rosellm.lab.running.interruption import Interruption, kill_family
from rosellm.lab.running.notebook_workers import NotebookError, kernel_environment
from rosellm.lab.running.run_notebooks import select

KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE = {
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "name": "python",
    "pygments_lexer": "ipython3",
}
PASSING_KEYS = [
    "metadata.papermill",
    "metadata.signature",
    "metadata.vscode",
    "cell.metadata.papermill",
    "cell.metadata.execution",
    "cell.metadata.ExecuteTime",
    "cell.metadata.collapsed",
    "cell.metadata.scrolled",
]

PNG_COLOURS = 96
POLL_SECONDS = 0.2

Renderer = Callable[[dict[str, Any]], bytes]


def normalise(notebook: NotebookNode) -> NotebookNode:
    """Remove widgets, timings and machine names in place; keep outputs, counts and ids."""
    strip_output(notebook, keep_output=True, keep_count=True, keep_id=True, extra_keys=PASSING_KEYS)
    notebook.metadata["kernelspec"] = dict(KERNELSPEC)
    notebook.metadata["language_info"] = dict(LANGUAGE)
    return without_widgets(notebook)


def add_pictures(notebook: NotebookNode, render: Renderer) -> NotebookNode:
    """Add a PNG made by ``render`` to every plotly output, in place."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            figure = output.get("data", {}).get(PLOTLY)
            if figure is not None:
                output.data["image/png"] = base64.b64encode(render(figure)).decode()
    return notebook


def execute_file(path: Path, timeout: float) -> NotebookNode:
    """Return a copy of the notebook, executed in its folder with its default parameters.

    timeout: seconds per cell. Raises NotebookError if a cell fails.
    """
    try:
        notebook = nbformat.read(path, as_version=4)
    except Exception as error:  # nbformat may raise anything
        raise NotebookError(f"{path} cannot be read as a notebook: {type(error).__name__}") from error
    return execute(notebook, path.stem, path.parent, timeout)


def execute(notebook: NotebookNode, name: str, folder: Path, timeout: float) -> NotebookNode:
    """Execute the notebook in ``folder``. Raises NotebookError, which names it, if a cell fails."""
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        coalesce_streams=True,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    try:
        return client.execute()
    except CellExecutionError as error:
        raise NotebookError(f"{name} is left as it was: {error.ename}: {error.evalue}") from None
    except (CellTimeoutError, DeadKernelError) as error:
        raise NotebookError(f"{name} is left as it was: {str(error).splitlines()[0]}") from None


def draw(figure: dict[str, Any]) -> bytes:
    """Draw a plotly figure (JSON) as PNG. Raises NotebookError if the machine has no browser for it."""
    try:
        with warnings.catch_warnings(action="ignore"):  # plotly passes its server an ignored option
            png = go.Figure(figure["data"], figure.get("layout"), skip_invalid=True).to_image("png")
    except RuntimeError as error:
        raise NotebookError(f"no PNG can be made: {' '.join(str(error).split())}") from None
    return _with_palette(png)


def _with_palette(png: bytes) -> bytes:
    """Reduce a PNG to ``PNG_COLOURS`` colours: charts have few, and the file shrinks to a fifth."""
    small = BytesIO()
    Image.open(BytesIO(png)).quantize(PNG_COLOURS, method=Image.Quantize.FASTOCTREE).save(
        small, "png", optimize=True
    )
    return small.getvalue()


@contextmanager
def browser() -> Iterator[Renderer]:
    """Yield a renderer that reuses one browser. Raises NotebookError if the machine has none."""
    draw({"data": []})  # kaleido's server hangs without a browser; a single drawing reports it
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
) -> list[Path]:
    """Execute the notebooks in place, one after the other; without a ``renderer`` no PNG is added.

    Returns the finished ones, a subset after an ``interruption``. Raises NotebookError for the first one that
    fails; it and the later ones are unchanged.
    """
    interruption, done = interruption or Interruption(), []
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(kernel_environment(Path(folder)))
        for path in tqdm(notebooks, unit="notebook"):
            notebook = _until_interrupted(interruption, partial(execute_file, path, timeout))
            if notebook is None:
                break
            normalise(notebook)
            if renderer:
                add_pictures(notebook, renderer)
            write_text(path, nbformat.writes(notebook) + "\n")
            done.append(path)
    return done


def _until_interrupted(interruption: Interruption, run: Callable[[], NotebookNode]) -> NotebookNode | None:
    """Return the result of ``run``, or None if interrupted, when kernels that it started are killed.

    Runs it in a thread, where nbclient leaves signals alone.
    """
    here = psutil.Process()
    others = set(here.children())
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run)
        while not running.done():
            wait([running], POLL_SECONDS)
            if interruption.number is not None:
                for kernel in set(here.children()) - others:
                    kill_family(kernel)
    return running.result() if interruption.number is None else None


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--notebooks", type=Path, default=Path("notebooks"), help="folder of the notebooks")
    parser.add_argument("--select", default="", help="names or prefixes, comma or space separated")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds allowed per cell")
    parser.add_argument("--without-png", action="store_true", help="for a machine without Chrome or Chromium")
    arguments = parser.parse_args(argv)
    if not 0 < arguments.timeout <= threading.TIMEOUT_MAX:
        raise NotebookError(f"timeout must be above 0 and finite, not {arguments.timeout:g}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 2 for a usage error or a failed notebook, 130 or 143 if interrupted."""
    try:
        arguments = _arguments(argv)
        notebooks = select(arguments.notebooks, arguments.select)
        with (
            Interruption() as interruption,
            nullcontext() if arguments.without_png else browser() as renderer,
        ):
            done = refresh(notebooks, renderer, arguments.timeout, interruption)
    except (RoseError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if len(done) < len(notebooks):
        names = (path.stem for path in notebooks)
        print(interruption.told((path.stem for path in done), names), file=sys.stderr)
        return interruption.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
