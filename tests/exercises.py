"""A notebook's exercises: an empty stub, and below it a collapsed solution that takes its place in tests."""

import ast
import re

FENCE = re.compile(r"<details>.*?```python\n(.*?)```", re.DOTALL)


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
