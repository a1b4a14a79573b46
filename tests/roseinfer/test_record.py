"""Records: whole or not at all, with raw figures and the environment."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from rosellm.errors import RoseError
from rosellm.roseinfer import record as records
from rosellm.roseinfer.record import (
    across_repeats,
    distribution,
    environment,
    new_record,
    tokens_sha256,
    write_record,
)

CPU = torch.device("cpu")
NEEDS_GIT = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=Test", "-c", "user.email=test@example.com")
    done = subprocess.run(
        ["git", "-C", folder, *identity, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_record_is_read_back_as_it_was_written(tmp_path):
    record = new_record("scheduler", CPU, figure=1 / 3, nothing=None)
    write_record(tmp_path / "record.json", record)
    assert json.loads((tmp_path / "record.json").read_text()) == record
    assert record["figure"] == 1 / 3


def test_a_record_that_cannot_be_written_leaves_the_old_one_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    write_record(path, {"figure": 1})

    def full_disk(self, *arguments, **options):
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(RoseError, match="No space left on device"):
        write_record(path, {"figure": 2})
    assert json.loads(path.read_text()) == {"figure": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_figure_that_is_not_a_number_is_no_record(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_record(tmp_path / "record.json", {"figure": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_a_record_replaces_regular_files_only(tmp_path):
    with pytest.raises(RoseError, match="there is no folder"):
        write_record(tmp_path / "missing" / "record.json", {})
    with pytest.raises(RoseError, match="not a regular file"):
        write_record(tmp_path, {})


def test_the_environment_names_hardware_and_versions_and_no_path():
    found = environment(CPU)
    assert found["device_name"] == found["cpu"] != ""
    assert found["torch"] == torch.__version__
    assert found["driver"] is None and found["device_memory_bytes"] is None
    assert found["time_utc"].endswith("+00:00")
    assert {"triton", "transformers", "numpy", "python", "rosellm", "cpu_cores", "git_commit"} <= found.keys()
    assert not [value for value in found.values() if isinstance(value, str) and value.startswith("/")]


@NEEDS_GIT
def test_the_environment_tells_the_commit_of_a_checkout_and_whether_it_was_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "CHECKOUT", tmp_path)
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


def test_a_distribution_gives_mean_and_percentiles_of_the_known_values():
    values = [4.0, 1.0, None, 2.0]
    assert distribution("ttft", values, (50, 99)) == {
        "ttft_mean_s": 7 / 3,
        "ttft_p50_s": 2.0,
        "ttft_p99_s": np.percentile([1.0, 2.0, 4.0], 99),
    }
    assert distribution("tpot", [None], (50,)) == {"tpot_mean_s": None, "tpot_p50_s": None}


def test_medians_and_means_go_over_the_repeats_of_every_numeric_figure():
    repeats = [{"time_s": t, "tokens": 8, "sha": "x", "memory": None} for t in (3.0, 1.0, 8.0)]
    result = across_repeats(repeats)
    assert result["repeats"] == repeats
    assert result["medians"] == {"time_s": 3.0, "tokens": 8.0}
    assert result["means"] == {"time_s": 4.0, "tokens": 8.0}


def test_the_token_digest_depends_on_every_token_and_on_where_requests_end():
    digests = {tokens_sha256(outputs) for outputs in ([[1, 2], [3]], [[1], [2, 3]], [[1, 2], [4]], [[1, 2]])}
    assert len(digests) == 4
    assert tokens_sha256([[1, 2], [3]]) in digests
