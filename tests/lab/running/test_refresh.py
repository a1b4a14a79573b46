"""Refreshing notebooks in place: what is kept, what is stripped, what a failure leaves."""

import base64
import os
import signal
import sys
from pathlib import Path

import nbformat
import plotly.graph_objects as go
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from rosellm.lab.figures.charts import PLOTLY
from rosellm.lab.running import refresh_notebooks
from rosellm.lab.running.execution import NotebookError
from rosellm.lab.running.interruption import Interruption
from rosellm.lab.running.refresh_notebooks import add_pictures, draw
from tests.lab.running.test_run_notebooks import printed, save, status_of, wait_until
from tests.roseinfer.ranks import is_running


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    return ["--notebooks", str(tmp_path), "--without-png"]


def main(arguments: list[str]) -> int:
    return status_of(refresh_notebooks.main, arguments)


def test_every_figure_gets_its_picture_and_keeps_its_data():
    figure = new_output("display_data", {PLOTLY: {"data": [], "layout": {}}, "text/plain": "table"})
    notebook = new_notebook(cells=[new_markdown_cell("x"), new_code_cell("show()", outputs=[figure])])
    add_pictures(notebook, lambda spec: b"png of " + repr(sorted(spec)).encode())
    (output,) = notebook.cells[1].outputs
    assert base64.b64decode(output.data["image/png"]) == b"png of ['data', 'layout']"
    assert set(output.data) == {PLOTLY, "text/plain", "image/png"}


def test_a_machine_without_a_browser_is_told_so(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("\nKaleido requires Google Chrome\n\nto be installed.\n")

    monkeypatch.setattr(go.Figure, "to_image", fail)
    told = "no PNG can be made: Kaleido requires Google Chrome to be installed"
    with pytest.raises(NotebookError, match=told):
        draw({"data": []})


def test_notebooks_are_executed_in_place_by_this_interpreter(tmp_path, command):
    path = save(tmp_path, "00_a", "import os, sys", "print(sys.executable, os.getcwd())\nprint(2)")
    assert main(command) == 0
    notebook = nbformat.read(path, as_version=4)
    assert [cell.execution_count for cell in notebook.cells[1:]] == [1, 2, 3]
    assert printed(path) == f"{sys.executable} {tmp_path}\n2\n"
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert [cell.metadata for cell in notebook.cells[1:]] == [{"tags": ["parameters"]}, {}, {}]


def test_what_cannot_be_refreshed_is_told_in_one_line_with_exit_code_2(tmp_path, command, capsys):
    failing = save(tmp_path, "00_a", "1 / 0")
    before = failing.read_bytes()
    assert main(command) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("error: 00_a is left as it was: cell 2: ZeroDivisionError: ")
    assert failing.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_is_done_and_leaves_the_rest_as_it_was(tmp_path, command, capsys, number):
    """The second notebook sends the signal to the command from within its own kernel."""
    note = tmp_path / "pid"
    source = f"import os, time\nopen({str(note)!r}, 'w').write(str(os.getpid()))\n"
    source += f"while 'DONE' not in open({str(tmp_path / '00_done.ipynb')!r}).read():\n    time.sleep(0.1)\n"
    source += f"os.kill({os.getpid()}, {number})\ntime.sleep(100)"
    done = save(tmp_path, "00_done", "print('done'.upper())")
    cut, never = save(tmp_path, "01_cut", source), save(tmp_path, "02_never", source)
    before = cut.read_bytes(), never.read_bytes()
    with Interruption() as outer:  # a signal that came too late would end the tests
        status = main(command)
    assert (status, outer.number) == (128 + number, None)
    told = f"interrupted by {number.name}: finished 00_done; not finished 01_cut, 02_never"
    assert capsys.readouterr().err.splitlines()[-1] == told
    assert wait_until(lambda: not is_running(int(note.read_text())))
    assert printed(done) == "DONE\n"
    assert (cut.read_bytes(), never.read_bytes()) == before
    assert sorted(tmp_path.iterdir()) == [done, cut, never, note]
