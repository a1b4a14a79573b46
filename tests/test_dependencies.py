"""pyproject.toml names every package that the code imports."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from rosellm.lab.figures import _NEEDED

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
    ("room", "extras"),
    [
        ("models", ()),
        ("roseinfer", ()),
        ("bench", ()),
        ("cluster", ("cluster",)),
        ("rosetrainer", ()),
        ("lab", ("notebooks",)),
    ],
)
def test_each_package_that_a_room_imports_is_declared(room: str, extras: tuple[str, ...]) -> None:
    known = declared(*extras)
    packages = imported(ROOT / "rosellm" / room)
    assert "numpy" in packages or "torch" in packages or "ray" in packages
    undeclared = {
        name: path
        for name, path in packages.items()
        if not known & {normal(distribution) for distribution in DISTRIBUTIONS.get(name, [name])}
    }
    assert not undeclared


@pytest.mark.slow
def test_the_lab_without_its_extra_says_which_extra_and_the_engine_needs_none() -> None:
    code = """
import sys
for name in ('plotly', 'papermill', 'ray'):
    sys.modules[name] = None
import rosellm.roseinfer.llm
import rosellm.lab.records.llama_1b_protocol
import rosellm.lab.rung
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    wanted = "ModuleNotFoundError: rosellm.lab needs papermill, plotly: pip install 'rosellm[notebooks]'"
    assert done.stderr.splitlines()[-1] == wanted


def test_the_lab_looks_for_every_package_of_its_extra() -> None:
    needed = {normal(found) for name in _NEEDED.split() for found in DISTRIBUTIONS.get(name, [name])}
    assert declared("notebooks") - declared() - {"jupyterlab", "traitlets"} <= needed


@pytest.mark.slow
def test_the_source_distribution_carries_what_a_checkout_has(tmp_path: Path) -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    build = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (archive,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        carried = {name.partition("/")[2] for name in tar.getnames()}
    assert set(files.split()) - carried <= {".gitignore", ".ci/run"}
