"""The command that measures this checkout beside an earlier commit; here both are this one, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rosellm.errors import RoseError
from rosellm.lab import measure
from rosellm.lab.records import versions
from rosellm.lab.records.registry import plan
from rosellm.lab.records.versions import Side, measure_workload

GIVEN = ["--device=cpu", "--repeats=2"]


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("records")
    assert (
        measure.main(["versions", *GIVEN, "--old=HEAD", "--workloads=W4,TTFT64", f"--output={folder}"]) == 0
    )
    return json.loads((folder / "rose-tiny" / "versions.json").read_text())


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
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--old=no-such-commit"], "no-such-commit"),
        (["--old=--output=x"], "--output=x"),
        (["--old=HEAD", "--workloads=,"], "--workloads names none"),
        ([], "versions needs --old"),
        (
            ["--old=HEAD", "--model=rose-tiny-qwen3", "--rung=persistent_kernel", "--workloads=W1"],
            "the old side: exhibit='persistent_layers'",
        ),
    ],
)
def test_what_cannot_be_compared_is_told_in_one_line(tmp_path, capfd, options, told) -> None:
    assert measure.main(["versions", *GIVEN, f"--output={tmp_path}", *options]) == 2
    assert told in capfd.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.slow
def test_a_version_that_cannot_start_ends_the_comparison(tmp_path, capfd) -> None:
    (tmp_path / "rosellm").mkdir()
    (tmp_path / "rosellm" / "__init__.py").write_text("raise ImportError('too old')")
    side = Side(versions.OLD, tmp_path)
    with pytest.raises(RoseError, match="the old side ended with status 1"):
        side.prepare("scheduler", [])
    side.close()
    assert "too old" in capfd.readouterr().err


class Made:
    """A side without a process: a sample is of two runs."""

    def __init__(self, digest: str, tokens: int = 8, blocks: int = 9000) -> None:
        self.digest, self.tokens, self.blocks = digest, tokens, blocks

    def prepare(self, form: str, options: list[str]) -> dict:
        return {"rung": "split_kv", "num_kv_blocks": self.blocks}

    def sample(self, seconds: float) -> dict:
        return {"tok_s": 100.0, "completion_tokens": [8, self.tokens], "tokens_sha256": [self.digest]}


def measured(tmp_path, old: Made, new: Made) -> dict:
    (job,) = plan(measure.parse(["versions", *GIVEN, "--old=HEAD", f"--output={tmp_path}"]))
    return measure_workload(job.asked, {versions.OLD: old, versions.NEW: new}, "W1")


def test_runs_of_fewer_tokens_are_no_comparison(tmp_path) -> None:
    with pytest.raises(RoseError, match="W1: the runs make different numbers of tokens"):
        measured(tmp_path, Made("a"), Made("a", tokens=7))


def test_a_cache_that_the_other_leaves_no_room_for_is_no_comparison(tmp_path) -> None:
    with pytest.raises(
        RoseError, match="W1: memory has no room for two such KV caches: blocks old 9,000, new 7"
    ):
        measured(tmp_path, Made("a"), Made("a", blocks=70))


@pytest.mark.parametrize(
    ("digest", "tokens"), [("a", "the same tokens"), ("b", "not always the same tokens")]
)
def test_other_tokens_are_told(tmp_path, digest, tokens) -> None:
    found = measured(tmp_path, Made("a"), Made(digest))
    assert versions.told("W1", found) == f"W1, tok/s: old 100, new 100 (+0.0 %), {tokens}"


def test_the_package_of_a_commit_is_that_commits_alone() -> None:
    with versions.package_of(versions.full_hash("HEAD")) as folder:
        assert [path.name for path in Path(folder).iterdir()] == ["rosellm"]
        assert (folder / "rosellm" / "__init__.py").is_file()
    assert not folder.exists()
