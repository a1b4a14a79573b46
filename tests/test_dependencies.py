"""pyproject.toml names every package that the code imports."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = packages_distributions()
RIVALS = {"vllm"}  # measured where it happens to be installed


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(*extras: str) -> set[str]:
    wanted = [
        *PROJECT["dependencies"],
        *(w for extra in extras for w in PROJECT["optional-dependencies"][extra]),
    ]
    return {normal(re.match(r"[\w.-]+", requirement)[0]) for requirement in wanted}


def imported(folder: Path) -> dict[str, str]:
    """Packages from outside that files below ``folder`` import, in functions too, and one file of each."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            found |= {name.partition(".")[0]: path.name for name in names}
    return {
        name: path
        for name, path in found.items()
        if name not in {*sys.stdlib_module_names, *RIVALS, "rosellm"}
    }


@pytest.mark.parametrize(
    ("room", "extras"), [("models", ()), ("roseinfer", ()), ("rosetrainer", ()), ("lab", ("notebooks",))]
)
def test_each_package_that_a_room_imports_is_declared(room: str, extras: tuple[str, ...]) -> None:
    known = declared(*extras)
    packages = imported(ROOT / "rosellm" / room)
    assert "torch" in packages
    undeclared = {
        name: path
        for name, path in packages.items()
        if not known & {normal(distribution) for distribution in DISTRIBUTIONS.get(name, [name])}
    }
    assert not undeclared
