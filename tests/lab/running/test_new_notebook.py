"""A rung of one's own, and a notebook of it, in a copy of the project: two steps, and everything holds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from rosellm.lab.running.execution import NotebookError
from rosellm.lab.running.new_notebook import draft

ROOT = Path(__file__).parents[3]
LAST = '    ("one_pass", "split_kv", {"exhibit": "one_pass"}),\n'
MINE = '    ("my_idea", "dependent_launch", {"attention": "split"}),\n'
STILL_HOLD = (
    "tests/lab/figures/test_ladder.py",
    "tests/lab/records/test_verdicts.py",
    "tests/lab/running/test_gallery.py",
    "tests/lab/trying/test_try_rung.py::test_bad_requests_are_refused_in_one_line",
    "tests/roseinfer/test_recipe.py",
    "tests/test_notebooks.py::test_a_committed_notebook_has_no_faults[50_my_idea]",
    "tests/test_notebooks.py::test_a_notebook_refuses_a_bad_parameter_and_runs_with_others_than_its_own[00_map]",
    "tests/test_notebooks.py::test_a_notebook_refuses_a_bad_parameter_and_runs_with_others_than_its_own[50_my_idea]",
    "tests/test_notebooks.py::test_a_notebook_is_short_enough_to_be_finished_and_opens_with_its_card",
    "tests/test_notebooks.py::test_an_exercise_is_empty_and_has_a_solution_of_its_name_below_it",
    "tests/test_notebooks.py::test_a_notebook_takes_the_machines_whose_records_it_shows_and_passes_them_on",
    "tests/test_notebooks.py::test_every_rung_is_told_in_one_notebook_which_bears_the_number_of_its_first",
    "tests/test_notebooks.py::test_a_notebook_leads_to_the_next_one",
    "notebooks/50_my_idea.ipynb",
)
NBVAL = ("--nbval", "--nbval-current-env", "--nbval-sanitize-with", "notebooks/nbval_sanitize.cfg")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy with one rung more."""
    for name in ("rosellm", "notebooks", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for name in ("README.md", "conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    ladder = tmp_path / "rosellm/roseinfer/recipe.py"
    text = ladder.read_text()
    assert LAST in text
    ladder.write_text(text.replace(LAST, LAST + MINE))
    return tmp_path


def ran(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    environment = inherited | {"PYTHONPATH": str(project), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_a_rung_added_by_one_line_and_a_notebook_made_by_one_command_leave_all_whole(project):
    made = ran(project, "rosellm.lab.running.new_notebook", "50_my_idea")
    assert made.returncode == 0, made.stderr
    tested = ran(project, "pytest", *STILL_HOLD, *NBVAL, "-m", "not browser", "-q", "-p", "no:cacheprovider")
    assert tested.returncode == 0, tested.stdout[-3000:]


def test_a_notebook_of_no_rung_has_two_others_to_begin_with():
    for name, rung in (("27_why_so_slow", "paged"), ("27_no_mask", "no_mask")):
        notebook = nbformat.reads(draft(name), as_version=4)
        assert f'open_rung("{rung}"' in notebook.cells[3].source
        assert notebook.cells[0].source.startswith(f"# 27 · {name[3:]}\n")


@pytest.mark.parametrize("name", ["my_idea", "7_x", "27-x", "27_My", "27_", "../27_x", ""])
def test_a_name_without_number_and_topic_is_refused(name):
    with pytest.raises(NotebookError, match="two digits and a topic"):
        draft(name)
