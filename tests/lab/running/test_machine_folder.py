"""A folder of a made-up device in a copy of the project: every page shows it, and no code has changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.lab.made_up_machine import FOLDER, LACKING, NAME, add_made_up_machine

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    copy = tmp_path_factory.mktemp("project")
    for name in ("rosellm", "notebooks"):
        ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, copy)
    add_made_up_machine(copy / "notebooks" / "results")
    return copy


def ran(project: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(project), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def shown(notebook: Path) -> str:
    """All that an executed notebook says, figures as their JSON."""
    cells = nbformat.read(notebook, 4).cells
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(str(output.get("data", output.get("text"))) for output in outputs)


@pytest.mark.slow
def test_a_notebook_and_the_map_show_the_machine_beside_the_h200(project):
    run = ["rosellm.lab.running.run_notebooks", "--select", "00 05", "--parameters", f"record={FOLDER}"]
    ran(project, *run)
    rung, map_ = (shown(project / "build" / f"{name}.ipynb") for name in ("05_cuda_graph", "00_map"))
    assert f"W1, {NAME}" in rung and f"W1<br>, {NAME}" not in rung
    assert f"on NVIDIA H200 and {NAME}" in rung  # its chart of whole runs
    assert f"no such record, {NAME}: {LACKING}" in rung
    assert f"● {NAME}" in map_  # the ladder's chart
    assert f"| {NAME} |" in map_  # the table of gains
    assert f"W2, {NAME}" in map_ and f"no such record, {NAME}: {LACKING}" in map_  # the table of steps
