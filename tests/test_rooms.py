"""The rooms of the package, which `docs/architecture.md` describes: who may import whom (pyproject.toml)."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rosellm"
LAYERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0][
    "layers"
]


@cache
def modules() -> dict[str, ast.Module]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text())
        for path in PACKAGE.rglob("*.py")
    }


def imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the modules that a file imports from, and the names that it takes from each."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((one.name, "") for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", one.name) for one in node.names)


def test_files_import_only_downwards_and_in_no_circle() -> None:
    from importlinter.cli import lint_imports  # here: the import takes a second of every worker

    assert lint_imports(config_filename=str(ROOT / "pyproject.toml")) == 0


def test_every_file_has_a_room() -> None:
    rooms = tuple(room.strip() for layer in LAYERS for room in layer.split(" :"))
    doors = {"rosellm.__init__", "rosellm.roseinfer.__init__", "rosellm.lab.__init__"}
    assert {name for name in modules() if not f"{name}.".startswith(tuple(f"{r}." for r in rooms))} == doors


def test_no_private_name_is_imported_by_another_file() -> None:
    taken = [(name, *one) for name, tree in modules().items() for one in imports(tree)]
    assert [one for one in taken if one[1].startswith("rosellm") and one[2].startswith("_")] == []


def test_the_front_doors_of_folders_import_only_the_standard_library() -> None:
    doors = [
        tree for name, tree in modules().items() if name.endswith("__init__") and name != "rosellm.__init__"
    ]
    assert len(doors) > 5
    found = {module.partition(".")[0] for tree in doors for module, _ in imports(tree)}
    assert found <= sys.stdlib_module_names
