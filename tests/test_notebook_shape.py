"""Notebooks that a stranger finishes: short, few imports, empty exercises whose solutions are right."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import nbformat
import pytest
from nbformat import NotebookNode

from rosellm.lab.rung import exercise

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
LIMITS = {"cells": 30, "words": 800, "code": 150, "median": 7, "longest": 15, "imports": 4}
CARD = ("Change", "Invariant", "Hypothesis", "Wins", "Loses", "Superseded by")
FENCE = re.compile(r"<details>.*?```python\n(.*?)```", re.DOTALL)


def is_lean(path: Path) -> bool:
    """Whether a notebook has the short form: those of older form are rewritten one by one."""
    return "open_rung(" in path.read_text(encoding="utf-8")


LEAN = [path for path in NOTEBOOKS if is_lean(path)]
each = pytest.mark.parametrize("path", LEAN, ids=lambda path: path.stem)


def shape(notebook: NotebookNode) -> dict[str, float]:
    """Cells; words of Markdown; lines of code without blanks: all, a cell's median and most; import lines."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    lines = [n for source in code if (n := sum(map(bool, map(str.strip, source.splitlines()))))]
    text = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    return {
        "cells": len(notebook.cells),
        "words": sum(len(source.split()) for source in text),
        "code": sum(lines),
        "median": median(lines),
        "longest": max(lines),
        "imports": sum(map(_import_lines, code)),
    }


def _import_lines(source: str) -> int:
    nodes = [node for node in ast.parse(source).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes)


def exercises(notebook: NotebookNode) -> Iterator[tuple[str, str]]:
    """Each exercise's cell, and the source of its collapsed solution in the cell below."""
    for cell, below in zip(notebook.cells, [*notebook.cells[1:], {"source": ""}], strict=True):
        if "exercise" in cell.metadata.get("tags", []):
            solution = FENCE.search(below["source"])
            yield cell.source, solution[1] if solution else ""


@each
def test_a_notebook_is_short_enough_to_be_finished(path):
    over = {name: n for name, n in shape(nbformat.read(path, 4)).items() if n > LIMITS[name]}
    assert not over, f"over {LIMITS}"


@each
def test_a_notebook_opens_with_its_card(path):
    first = nbformat.read(path, 4).cells[0].source
    assert [name for name in CARD if f"**{name}**" not in first] == []


@each
def test_an_exercise_is_empty_and_its_solution_is_right(path, capsys):
    found = list(exercises(nbformat.read(path, 4)))
    assert found
    for stub, solution in found:
        assert "..." in stub and solution.startswith("def "), "an empty stub, a solution below it"
        call = stub[stub.index("exercise(") :]
        namespace = _run_until(path, stub)
        exec(f"{solution}\n{call}", namespace)
        assert capsys.readouterr().out.endswith(": right\n")


def _run_until(path: Path, stub: str) -> dict[str, object]:
    """What an exercise may use: imports and definitions of the cells above it."""
    namespace: dict[str, object] = {"exercise": exercise}
    for cell in nbformat.read(path, 4).cells:
        if cell.source == stub:
            break
        if cell.cell_type == "code":
            kept = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
            body = [node for node in ast.parse(cell.source).body if isinstance(node, kept)]
            exec(compile(ast.Module(body, []), path.name, "exec"), namespace)
    return namespace


def test_the_shape_of_a_notebook_is_counted():
    cells = [
        nbformat.v4.new_markdown_cell("one two\nthree"),
        nbformat.v4.new_code_cell("from a import (\n    b,\n    c,\n)\n\nx = 1"),
        nbformat.v4.new_code_cell("y = 2"),
        nbformat.v4.new_code_cell(""),
    ]
    counted = shape(nbformat.v4.new_notebook(cells=cells))
    assert counted == {"cells": 4, "words": 3, "code": 6, "median": 3, "longest": 5, "imports": 4}
