"""The committed notebooks: short, fit to be compared by nbval, alive under other parameters as well."""

import ast
import json
import re
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import nbformat
import papermill
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

from rosellm.lab.records.notebooks import ACTS, NOTEBOOKS as FOUND
from rosellm.lab.records.records import results_folder
from rosellm.models.families.table import write_arch
from rosellm.roseinfer.recipe import BEFORE
from tests.helpers import WINDOWED, small_config
from tests.lab.made_up_machine import FOLDER, NAME, add_complete_machine
from tests.warm_kernel import WarmKernel

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NON_DEFAULT = {"batch": 3, "new_tokens": 9}
MAX_BYTES = 300_000
MAX_LINES = 25
LIMITS = {"cells": 40, "words": 1500, "code": 200, "median": 14, "longest": 20, "imports": 5, "columns": 112}
CARD = ("Change", "Invariant", "Hypothesis", "Wins", "Loses", "Superseded by")
HIDDEN = "hide-input"
UNCHECKED = {"nbval-ignore-output", "nbval-skip"}
MACHINE_PATH = re.compile(
    r"(?<![\w.<:/])/(?:data|home|mnt|opt|private|root|srv|tmp|usr|var|work|Users)/[\w.-]+|[A-Z]:\\\\?Users"
)
OUR_IMPORT = re.compile(r"^\s*(?:import|from) +(rosellm|transformers|triton)\b", re.MULTILINE)
MACHINES = """from rosellm.lab.records import machines
machines.find = lambda name, _, find=machines.find: find(name, __import__("pathlib").Path({!r}))
del machines"""  # and no name more in the notebook
UNRECORDED = "if nb.verdicts():"  # the cell of a rung whose whole runs no machine has recorded
# How a cell shows the records of every machine.
METHODS = (
    "print_table", "each_machine", "recorded", "predict", "outcome", "verdict", "ablation", "timeline",
    "waterfall",
)  # fmt: skip
RUNGS = "nb|append|equal|mixed|resident|shared|epilogue|early"  # what notebooks call the rungs that they open
SIDE_BY_SIDE = re.compile(rf"\b(?:{RUNGS})\.(?:(?:{'|'.join(METHODS)})\(|(?:machines|others)\b)")
FENCE = re.compile(r"<details>.*?```python\n(.*?)```", re.DOTALL)
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def sources(path: Path) -> list[str]:
    return [cell.source for cell in code_cells(nbformat.read(path, 4))]


def tags(cell: NotebookNode) -> set[str]:
    return set(cell.metadata.get("tags", []))


def faults(path: Path) -> list[str]:
    """What makes a committed notebook unfit to be compared by nbval, or to be read."""
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in code_cells(notebook) if cell.source.strip()]
    outputs = [output for cell in code for output in cell.outputs]
    imported = OUR_IMPORT.findall("\n".join(cell.source for cell in code))
    tests = {
        "code cells not executed once each, in order": [cell.execution_count for cell in code]
        != list(range(1, len(code) + 1)),
        "an error among the outputs": any(output.output_type == "error" for output in outputs),
        "a warning among the outputs": any(output.get("name") == "stderr" for output in outputs),
        "no output that nbval compares": not any(c.outputs and not UNCHECKED & tags(c) for c in code),
        "metadata of widgets or papermill": {"widgets", "papermill"} & notebook.metadata.keys(),
        "a kernelspec other than python3": notebook.metadata.kernelspec.name != "python3",
        "not exactly one cell tagged parameters": sum("parameters" in tags(c) for c in notebook.cells) != 1,
        "rosellm not imported, or not before transformers and triton": imported[:1] != ["rosellm"],
        f"a cell of more than {MAX_LINES} lines": any(
            len(cell.source.splitlines()) > MAX_LINES for cell in notebook.cells
        ),
        "a path of one machine": MACHINE_PATH.search("\n".join(texts(notebook))),
        "the path of this checkout": str(ROOT) in path.read_text(encoding="utf-8"),
        "a cell folded in pages or in Lab alone": any(
            cell.metadata.get("jupyter", {}).get("source_hidden", False) != (HIDDEN in tags(cell))
            for cell in code
        ),
        f"{MAX_BYTES} bytes or more": path.stat().st_size >= MAX_BYTES,
    }
    return [told for told, is_so in tests.items() if is_so] or list(unreadable_parameters(path, code))


def texts(notebook: NotebookNode) -> Iterator[str]:
    for cell in notebook.cells:
        yield cell.source
        for output in cell.get("outputs", []):
            yield output.get("text", "")
            yield from (
                str(data) for kind, data in output.get("data", {}).items() if kind.startswith("text/")
            )


def unreadable_parameters(path: Path, code: list[NotebookNode]) -> Iterator[str]:
    """papermill reads the cell line by line and passes over what it cannot: an ``=`` in a comment, say."""
    (cell,) = [cell for cell in code if "parameters" in tags(cell)]
    known = papermill.inspect_notebook(path)
    for name in re.findall(r"^(\w+) *[:=]", cell.source, re.MULTILINE):
        if name not in known:
            yield f"a parameter that papermill cannot read: {name}"
        elif known[name]["inferred_type_name"] == "None":
            yield f"a parameter without a type: {name}"


@each_notebook
def test_a_committed_notebook_has_no_faults(path):
    assert faults(path) == []


def shape(notebook: NotebookNode) -> dict[str, float]:
    """Cells; words of Markdown; lines of code without blanks: all, a cell's median and most; import lines.

    Cells tagged ``hide-input`` are folded, so their code does not count. Wider lines of code than ``columns``
    run off a page.
    """
    code = [cell.source for cell in code_cells(notebook) if HIDDEN not in tags(cell)]
    lines = [n for source in code if (n := sum(map(bool, map(str.strip, source.splitlines()))))]
    text = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    return {
        "cells": len(notebook.cells),
        "words": sum(len(source.split()) for source in text),
        "code": sum(lines),
        "median": median(lines),
        "longest": max(lines),
        "imports": sum(map(import_lines, code)),
        "columns": max(len(line) for source in code for line in source.splitlines()),
    }


def import_lines(source: str) -> int:
    nodes = [node for node in ast.parse(source).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes)


@each_notebook
def test_a_notebook_is_short_enough_to_be_finished_and_opens_with_its_card(path):
    notebook = nbformat.read(path, 4)
    assert {name: n for name, n in shape(notebook).items() if n > LIMITS[name]} == {}
    assert [name for name in CARD if f"**{name}**" not in notebook.cells[0].source] == []


# Exercises: an empty stub, and below it a collapsed solution that takes its place when notebooks run.


def solution_in(markdown: str) -> str:
    """The source within the first collapsed block; "" if there is none."""
    found = FENCE.search(markdown)
    return found[1] if found else ""


def solved(stub: str, below: str) -> str:
    """A cell that defines the solution in place of the stub, and asserts what ``exercise`` checks."""
    tree = ast.parse(stub)
    kept = [ast.get_source_segment(stub, node) or "" for node in tree.body if not _is_stub(node)]
    return "\n".join([solution_in(below), *map(_asserted, kept)])


def _is_stub(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and all(isinstance(one, ast.Expr) for one in node.body)


def _asserted(source: str) -> str:
    node = ast.parse(source).body[0]
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = ast.unparse(node.value.func)
        if called.rpartition(".")[2] == "exercise":
            given = ast.unparse(node.value)[len(called) :]
            checked = f"wrong = what_fails{given}\nassert wrong is None, wrong"
            return f"from rosellm.lab.rung import what_fails\n{checked}"
    return source


@each_notebook
def test_an_exercise_is_empty_and_has_a_solution_of_its_name_below_it(path):
    """That the solutions are right, the notebook's run below shows."""
    cells = nbformat.read(path, 4).cells
    found = [
        (cell.source, solution_in(below.source))
        for cell, below in pairwise(cells)
        if "exercise" in tags(cell)
    ]
    assert found
    for exercise in found:
        empty, written = (
            node
            for source in exercise
            for node in ast.parse(source).body
            if isinstance(node, ast.FunctionDef)
        )
        assert empty.name == written.name
        assert all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in empty.body)


@each_notebook
def test_a_notebook_takes_the_machines_whose_records_it_shows_and_passes_them_on(path):
    (given,) = [cell for cell in nbformat.read(path, 4).cells if "parameters" in tags(cell)]
    assert 'record: str = "nvidia-h200"' in given.source
    nodes = [node for source in sources(path) for node in ast.walk(ast.parse(source))]
    calls = [node for node in nodes if _called(node) == "open_rung"]
    assert calls and all("record" in [keyword.arg for keyword in call.keywords] for call in calls)


def verdicts_told(path: Path) -> list[str]:
    """The rungs that a notebook opens against the rung that each changes, and gives a verdict on."""
    nodes = [node for source in sources(path) for node in ast.walk(ast.parse(source))]
    opened = {
        node.targets[0].id: node.value.args[0].value
        for node in nodes
        if isinstance(node, ast.Assign) and _called(node.value) == "open_rung" and len(node.value.args) == 1
    }
    judged = {node.func.value.id for node in nodes if _called(node) == "verdict"}
    for node in nodes:
        if _called(node) == "recorded" and node.args:  # one table of several rungs
            judged |= {one.id for one in (node.func.value, *node.args) if isinstance(one, ast.Name)}
    return [rung for name, rung in opened.items() if name in judged]


def _called(node: ast.AST) -> str:
    """The function or method that a node calls."""
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", ""))


def test_every_rung_is_told_in_one_notebook_and_first_rungs_are_in_order():
    """What a reader adds may tell of any rung; it must not take a number."""
    known = {number for act in ACTS for number in act.numbers}
    told = [(rung, path.stem) for path in NOTEBOOKS if path.stem[:2] in known for rung in verdicts_told(path)]
    found = [(rung, name) for rung, name in FOUND.items() if name[:2] in known]
    assert sorted(told) == sorted(found)
    assert list(FOUND) == list(BEFORE)
    names = list(dict.fromkeys(name for _, name in found))
    assert names == sorted(names)


def test_a_notebook_leads_to_the_next_one():
    """From each of the acts, in the order of their numbers, but the first act, which leads into them."""
    known = {number for act in ACTS[1:] for number in act.numbers}
    own = [path for path in NOTEBOOKS if path.stem[:2] in known]
    ends = {path.stem: nbformat.read(path, 4).cells[-1].source for path in own}
    pairs = list(pairwise(ends))
    assert len(pairs) > 20
    assert [name for name, after in pairs if f"]({after}.ipynb)" not in ends[name]] == []


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
    code = code_cells(notebook)
    (injected,) = [i for i, cell in enumerate(code) if "injected-parameters" in tags(cell)]
    return [kernel.run(cell.source) for cell in code[: injected + 2]]


def _with_solutions(notebook: NotebookNode) -> Iterator[str]:
    """Each code cell's source; an exercise is solved, and must be right."""
    for cell, below in zip(notebook.cells, [*notebook.cells[1:], new_markdown_cell()], strict=True):
        if cell.cell_type == "code":
            yield solved(cell.source, below.source) if "exercise" in tags(cell) else cell.source


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
@pytest.mark.parametrize(
    ("number", "sizes", "parameters"),
    [
        ("01", {"n_positions": 100}, NON_DEFAULT | {"prompt_lengths": [2, 20]}),
        ("14", {"n_positions": 100}, NON_DEFAULT | {"prompt_lengths": [2, 20]}),
        ("27", {**WINDOWED, "n_positions": 2048, "head_dim": 16}, {}),
    ],
    ids=["few-positions-01", "few-positions-14", "pieces-before-a-sliding-window"],
)
def test_a_notebook_runs_with_a_model_of_another_shape(number, sizes, parameters, tmp_path, kernel):
    arch = write_arch(small_config(vocab_size=300, **sizes))
    (tmp_path / "config.json").write_text(json.dumps(arch))
    (path,) = [path for path in NOTEBOOKS if path.stem.startswith(number)]
    given = parameters | {"model": str(tmp_path), "load_format": "dummy"}
    assert first_fault(kernel, path, given) is None
