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
from rosellm.lab.figures.widgets import WIDGET
from rosellm.lab.running.interruption import Interruption, is_running
from rosellm.lab.running.notebook_workers import NotebookError
from rosellm.lab.running.refresh_notebooks import add_pictures, draw, main, normalise


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for changed in ("JUPYTER_PATH", "JUPYTER_RUNTIME_DIR", "OMP_NUM_THREADS"):
        monkeypatch.setenv(changed, os.environ.get(changed, ""))
    return tmp_path


def save(folder: Path, name: str, *sources: str) -> Path:
    cells = [new_markdown_cell("# Why?"), *[new_code_cell(source) for source in sources]]
    metadata = {
        "kernelspec": {"name": "my-env", "display_name": "mine", "language": "python"},
        "language_info": {"name": "python", "version": "3.11.7"},
        "papermill": {"duration": 3.2},
        "widgets": {"state": {}},
    }
    path = folder / f"{name}.ipynb"
    nbformat.write(new_notebook(cells=cells, metadata=metadata), path)
    return path


def outputs(path: Path) -> list:
    return [cell.outputs for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def test_outputs_counts_and_ids_stay_and_what_differs_between_machines_goes():
    widget = new_output("display_data", {WIDGET: {"model_id": "x"}, "text/plain": "IntSlider(value=3)"})
    text = new_output("stream", name="stdout", text="tokens are equal\n")
    cell = new_code_cell("show()", outputs=[widget, text], execution_count=1)
    cell.metadata = {"papermill": {"duration": 1}, "execution": {}, "scrolled": True, "tags": ["nbval-skip"]}
    notebook = new_notebook(cells=[cell], metadata={"papermill": {}, "widgets": {}})
    notebook.metadata["language_info"] = {"name": "python", "version": "3.11.7"}
    number = cell.id
    normalise(notebook)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.kernelspec.name == "python3"
    assert "version" not in notebook.metadata.language_info
    (kept,) = notebook.cells
    assert kept.metadata == {"tags": ["nbval-skip"]}
    assert kept.outputs == [text] and kept.execution_count == 1 and kept.id == number
    nbformat.validate(notebook)


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
    with pytest.raises(
        NotebookError, match="no PNG can be made: Kaleido requires Google Chrome to be installed"
    ):
        draw({"data": []})


def test_notebooks_are_executed_in_place_by_this_interpreter(folder):
    path = save(folder, "00_a", "import os, sys", "print(sys.executable, os.getcwd())\nprint(2)")
    assert main(["--notebooks", str(folder), "--without-png"]) == 0
    notebook = nbformat.read(path, as_version=4)
    assert [cell.execution_count for cell in notebook.cells[1:]] == [1, 2]
    assert outputs(path)[1][0].text == f"{sys.executable} {folder}\n2\n"
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    first = path.read_bytes()
    assert main(["--notebooks", str(folder), "--without-png"]) == 0
    assert path.read_bytes() == first


@pytest.mark.slow
def test_a_failing_notebook_is_left_as_it_was_and_named(folder, capsys):
    path = save(folder, "00_a", "1 / 0")
    before = path.read_bytes()
    assert main(["--notebooks", str(folder), "--without-png"]) == 2
    assert "error: 00_a is left as it was: ZeroDivisionError: division by zero" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_an_unknown_notebook_is_exit_code_2(folder, capsys):
    save(folder, "00_a", "1")
    assert main(["--notebooks", str(folder), "--select", "7", "--without-png"]) == 2
    assert "no notebook is called '7': there are 00_a" in capsys.readouterr().err


def test_a_selection_that_names_nothing_and_a_file_that_cannot_be_written_are_exit_code_2(
    folder, capsys, monkeypatch
):
    def refuse(path, _text):
        raise OSError(30, "Read-only file system", str(path))

    save(folder, "00_a", "1")
    asked = ["--notebooks", str(folder), "--without-png"]
    assert main([*asked, "--select", ","]) == 2
    assert "error: ',' names no notebook: there are 00_a\n" in capsys.readouterr().err
    monkeypatch.setattr("rosellm.lab.running.refresh_notebooks.write_text", refuse)
    assert main(asked) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: [Errno 30] Read-only file system")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_is_done_and_leaves_the_rest_as_it_was(folder, capsys, number):
    """The second notebook sends the signal to the command from within its own kernel."""
    note = folder / "pid"
    sources = f"open({str(note)!r}, 'w').write(str(os.getpid()))\nos.kill(os.getppid(), {number})"
    done = save(folder, "00_done", "print(1)")
    cut = save(folder, "01_cut", f"import os, time\n{sources}\ntime.sleep(100)")
    never = save(folder, "02_never", "print(1)")
    before = cut.read_bytes(), never.read_bytes()
    with Interruption() as outer:  # a signal that came too late would end the tests
        status = main(["--notebooks", str(folder), "--without-png"])
    assert (status, outer.number) == (128 + number, None)
    told = f"interrupted by {number.name}: finished 00_done; not finished 01_cut, 02_never"
    assert capsys.readouterr().err.splitlines()[-1] == told
    assert not is_running(int(note.read_text()))
    assert outputs(done)[0][0].text == "1\n"
    assert (cut.read_bytes(), never.read_bytes()) == before
    assert sorted(folder.iterdir()) == [done, cut, never, note]
