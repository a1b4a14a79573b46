"""Sweeps over a Ray cluster: what is asked of Ray, what comes of tasks, and what is refused in one line."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_notebook

from rosellm.errors import ClusterError, DeviceError, RoseError
from rosellm.lab.running import run_notebooks, sweep
from rosellm.lab.running.execution import Executed, Outcome
from rosellm.lab.running.interruption import Interruption
from rosellm.lab.running.sweep import Sweep
from tests.lab.running.test_run_notebooks import FILES, save, status_of


class LostError(Exception):
    """As Ray's, of a worker that has died too often."""


class FakeRay:
    """What a sweep needs of Ray: runs a task when its result is fetched, the last one given first."""

    exceptions = SimpleNamespace(RayError=LostError)

    def __init__(self, **resources: float) -> None:
        self.resources = resources

    def remote(self, **_options: Any) -> Callable[[Callable], Any]:
        return lambda function: SimpleNamespace(remote=lambda task: partial(function, task))

    def wait(self, calls: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return calls[-1:], calls[:-1]

    def get(self, call: Callable[[], Any]) -> Any:
        if call.args[0] is lost:
            raise LostError("The worker died.\nSee the logs.")
        return call()

    def cluster_resources(self) -> dict[str, float]:
        return self.resources


class FakeRuntime:
    def __init__(self, ray: FakeRay, _address: str, environment: dict[str, Any]) -> None:
        self.ray, self.environment = ray, environment
        folder = Path(environment["working_dir"])
        self.staged = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}

    def device(self) -> str:
        return "cuda" if self.ray.resources.get("GPU", 0) >= 1 else "cpu"

    def leave(self) -> None: ...


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[FakeRay, Sweep]]]:
    """A sweep over a cluster with these resources."""
    with Interruption() as interruption:  # a sweep takes the signals over

        def join(notebooks: Path | None = None, stages=False, **resources: float) -> tuple[FakeRay, Sweep]:
            ray = FakeRay(**resources)
            if not stages:  # it takes a second
                monkeypatch.setattr(sweep, "_stage", lambda *_: None)
            monkeypatch.setattr(sweep, "Runtime", partial(FakeRuntime, ray))
            return ray, Sweep("head:6379", interruption, notebooks)

        yield join


def lost() -> None: ...


def test_cuda_is_refused_where_the_cluster_has_no_gpu(joined):
    with pytest.raises(DeviceError, match="device 'cuda' is not available: the Ray cluster has no GPU"):
        joined(CPU=2)[1].takes_gpu("cuda")


def test_a_task_that_fails_or_is_lost_is_told_in_one_line_and_ends_no_other(joined, capsys):
    _, machines = joined(CPU=2)
    tasks = {"good": os.getpid, "bad": partial(int, "x"), "lost": lost}
    found = dict(machines.run(tasks, False, "task"))
    assert found["good"].value == os.getpid() and found["good"].machine
    assert found["bad"].error == "ValueError: invalid literal for int() with base 10: 'x'"
    assert found["lost"].error.endswith("LostError: The worker died.")
    told = [line.partition("] ")[2].split()[0] for line in capsys.readouterr().out.splitlines()]
    assert told == ["lost:", "bad", "good"]
    with pytest.raises(RoseError, match="^ValueError: invalid literal"):
        machines.call(partial(int, "x"), False)
    assert machines.call(os.getpid, False) == os.getpid()


def test_when_no_machine_for_the_rest_comes_back_the_sweep_ends(joined, monkeypatch):
    _, machines = joined(CPU=2, GPU=0)
    monkeypatch.setattr(sweep, "ABSENT_S", 0.0)
    told = "1 tasks are left, and the Ray cluster has had no GPU for 0 s; the same command continues there"
    with pytest.raises(ClusterError, match=told):
        list(machines.run({"a": os.getpid, "b": os.getpid}, True, "task"))


def test_the_machines_get_this_package_and_the_notebooks_with_what_they_read(joined, tmp_path):
    for name in ("01_a.ipynb", "data.csv", ".ipynb_checkpoints/01_a.ipynb"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    _, machines = joined(tmp_path, stages=True)
    staged = machines._runtime.staged
    assert {"notebooks/01_a.ipynb", "notebooks/data.csv", "rosellm/lab/measure.py"} <= staged
    assert {"notebooks/exhibits", "notebooks/results/nvidia-h200", "rosellm/assets"} <= staged
    assert not [name for name in staged if "/." in name or "__pycache__" in name]
    assert not Path(machines._runtime.environment["working_dir"]).exists()
    of_measure = joined(stages=True)[1]._runtime.staged
    assert "notebooks/exhibits" in of_measure and "notebooks/results" not in of_measure


@pytest.fixture
def folder(joined, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three notebooks, which a fake cluster with a GPU executes at once; one it loses."""
    joined(CPU=2, GPU=1)
    monkeypatch.setattr(run_notebooks, "execute", execute)
    for name in ("a", "b", "lost"):
        save(tmp_path / "notebooks", name, parameters="device = 'auto'")
    return tmp_path / "notebooks"


ASKED: list[str] = []


def execute(notebook: Path, parameters: dict[str, Any], _timeout: float) -> Executed:
    """What a machine of the fake cluster is asked for: no kernel runs."""
    ASKED.append(notebook.stem)
    if notebook.stem == "lost":
        raise RoseError("lost")
    content = nbformat.writes(new_notebook()).encode()
    files = {notebook.name: content, f"{notebook.stem}.html": b"<html>"}
    return Executed(Outcome(notebook.stem, 1.0, "ok", "", parameters), files)


def swept(folder: Path, **parameters: Any) -> list[str]:
    """The names of the notebooks that a sweep executes, in order."""
    ASKED.clear()
    notebooks = sorted(folder.glob("*.ipynb"))
    run_notebooks.run(notebooks, folder.parent / "build", parameters, cluster="head:6379")
    return sorted(ASKED)


def touch(path: Path, after: Path) -> None:
    """Makes a file that is a second newer than another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    later = after.stat().st_mtime + 1
    os.utime(path, (later, later))


def test_results_are_published_where_a_local_run_has_them_and_failures_make_the_exit_status(
    folder, tmp_path, capsys
):
    build = tmp_path / "build"
    command = ["--notebooks", str(folder), "--output", str(build), "--cluster", "head:6379"]
    assert status_of(run_notebooks.main, [*command, "--parameters", "device=cuda"]) == 1
    out, err = capsys.readouterr()
    assert f"ok on {platform.node()}" in out and "FAILED lost: lost\n" in err
    index = (build / "index.html").read_text()
    assert index.count(f"ran on {platform.node()}") == 3 and "device=cuda" in index
    made = {"a.ipynb", "a.html", "b.ipynb", "b.html"}
    assert {path.name for path in build.iterdir()} == FILES | made


def test_the_next_sweep_executes_only_what_failed_or_is_no_longer_current(folder, tmp_path, capsys):
    build = tmp_path / "build"
    assert swept(folder) == ["a", "b", "lost"]
    assert swept(folder) == ["lost"]
    assert f"already in {build}, and current: a, b" in capsys.readouterr().out
    touch(folder / "a.ipynb", after=build / "a.ipynb")
    assert swept(folder) == ["a", "lost"]
    os.utime(folder / "a.ipynb", (0, 0))
    (build / "b.ipynb").unlink()
    assert swept(folder) == ["b", "lost"]
    assert swept(folder, device="cpu") == ["a", "b", "lost"]


@pytest.mark.parametrize("name", ["results/gpu/W1.json", "exhibits/layers.py"])
def test_a_newer_record_or_exhibit_makes_every_notebook_run_again(folder, tmp_path, name):
    swept(folder)
    touch(folder / name, after=tmp_path / "build/a.ipynb")
    assert swept(folder) == ["a", "b", "lost"]
