"""Notebooks that a stranger finishes: short, few imports, empty exercises whose solutions are right."""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median

import nbformat
import pytest
from nbformat import NotebookNode

from rosellm.lab.records.notebooks import ACTS, NOTEBOOKS as FOUND
from rosellm.roseinfer.recipe import BEFORE
from tests.exercises import solution_in
from tests.side_by_side import SIDE_BY_SIDE

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
LIMITS = {"cells": 40, "words": 1500, "code": 200, "median": 14, "longest": 20, "imports": 5, "columns": 112}
HIDDEN = "hide-input"
CARD = ("Change", "Invariant", "Hypothesis", "Wins", "Loses", "Superseded by")


each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def shape(notebook: NotebookNode) -> dict[str, float]:
    """Cells; words of Markdown; lines of code without blanks: all, a cell's median and most; import lines.

    Cells tagged ``hide-input`` are folded, so their code does not count. Wider lines of code than ``columns``
    run off a page.
    """
    shown = [cell for cell in notebook.cells if HIDDEN not in cell.metadata.get("tags", [])]
    code = [cell.source for cell in shown if cell.cell_type == "code"]
    lines = [n for source in code if (n := sum(map(bool, map(str.strip, source.splitlines()))))]
    text = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    return {
        "cells": len(notebook.cells),
        "words": sum(len(source.split()) for source in text),
        "code": sum(lines),
        "median": median(lines),
        "longest": max(lines),
        "imports": sum(map(_import_lines, code)),
        "columns": max(len(line) for source in code for line in source.splitlines()),
    }


def _import_lines(source: str) -> int:
    nodes = [node for node in ast.parse(source).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes)


def exercises(notebook: NotebookNode) -> Iterator[tuple[str, str]]:
    """Each exercise's cell, and the source of its collapsed solution in the cell below."""
    for cell, below in pairwise(notebook.cells):
        if "exercise" in cell.metadata.get("tags", []):
            yield cell.source, solution_in(below.source)


@each
def test_a_notebook_is_short_enough_to_be_finished(path):
    over = {name: n for name, n in shape(nbformat.read(path, 4)).items() if n > LIMITS[name]}
    assert not over, f"over {LIMITS}"


@each
def test_plumbing_is_folded_in_pages_and_in_lab(path):
    """Parameters, imports alone, the rung's opening and sentences held by claims."""
    plumbing = re.compile(r"\bopen_rung\(|\.(?:conclude|predict|verdict|outcome)\(")
    for cell in nbformat.read(path, 4).cells:
        if cell.cell_type == "code":
            tags = cell.metadata.get("tags", [])
            assert cell.metadata.get("jupyter", {}).get("source_hidden", False) == (HIDDEN in tags)
            if "parameters" in tags or plumbing.search(cell.source):
                assert HIDDEN in tags, cell.source


@each
def test_a_notebook_opens_with_its_card(path):
    first = nbformat.read(path, 4).cells[0].source
    assert [name for name in CARD if f"**{name}**" not in first] == []


@each
def test_an_exercise_is_empty_and_has_a_solution_of_its_name_below_it(path):
    """That the solutions are right, test_notebooks.py shows by running them."""
    found = list(exercises(nbformat.read(path, 4)))
    assert found
    for stub, solution in found:
        (empty,), (written,) = map(_functions, (stub, solution))
        assert empty.name == written.name
        assert all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in empty.body)


@each
def test_a_notebook_takes_the_machines_whose_records_it_shows_and_passes_them_on(path):
    notebook = nbformat.read(path, 4)
    (given,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    assert 'record: str = "nvidia-h200"' in given.source
    calls = [
        node for source in _code(path) for node in ast.walk(ast.parse(source)) if _called(node) == "open_rung"
    ]
    assert calls and all("record" in [keyword.arg for keyword in call.keywords] for call in calls)


# Cells that print figures of the reference's records alone: a notebook, how the cell begins, and why.
REFERENCE_ONLY = {
    ("23", "causes = "): "a prediction",
    ("26", "records = "): "how the shipped models were trained",
    ("27", "rows = "): "times a rival that ran on the reference alone",
    ("28", "floor = "): "a prediction",
    ("28", "def foretold("): "a prediction",
    ("34", "w8 = "): "a prediction",
    ("35", "CACHED, ROWS = "): "a plan",
    ("37", "guess = "): "a plan",
}
RECORDS = re.compile(
    r"\b(?:nb|mixed|epilogue)\.(?:results|ledger|ledger_before|step_us|whole_run_us|verdicts)\b"
)
TELLS = re.compile(r"(?<![.\w])(?:print|say|show|show_table|display|explore)\(")


@each
def test_a_cell_that_shows_records_shows_those_of_every_machine(path):
    """That it names them, test_notebooks.py shows; a sentence's claims rest on the reference."""
    alone = [
        source
        for source in _code(path)
        if RECORDS.search(source) and TELLS.search(source) and not SIDE_BY_SIDE.search(source)
    ]
    known = [start for number, start in REFERENCE_ONLY if path.stem.startswith(number)]
    assert [next(filter(source.startswith, known), source) for source in alone] == known


def verdicts_told(path: Path) -> list[str]:
    """The rungs that a notebook opens against the rung that each changes, and gives a verdict on."""
    nodes = [node for source in _code(path) for node in ast.walk(ast.parse(source))]
    opened = {
        node.targets[0].id: node.value.args[0].value
        for node in nodes
        if isinstance(node, ast.Assign) and _called(node.value) == "open_rung" and len(node.value.args) == 1
    }
    judged = {node.func.value.id for node in nodes if _called(node) == "verdict"}
    return [rung for name, rung in opened.items() if name in judged]


def _code(path: Path) -> list[str]:
    return [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]


def _called(node: ast.AST) -> str:
    """The function or method that a node calls."""
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", ""))


def test_every_rung_is_told_in_one_notebook_which_bears_the_number_of_its_first():
    """What a reader adds may tell of any rung; it must not take a number."""
    known = {number for act in ACTS for number in act.numbers}
    own = [path for path in NOTEBOOKS if path.stem[:2] in known]
    told = {path.stem: rungs for path in own if (rungs := verdicts_told(path))}
    found = [(rung, name) for rung, name in FOUND.items() if name[:2] in known]
    assert [(rung, name) for name, rungs in told.items() for rung in rungs] == found
    assert list(FOUND) == list(BEFORE)
    numbers = [int(name[:2]) + i for name, rungs in told.items() for i in range(len(rungs))]
    assert numbers == sorted(set(numbers))


def test_a_notebook_leads_to_the_next_one():
    """From one of the package: what a reader adds has a number well above."""
    ends = {path.stem: nbformat.read(path, 4).cells[-1].source for path in NOTEBOOKS[1:]}
    pairs = [(name, after) for name, after in pairwise(ends) if int(after[:2]) - int(name[:2]) <= 2]
    assert len(pairs) > 20
    assert [name for name, after in pairs if f"]({after}.ipynb)" not in ends[name]] == []


def _functions(source: str) -> list[ast.FunctionDef]:
    return [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
