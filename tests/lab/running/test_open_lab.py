"""The working copy that JupyterLab opens, its options, and the way out."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
from jupyterlab.handlers.announcements import NeverCheckForUpdate
from jupyterlab.labapp import LabApp

from rosellm.lab.running import open_lab

ROOT = Path(__file__).parents[3]
COMMANDS = {  # the module after whose import the signal comes, and the command
    "make lab": ("tornado.util", "-P", "rosellm/lab/running/open_lab.py", "--version"),
    "make notebooks": ("torch.version", "-m", "rosellm.lab.running.run_notebooks", "--help"),
    "a benchmark": ("torch.version", "-m", "rosellm.roseinfer.benchmark_scheduler", "--help"),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "notebooks"
    (folder / "results").mkdir(parents=True)
    (folder / ".ipynb_checkpoints").mkdir()
    for name in ("01_a.ipynb", "02_b.ipynb", "results/x.json", ".ipynb_checkpoints/01_a.ipynb"):
        (folder / name).write_text("old")
    return folder


def test_an_edited_file_is_kept_and_the_others_follow_the_committed_ones(source, tmp_path):
    copy = tmp_path / "build/lab/notebooks"
    assert open_lab.working_copy(source, copy) == []
    names = sorted(p.relative_to(copy).as_posix() for p in copy.rglob("*") if p.is_file())
    assert names == ["01_a.ipynb", "02_b.ipynb", "results/x.json"]
    (copy / "01_a.ipynb").write_text("mine")
    (copy / "my_own.ipynb").write_text("mine")
    assert open_lab.working_copy(source, copy) == []
    for name in ("01_a.ipynb", "02_b.ipynb"):
        (source / name).write_text("new")
    for _ in range(2):  # told every time, until one or the other gives way
        assert open_lab.working_copy(source, copy) == ["01_a.ipynb"]
    read = {path.name: path.read_text() for path in copy.glob("*.ipynb")}
    assert read == {"01_a.ipynb": "mine", "02_b.ipynb": "new", "my_own.ipynb": "mine"}
    (copy / "01_a.ipynb").unlink()
    assert open_lab.working_copy(source, copy) == [] and (copy / "01_a.ipynb").read_text() == "new"


@pytest.mark.parametrize(("user", "allowed"), [(0, True), (1000, False)])
def test_lab_opens_the_copy_on_this_machine_only_also_for_root(user, allowed, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    options = open_lab.options(tmp_path)
    assert ("--allow-root" in options) == allowed
    assert not any(word in " ".join(options) for word in ("token", "password", "xsrf", "origin"))
    app = LabApp()
    app.parse_command_line(options)
    assert "--ip=127.0.0.1" in options and app.default_url == "/lab/tree/build/lab/notebooks"
    assert app.news_url is None and app.check_for_updates_class is NeverCheckForUpdate


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_while_a_command_loads_leaves_no_traceback(name):
    imported, *command = COMMANDS[name]
    command = [sys.executable, "-X", "importtime", *command]
    with subprocess.Popen(command, cwd=ROOT, stdout=PIPE, stderr=PIPE, text=True) as process:
        assert any(line.split("|")[-1].strip() == imported for line in process.stderr)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert "Traceback" not in said and "KeyboardInterrupt" not in said
