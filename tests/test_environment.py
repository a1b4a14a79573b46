"""The environment that every record tells."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rosellm.environment as module
from rosellm.environment import environment

CPU = torch.device("cpu")
NEEDS_GIT = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=Test", "-c", "user.email=test@example.com")
    done = subprocess.run(
        ["git", "-C", folder, *identity, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_environment_names_hardware_and_versions_and_no_path():
    found = environment(CPU)
    assert found["device_name"] == found["cpu"] != ""
    assert found["torch"] == torch.__version__
    assert found["driver"] is None and found["device_memory_bytes"] is None
    assert found["time_utc"].endswith("+00:00")
    assert {"triton", "transformers", "numpy", "python", "rosellm", "cpu_cores", "git_commit"} <= found.keys()
    assert not [value for value in found.values() if isinstance(value, str) and value.startswith("/")]


def test_fingerprints_last_through_a_lease_and_differ_between_hosts_and_leases(monkeypatch):
    first = environment(CPU)
    assert [len(first[name]) for name in ("host", "lease")] == [12, 12]
    in_another_process = "import torch; from rosellm.environment import environment as e; "
    in_another_process += "found = e(torch.device('cpu')); print(found['host'], found['lease'])"
    done = subprocess.run([sys.executable, "-c", in_another_process], capture_output=True, text=True)
    assert done.stdout.split() == [first["host"], first["lease"]]
    monkeypatch.setattr(module, "_boot", lambda: "after the machine began again")
    again = environment(CPU)
    assert again["host"] == first["host"] and again["lease"] != first["lease"]
    monkeypatch.setattr(platform, "node", lambda: "another machine")
    other = environment(CPU)
    assert other["host"] != first["host"] and "another machine" not in str(other)


@NEEDS_GIT
def test_the_environment_tells_the_commit_of_a_checkout_and_whether_it_was_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHECKOUT", tmp_path)
    monkeypatch.delenv("ROSELLM_COMMIT", raising=False)
    assert environment(CPU)["git_commit"] is None and environment(CPU)["git_dirty"] is None
    git(tmp_path, "init", "--quiet")
    assert environment(CPU)["git_commit"] is None
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    clean = environment(CPU)
    assert clean["git_commit"] == git(tmp_path, "rev-parse", "HEAD") and clean["git_dirty"] is False
    (tmp_path / "file").write_text("two")
    assert environment(CPU)["git_dirty"] is True


@NEEDS_GIT
def test_a_variable_names_the_commit_where_the_history_was_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHECKOUT", tmp_path)
    monkeypatch.setenv("ROSELLM_COMMIT", "0123abc")
    assert environment(CPU)["git_commit"] == "0123abc" and environment(CPU)["git_dirty"] is None
    git(tmp_path, "init", "--quiet")
    assert environment(CPU)["git_commit"] == "0123abc"


@pytest.mark.gpu
def test_the_environment_of_a_gpu_names_it_and_its_driver():
    found = environment(torch.device("cuda"))
    assert found["device_name"] == torch.cuda.get_device_name() and found["driver"]
    assert found["device_memory_bytes"] > 1 << 30
