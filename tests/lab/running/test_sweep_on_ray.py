"""Records and notebooks over two nodes of a Ray cluster, one of which leaves in mid-sweep."""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rosellm.cluster import runtime
from rosellm.environment import environment
from rosellm.lab import measure
from tests.lab.running.test_run_notebooks import main, printed, save, wait_until
from tests.roseinfer.ranks import is_running

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'rosellm[cluster]'")

NODE = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": runtime.STORE_BYTES}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="Ray's test clusters need Linux"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SimpleNamespace]:
    """Two nodes of one core each, on the loopback, and what takes the second one away."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name, value in runtime.LOCAL.items():
            patch.setenv(name, value)
        patch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", False)
        head = {**NODE, "num_gpus": torch.cuda.device_count(), "include_dashboard": False}
        head["_system_config"] = runtime.SYSTEM
        nodes = Cluster(initialize_head=True, head_node_args=head)
        second = nodes.add_node(**NODE)
        leave = partial(nodes.remove_node, second, allow_graceful=False)
        yield SimpleNamespace(address=nodes.address, leave=leave)
        nodes.shutdown()


def until(holds: Callable[[], object]) -> None:
    assert wait_until(holds)


class Notebooks:
    """Three that run until they are let go; each kernel leaves a note of its process."""

    def __init__(self, folder: Path, address: str) -> None:
        self.notes, self.go, self.build = folder / "notes", folder / "go", folder / "build"
        self.notes.mkdir()
        source = f"import os, pathlib, time\nnotes = pathlib.Path({str(self.notes)!r})\n"
        source += "(notes / f'{name} {os.getpid()}').touch()\n"
        source += f"while not pathlib.Path({str(self.go)!r}).exists():\n    time.sleep(0.05)\nprint(name)"
        for name in ("a", "b", "c"):
            save(folder, name, f"name = {name!r}\n{source}", parameters="device = 'auto'")
        self.command = ["--notebooks", str(folder), "--output", str(self.build), "--cluster", address]
        self.command += ["--parameters", "device=cpu"]

    def begun(self) -> list[str]:
        return sorted(path.name.split()[0] for path in self.notes.iterdir())

    def none_runs(self) -> bool:
        return not any(is_running(int(path.name.split()[1])) for path in self.notes.iterdir())

    def swept(self, meanwhile: Callable[[], None]) -> int:
        """The status of the command, while another thread does something."""
        with ThreadPoolExecutor() as pool:
            acted = pool.submit(meanwhile)
            status = main(self.command)
            acted.result()
        return status


def test_a_sweep_has_records_made_by_the_machines_and_writes_them_here(
    cluster, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)  # what "auto" finds
    small = ["--device=cpu", "W1-dense", "bookkeeping", "--repeats=1"]
    assert measure.main(["--cluster", "auto", *small, f"--output={tmp_path}"]) == 0
    assert f"W1-dense on {platform.node()}" in capsys.readouterr().out
    paths = {path.relative_to(tmp_path).as_posix(): path for path in tmp_path.rglob("*.json")}
    assert set(paths) == {"rose-tiny/W1-dense.json", "bookkeeping.json"}
    for path in paths.values():
        told = json.loads(path.read_text())["environment"]
        here = environment(torch.device("cpu"))
        assert [told[name] for name in ("host", "git_commit")] == [here["host"], here["git_commit"]]


@pytest.mark.gpu
def test_a_record_is_made_on_a_gpu_of_the_cluster(cluster, tmp_path):
    small = ["W1-dense", "W1-split_kv", "--repeats=1", "--size=small"]
    assert measure.main([f"--cluster={cluster.address}", f"--output={tmp_path}", *small]) == 0
    names = {json.loads(path.read_text())["environment"]["device_name"] for path in tmp_path.iterdir()}
    assert names == {torch.cuda.get_device_name()}


def test_ctrl_c_ends_what_runs_and_a_machine_s_loss_in_the_next_sweep_loses_nothing(
    cluster, tmp_path, capsys
):
    notebooks = Notebooks(tmp_path, cluster.address)

    def interrupt() -> None:
        until(lambda: len(notebooks.begun()) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    assert notebooks.swept(interrupt) == 130
    told = "interrupted by SIGINT: finished none; not finished a, b, c"
    assert capsys.readouterr().err.splitlines()[-1] == told
    until(notebooks.none_runs)
    first = notebooks.begun()

    def lose() -> None:
        until(lambda: len(notebooks.begun()) == len(first) + 2)
        cluster.leave()
        notebooks.go.touch()

    assert notebooks.swept(lose) == 0
    assert len(notebooks.begun()) == len(first) + 4  # one of three ran twice
    for name in ("a", "b", "c"):
        assert printed(notebooks.build / f"{name}.ipynb") == f"{name}\n"
        assert (notebooks.build / f"{name}.html").is_file()
    assert len(json.loads((notebooks.build / "gallery.json").read_text())) == 3
    until(notebooks.none_runs)
