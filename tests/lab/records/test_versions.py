"""The command that measures this checkout beside an earlier commit; here both are this one, on a CPU."""

from __future__ import annotations

import json
from contextlib import closing
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
def test_a_version_that_cannot_start_ends_the_comparison(tmp_path, capfd) -> None:
    (tmp_path / "rosellm").mkdir()
    (tmp_path / "rosellm" / "__init__.py").write_text("raise ImportError('too old')")
    old = Side(versions.OLD, tmp_path, "scheduler", [])
    with closing(old), pytest.raises(RoseError, match="the old side ended with status 1"):
        old.engine()
    assert "too old" in capfd.readouterr().err


class Made:
    """A side without a process: a sample is of two runs; the new one differs as told."""

    tokens, blocks = 8, 9000

    def __init__(self, name: str, *_given: object) -> None:
        if name == versions.OLD:
            self.tokens, self.blocks = 8, 9000

    def engine(self) -> dict:
        return {"rung": "split_kv", "num_kv_blocks": self.blocks}

    def sample(self, seconds: float) -> dict:
        return {"tok_s": 100.0, "completion_tokens": [8, self.tokens], "tokens_sha256": ["a"]}

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("differs", "told"),
    [
        ({"tokens": 7}, "W1: the runs make different numbers of tokens"),
        ({"blocks": 70}, "W1: memory has no room for two such KV caches: blocks old 9,000, new 70"),
    ],
    ids=["fewer tokens", "fewer blocks"],
)
def test_what_is_not_the_same_work_is_no_comparison(monkeypatch, differs, told) -> None:
    monkeypatch.setattr(versions, "Side", type("Differing", (Made,), differs))
    (job,) = plan(measure.parse(["versions", *GIVEN, "--old=HEAD"]))
    with pytest.raises(RoseError, match=told):
        measure_workload(job.asked, {versions.OLD: Path(), versions.NEW: Path()}, "W1")


def test_the_package_of_a_commit_is_that_commits_alone() -> None:
    with versions.package_of(versions.full_hash("HEAD")) as folder:
        assert [path.name for path in folder.iterdir()] == ["rosellm"]
        assert (folder / "rosellm" / "__init__.py").is_file()
    assert not folder.exists()
