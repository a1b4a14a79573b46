"""The command that measures this checkout beside an earlier commit; here both are this one, on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from rosellm.environment import CHECKOUT
from rosellm.errors import RoseError
from rosellm.lab import measure
from rosellm.lab.records import versions
from rosellm.lab.records.registry import plan
from rosellm.lab.records.versions import measure_workload, run_version
from tests.lab.measuring import measured


@pytest.mark.slow
def test_both_versions_serve_each_workload_in_turns_and_give_the_same_tokens(tmp_path) -> None:
    record = measured(tmp_path, "versions", "--repeats=2", "--old=HEAD", "--workloads=W4,TTFT64")
    assert record["old_commit"] == record["environment"]["git_commit"] and len(record["old_commit"]) == 40
    assert list(record["figures"]) == ["W4", "TTFT64"]
    for sides in record["figures"].values():
        assert [len(sides[side]["repeats"]) for side in (versions.OLD, versions.NEW)] == [2, 2]
        runs = [one for side in sides.values() for one in side["repeats"]]
        assert len({one["tokens_sha256"] for one in runs}) == 1
        assert {one["rung"] for one in runs} == {"split_kv"} and all(one["tok_s"] > 0 for one in runs)


@pytest.mark.slow
def test_a_process_runs_the_version_in_its_folder(tmp_path) -> None:
    (tmp_path / "rosellm").mkdir()
    (tmp_path / "rosellm" / "__init__.py").write_text("raise ImportError('too old')")
    with pytest.raises(RoseError, match="the old version: ImportError: too old"):
        run_version(versions.OLD, tmp_path, "scheduler", [])


@pytest.mark.slow
def test_a_version_that_cannot_serve_says_why() -> None:
    nobody = ["--hf-model-id=nobody/knows", "--load-format=dummy", "--device=cpu"]
    with pytest.raises(RoseError, match="the old version: .*no shape is known"):
        run_version(versions.OLD, CHECKOUT, "scheduler", nobody)


def figures_of(monkeypatch, **differs: object) -> versions.Sides:
    """The figures of W1 by two versions of which the new one differs."""

    def made(side: str, *_given: object) -> dict:
        figures = {"rung": "split_kv", "tok_s": 100.0, "completion_tokens": 8, "tokens_sha256": "a"}
        return figures | (differs if side == versions.NEW else {})

    monkeypatch.setattr(versions, "run_version", made)
    (job,) = plan(measure.parse(["versions", "--device=cpu", "--repeats=2", "--old=HEAD"]))
    return measure_workload(job.asked, {versions.OLD: Path(), versions.NEW: Path()}, "W1")


def test_other_numbers_of_tokens_are_no_comparison(monkeypatch) -> None:
    with pytest.raises(RoseError, match="W1: the runs make different numbers of tokens"):
        figures_of(monkeypatch, completion_tokens=7)


@pytest.mark.parametrize(
    ("digest", "tokens"), [("a", "the same tokens"), ("b", "not always the same tokens")]
)
def test_other_tokens_are_told(monkeypatch, digest, tokens) -> None:
    found = figures_of(monkeypatch, tokens_sha256=digest)
    assert versions.told("W1", found) == f"W1, tok/s: old 100, new 100 (+0.0 %), {tokens}"


def test_the_package_of_a_commit_is_that_commits_alone() -> None:
    with versions.package_of(versions.full_hash("HEAD")) as folder:
        assert [path.name for path in folder.iterdir()] == ["rosellm"]
        assert (folder / "rosellm" / "__init__.py").is_file()
    assert not folder.exists()
