"""The files around the package agree with each other, and make does no work twice."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def make(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    return subprocess.run(["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The Makefile in a folder of its own, whose .venv holds a Python that only writes down its arguments."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@" >> calls\n')
    python.chmod(0o755)
    return tmp_path


def installs(folder: Path) -> int:
    return (folder / "calls").read_text().count("-m uv pip install")


def test_setup_installs_once_says_how_long_it_took_and_installs_again_only_after_pyproject_changed(copy):
    assert re.search(r"^\.venv is ready, after \d+ s$", make("setup", folder=copy).stdout, re.MULTILINE)
    assert "ready" not in make("setup", folder=copy).stdout
    assert installs(copy) == 1
    stamp = (copy / ".venv/.installed").stat().st_mtime
    os.utime(copy / "pyproject.toml", (stamp + 5, stamp + 5))
    make("setup", folder=copy)
    assert installs(copy) == 2


@pytest.mark.parametrize("target", ["notebooks", "test", "test-all", "lint", "lab", "measure", "refresh"])
def test_every_command_may_come_first_and_then_only_runs(copy, target):
    assert make(target, folder=copy).returncode == 0
    assert make(target, folder=copy).returncode == 0
    calls = (copy / "calls").read_text().splitlines()
    runs = [call for call in calls if not call.startswith(("-m pip", "-m uv"))]
    assert installs(copy) == 1
    assert len(runs) == 2 * len(set(runs))


def test_the_browser_extra_comes_with_the_browser_tests_only_and_once(copy):
    make("test", folder=copy)
    assert "browser]" not in (copy / "calls").read_text()
    for _ in range(2):
        assert make("test-browser", folder=copy).returncode == 0
    calls = (copy / "calls").read_text()
    assert calls.count("-e .[browser]") == 1 and calls.count("pytest tests/browser -m browser") == 2


def test_pip_installs_the_project_if_uv_cannot(copy):
    (copy / ".venv/bin/python").write_text('#!/bin/sh\necho "$@" >> calls\ntest $2 != uv\n')
    assert "pip tries" in make("setup", folder=copy).stdout
    assert (copy / "calls").read_text().splitlines()[-1].endswith("-e .[cluster,notebooks,serve,test]")
    assert (copy / ".venv/.installed").exists()


def test_a_failed_installation_is_not_taken_for_done(copy):
    (copy / ".venv/bin/python").write_text("#!/bin/sh\ntest $3 = --version\n")
    assert make("setup", folder=copy).returncode != 0
    assert not (copy / ".venv/.installed").exists()


def test_setup_for_a_cpu_takes_torch_without_cuda_and_once(copy):
    for _ in range(2):
        assert make("setup", "CPU=1", folder=copy).returncode == 0
    calls = (copy / "calls").read_text().splitlines()
    (torch,) = [requirement for requirement in PROJECT["dependencies"] if requirement.startswith("torch")]
    _uv, first, then = [call for call in calls if "pip install" in call]
    assert first.endswith(f" --torch-backend cpu {torch}")
    assert then.endswith(" -e .[cluster,notebooks,serve,test]")


@pytest.mark.parametrize(("name", "used"), [("mine", True), ("base", False)])
def test_an_active_conda_environment_is_used_but_not_the_base_one(copy, name, used):
    conda = copy / "conda"
    shutil.copytree(copy / ".venv", conda)
    assert make("setup", f"CONDA_PREFIX={conda}", f"CONDA_DEFAULT_ENV={name}", folder=copy).returncode == 0
    assert (conda / ".installed").exists() == used
    assert (copy / ".venv/.installed").exists() != used


def test_clean_leaves_the_working_copy_of_the_notebooks(copy):
    for name in ("build/lab/notebooks", "build/other", "rosellm", "tests"):
        (copy / name).mkdir(parents=True)
    assert make("clean", folder=copy).returncode == 0
    assert [path.name for path in (copy / "build").iterdir()] == ["lab"]


def test_the_selection_parameters_and_cluster_reach_the_runner_unchanged(copy):
    given = "prompt='two words' quick=false sizes=[1,2]"
    runner = "-m rosellm.lab.running.run_notebooks --select 03,05 07"
    for cluster, options in (("", ""), ("head:6379", " --cluster head:6379")):
        make("notebooks", "NB=03,05 07", f"P={given}", f"CLUSTER={cluster}", folder=copy)
        call = (copy / "calls").read_text().splitlines()[-1]
        assert call == f"{runner} --parameters {given} --workers 2 --timeout 300{options}"
