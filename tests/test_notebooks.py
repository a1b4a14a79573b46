"""The committed notebooks: fit to be compared by nbval, and alive under other parameters than their own."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import papermill
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

from rosellm.lab.records.records import results_folder
from rosellm.models.families.table import write_arch
from tests.exercises import solved
from tests.helpers import WINDOWED, small_config
from tests.lab.made_up_machine import FOLDER, NAME, add_complete_machine
from tests.side_by_side import SIDE_BY_SIDE
from tests.warm_kernel import WarmKernel

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NON_DEFAULT = {"batch": 3, "new_tokens": 9}
MAX_BYTES = 300_000
MAX_LINES = 25
UNCHECKED = {"nbval-ignore-output", "nbval-skip"}
MACHINE_PATH = re.compile(
    r"(?<![\w.<:/])/(?:data|home|mnt|opt|private|root|srv|tmp|usr|var|work|Users)/[\w.-]+|[A-Z]:\\\\?Users"
)
MACHINES = """from rosellm.lab.records import machines
machines.find = lambda name, _, find=machines.find: find(name, __import__("pathlib").Path({!r}))
del machines"""  # and no name more in the notebook
UNRECORDED = "if nb.verdicts():"  # the cell of a rung whose whole runs no machine has recorded
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def faults(path: Path) -> list[str]:
    """What makes a committed notebook unfit to be compared by nbval, or to be read."""
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    found = [*_execution_faults(code), *_metadata_faults(notebook), *_import_faults(code)]
    if "kernelspec" in notebook.metadata and not found:
        found += _unreadable_parameters(path, code)
    found += [f"a cell of more than {MAX_LINES} lines" for cell in notebook.cells if _is_long(cell)]
    found += [
        f"a path of one machine: {match}" for match in MACHINE_PATH.findall("\n".join(_texts(notebook)))
    ]
    if str(ROOT) in path.read_text(encoding="utf-8"):
        found.append("the path of this checkout")
    if path.stat().st_size >= MAX_BYTES:
        found.append(f"{path.stat().st_size} bytes, {MAX_BYTES} or more")
    return found


def _execution_faults(code: list[NotebookNode]) -> Iterator[str]:
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        yield "code cells not executed once each, in order"
    if any(output.output_type == "error" for cell in code for output in cell.outputs):
        yield "an error among the outputs"
    if any(output.get("name") == "stderr" for cell in code for output in cell.outputs):
        yield "a warning among the outputs"
    if not any(cell.outputs and not UNCHECKED & _tags(cell) for cell in code):
        yield "no output that nbval compares"


def _metadata_faults(notebook: NotebookNode) -> Iterator[str]:
    yield from (f"metadata.{key}" for key in ("widgets", "papermill") if key in notebook.metadata)
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        yield "a kernelspec other than python3"
    if sum("parameters" in _tags(cell) for cell in notebook.cells) != 1:
        yield "not exactly one cell tagged parameters"


def _unreadable_parameters(path: Path, code: list[NotebookNode]) -> Iterator[str]:
    """papermill reads the cell line by line and passes over what it cannot: an ``=`` in a comment, say."""
    cell = _joined([cell for cell in code if "parameters" in _tags(cell)])
    assigned = re.findall(r"^(\w+) *[:=]", cell, re.MULTILINE)
    known = papermill.inspect_notebook(path)
    for name in assigned:
        if name not in known:
            yield f"a parameter that papermill cannot read: {name}"
        elif known[name]["inferred_type_name"] == "None":
            yield f"a parameter without a type: {name}"


def _import_faults(code: list[NotebookNode]) -> Iterator[str]:
    imported = re.findall(
        r"^\s*(?:import|from) +(rosellm|transformers|triton)\b", _joined(code), re.MULTILINE
    )
    if "rosellm" not in imported or imported[0] != "rosellm":
        yield "rosellm not imported, or not before transformers and triton"


def _code(path: Path) -> list[str]:
    return [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]


def _joined(cells: list[NotebookNode]) -> str:
    return "\n".join(cell.source for cell in cells)


def _tags(cell: NotebookNode) -> set[str]:
    return set(cell.metadata.get("tags", []))


def _is_long(cell: NotebookNode) -> bool:
    return len(cell.source.splitlines()) > MAX_LINES


def _texts(notebook: NotebookNode) -> Iterator[str]:
    for cell in notebook.cells:
        yield cell.source
        for output in cell.get("outputs", []):
            yield output.get("text", "")
            yield from (
                str(data) for kind, data in output.get("data", {}).items() if kind.startswith("text/")
            )


def sound() -> NotebookNode:
    cells = [
        new_markdown_cell("# Why? See https://example.org/usr/share, `</b>` and results/tmp/x."),
        new_code_cell("batch: int = 4", execution_count=1, metadata={"tags": ["parameters"]}),
        new_code_cell("import rosellm\nimport transformers", execution_count=2),
        new_code_cell("print(batch)", execution_count=3, outputs=[new_output("stream", text="4\n")]),
        new_code_cell("# timing", execution_count=4, metadata={"tags": ["nbval-ignore-output"]}),
        new_code_cell(""),
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel})


def _set(index: int, **fields: object) -> Callable[[NotebookNode], None]:
    return lambda notebook: notebook.cells[index].update(fields)


def _meta(**fields: object) -> Callable[[NotebookNode], None]:
    return lambda notebook: notebook.metadata.update(fields)


ERROR = new_output("error", ename="ValueError", evalue="x", traceback=[])
SPOILT = {
    "a cell not executed": (_set(3, execution_count=None), "not executed once each"),
    "an error": (_set(4, outputs=[ERROR]), "an error among"),
    "a parameter unread": (_set(1, source='batch: int = 4  # or model="x"'), "cannot read: batch"),
    "a parameter untyped": (_set(1, source="batch = 4"), "without a type: batch"),
    "stripped outputs": (_set(3, outputs=[]), "no output that nbval compares"),
    "only unchecked outputs": (_set(3, metadata={"tags": ["nbval-ignore-output"]}), "no output that nbval"),
    "widget state": (_meta(widgets={}), "metadata.widgets"),
    "another kernel": (_meta(kernelspec={"name": "mine", "display_name": "x"}), "other than python3"),
    "no rosellm": (_set(2, source="import torch"), "rosellm not imported"),
    "transformers first": (
        _set(2, source="from transformers import x\nimport rosellm"),
        "before transformers",
    ),
    "no parameters": (_set(1, metadata={}), "not exactly one cell tagged parameters"),
    "a long cell": (_set(2, source="import rosellm\n" + "x = 1\n" * 25), "more than 25 lines"),
    "a home folder": (_set(3, outputs=[new_output("stream", text="in /home/me/x.py")]), "/home/me"),
    "a path in a table": (_set(4, outputs=[new_output("display_data", {"text/html": "'/opt/x'"})]), "/opt/x"),
    "this checkout": (
        _set(4, outputs=[new_output("display_data", {"a/b": str(ROOT)})]),
        "path of this checkout",
    ),
    "too many bytes": (_set(4, outputs=[new_output("stream", text="x" * MAX_BYTES)]), "300000 or more"),
}


def test_a_sound_notebook_has_no_faults(tmp_path):
    nbformat.write(sound(), tmp_path / "sound.ipynb")
    assert faults(tmp_path / "sound.ipynb") == []


@pytest.mark.parametrize("case", SPOILT)
def test_the_guard_finds_each_fault_alone(case, tmp_path):
    notebook = sound()
    spoil, expected = SPOILT[case]
    spoil(notebook)
    nbformat.write(notebook, tmp_path / "spoilt.ipynb")
    (found,) = faults(tmp_path / "spoilt.ipynb")
    assert expected in found


@each_notebook
def test_a_committed_notebook_has_no_faults(path):
    assert faults(path) == []


def other_parameters(path: Path) -> dict[str, int]:
    known = papermill.inspect_notebook(path)
    given = {name: value for name, value in NON_DEFAULT.items() if name in known}
    assert given, f"none of {sorted(NON_DEFAULT)} among {sorted(known)}"
    assert all(known[name]["default"] != str(value) for name, value in given.items())
    return given


@pytest.fixture
def kernel() -> Iterator[WarmKernel]:
    kernel = WarmKernel(cwd=str(ROOT / "notebooks"))
    yield kernel
    kernel.stop()


def first_answers(kernel: WarmKernel, path: Path, parameters: dict[str, Any]) -> list[str]:
    """What the cells up to the first that uses the parameters say."""
    notebook = parameterize_notebook(load_notebook_node(str(path)), parameters)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    (injected,) = [i for i, cell in enumerate(code) if "injected-parameters" in _tags(cell)]
    return [kernel.run(cell.source) for cell in code[: injected + 2]]


def _with_solutions(notebook: NotebookNode) -> Iterator[str]:
    """Each code cell's source; an exercise is solved, and must be right."""
    for cell, below in zip(notebook.cells, [*notebook.cells[1:], new_markdown_cell()], strict=True):
        if cell.cell_type == "code":
            yield solved(cell.source, below.source) if "exercise" in _tags(cell) else cell.source


QUICK = ("03",)  # the others' second run is slow


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.stem[:2] in QUICK else pytest.mark.slow) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_a_notebook_refuses_a_bad_parameter_and_runs_with_others_than_its_own(path, kernel, results):
    """Its tables and charts of records show the machine that ``record`` names beside the reference."""
    *before, told = first_answers(kernel, path, {"batch": 0})
    assert told == "ParameterError: batch is 0; give a whole number, 1 or more"
    assert not any(before)
    assert kernel.run(MACHINES.format(str(results))) == ""
    given = other_parameters(path) | {"record": f"{FOLDER},cpu"}  # one that lacks nothing, one nearly all
    assert first_fault(kernel, path, given, NAME) is None


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """The machines' folders: the committed ones, and that of a made-up one which lacks nothing."""
    copy = tmp_path_factory.mktemp("results") / "results"
    shutil.copytree(results_folder(), copy)
    add_complete_machine(copy)
    return copy


def first_fault(
    kernel: WarmKernel, path: Path, parameters: dict[str, Any], name: str = ""
) -> tuple[str, str] | None:
    """The error of the first cell that fails, or shows records but not those of ``name``, and its source."""
    notebook = parameterize_notebook(load_notebook_node(str(path)), parameters)
    for source in _with_solutions(notebook):
        error = kernel.run(source)
        shows = name and SIDE_BY_SIDE.search(source) and not source.startswith(UNRECORDED)
        shows = shows and not re.search("are recorded yet|so not compared", kernel.said)
        if error:
            return error, source
        if shows and (name not in kernel.said or f"record, {name}" in kernel.said):
            return f"{name} is not shown", source
    return None


@pytest.mark.slow
@pytest.mark.parametrize("number", ["01", "14"])
def test_a_model_may_have_fewer_positions_than_the_shipped_one(number, tmp_path, kernel):
    shape = small_config(n_positions=100, vocab_size=300)
    (tmp_path / "config.json").write_text(json.dumps(write_arch(shape)))
    (path,) = [path for path in NOTEBOOKS if path.stem.startswith(number)]
    given = {"model": str(tmp_path), "load_format": "dummy", "prompt_lengths": [2, 20]}
    assert first_fault(kernel, path, NON_DEFAULT | given) is None


def test_pieces_of_long_contexts_may_lie_before_a_sliding_window(tmp_path, kernel):
    shape = small_config(**WINDOWED, n_positions=2048, vocab_size=300, head_dim=16)
    (tmp_path / "config.json").write_text(json.dumps(write_arch(shape)))
    (path,) = [path for path in NOTEBOOKS if path.stem == "27_long_contexts"]
    assert first_fault(kernel, path, {"model": str(tmp_path), "load_format": "dummy"}) is None
