"""The command that measures this checkout beside an earlier commit; here both are this one, on a CPU."""

from __future__ import annotations

import pytest

from rosellm.errors import RoseError
from rosellm.lab import measure
from rosellm.lab.records import versions
from rosellm.lab.records.registry import plan
from rosellm.lab.records.versions import measure_workload, sample
from tests.lab.measuring import measured

GIVEN = ["--device=cpu", "--repeats=2"]


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> dict:
    asked = "--repeats=2", "--old=HEAD", "--workloads=W4,TTFT64"
    return measured(tmp_path_factory.mktemp("records"), "versions", *asked)


@pytest.mark.slow
def test_both_sides_serve_each_workload_in_turns_and_give_the_same_tokens(record) -> None:
    assert record["old_commit"] == record["environment"]["git_commit"] and len(record["old_commit"]) == 40
    assert list(record["figures"]) == ["W4", "TTFT64"]
    for sides in record["figures"].values():
        assert [len(sides[side]["repeats"]) for side in (versions.OLD, versions.NEW)] == [2, 2]
        samples = [one for side in sides.values() for one in side["repeats"]]
        assert len(versions.all_of("tokens_sha256", sides)) == 1
        assert {side["rung"] for side in sides.values()} == {"split_kv"}
        assert len({side["num_kv_blocks"] for side in sides.values()}) == 1
        assert all(one["tok_s"] > 0 for one in samples)


@pytest.mark.slow
def test_what_a_side_cannot_run_is_told_in_one_line(tmp_path, capsys) -> None:
    asked = "--old=HEAD", "--model=rose-tiny-qwen3", "--rung=persistent_kernel", "--workloads=W1"
    assert measure.main(["versions", *GIVEN, *asked, f"--output={tmp_path}"]) == 2
    assert "the old side: exhibit='persistent_layers'" in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.slow
def test_a_side_runs_its_own_package_and_what_that_says_last_ends_the_comparison(tmp_path) -> None:
    (tmp_path / "rosellm").mkdir()
    (tmp_path / "rosellm" / "__init__.py").write_text("raise ImportError('too old')")
    with pytest.raises(RoseError, match="the old side: ImportError: too old"):
        sample(versions.OLD, tmp_path, "scheduler", [])


def run(digest: str, tokens: int = 8) -> dict:
    """The record of one process that ran twice."""
    runs = [
        {"total_time_s": 0.08, "completion_tokens": n, "tokens_sha256": one}
        for n, one in ((8, "a"), (tokens, digest))
    ]
    return {"rung": "split_kv", "num_kv_blocks": 9, "results": {"online": {"repeats": runs}}}


def compared(tmp_path, monkeypatch, new: dict) -> dict:
    (job,) = plan(measure.parse(["versions", *GIVEN, "--old=HEAD", f"--output={tmp_path}"]))
    monkeypatch.setattr(versions, "sample", lambda name, *_given: new if name == versions.NEW else run("a"))
    return measure_workload(job.asked, dict.fromkeys((versions.OLD, versions.NEW), tmp_path), "W1")


def test_runs_of_fewer_tokens_are_no_comparison(tmp_path, monkeypatch) -> None:
    with pytest.raises(RoseError, match="W1: the runs make different numbers of tokens"):
        compared(tmp_path, monkeypatch, run("a", tokens=7))


@pytest.mark.parametrize(
    ("digest", "tokens"), [("a", "the same tokens"), ("b", "not always the same tokens")]
)
def test_other_tokens_are_told(tmp_path, monkeypatch, digest, tokens) -> None:
    found = compared(tmp_path, monkeypatch, run(digest))
    assert versions.told("W1", found) == f"W1, tok/s: old 100, new 100 (+0.0 %), {tokens}"


def test_the_files_of_a_commit_are_there_for_its_side_alone() -> None:
    with versions.files_of(versions.full_hash("HEAD")) as folder:
        assert (folder / "rosellm" / "__init__.py").is_file() and not (folder / ".git").exists()
    assert not folder.exists()
