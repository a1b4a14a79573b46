"""The command that measures what users call beside the scheduler beneath it; here on a CPU."""

from __future__ import annotations

import json

import pytest

from rosellm.lab.records import user_calls
from rosellm.lab.records.records import Results


@pytest.fixture(scope="module")
def figures(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("results") / "cpu"
    assert user_calls.recorded(Results(folder)) == {}
    options = ["--device=cpu", "--repeats=2", "--workloads=W4", f"--output={folder}"]
    assert user_calls.main(options) == 0
    return user_calls.recorded(Results(folder / "rose-tiny"))


@pytest.mark.slow
def test_each_workload_has_the_runs_of_every_way_to_call(figures) -> None:
    assert set(figures) == {"W4"}
    for ways in figures.values():
        assert [len(ways[way]["repeats"]) for way in user_calls.CALLS] == [2, 2, 2, 2, 2]
        assert ways["engine"]["max_batch_size"] == 4


@pytest.mark.slow
def test_whatever_is_called_gives_the_tokens_of_the_scheduler(figures) -> None:
    for ways in figures.values():
        assert len({one["tokens_sha256"] for way in user_calls.CALLS for one in ways[way]["repeats"]}) == 1


def test_a_workload_measured_alone_leaves_the_others_of_its_commit_and_size_in_the_record(
    tmp_path, monkeypatch, capsys
) -> None:
    measured = []
    monkeypatch.setattr(user_calls, "measure_calls", lambda _asked, one: measured.append(one.id) or one.id)
    monkeypatch.setattr(user_calls, "told", lambda *_given: "")
    given = ["--device=cpu", "--model=rose-tiny", f"--output={tmp_path}"]
    for workload in ("W8", "W4"):
        assert user_calls.main([*given, f"--workloads={workload}"]) == 0
    path = tmp_path / "rose-tiny" / "user_calls.json"
    assert list(json.loads(path.read_text())["figures"].items()) == [("W4", "W4"), ("W8", "W8")]
    assert user_calls.main([*given, "--workloads=W4", "--size=full"]) == 2
    assert (
        measured == ["W8", "W4"] and "would lose W8, measured with another size:" in capsys.readouterr().err
    )


def test_a_run_repeats_calls_that_are_too_short_to_time() -> None:
    class Output:
        token_ids, finish_reason = [1, 2], "length"

    found = user_calls._run(lambda: ([Output()], 0.3), 1.0)
    assert found["completion_tokens"] == 8 and found["total_time_s"] == pytest.approx(1.2)


def test_shares_are_of_the_schedulers_throughput() -> None:
    rates = {user_calls.BENEATH: 200.0, user_calls.GENERATE: 196.0, user_calls.STREAMS: 150.0}
    figures = {way: {"medians": {"total_throughput_tok_s": rate}} for way, rate in rates.items()}
    assert user_calls.shares(figures) == {user_calls.GENERATE: 0.98, user_calls.STREAMS: 0.75}
    assert user_calls.told("W6", figures) == (
        "W6, tok/s: OfflineScheduler 200, LLM.generate 196 (98.0%), StreamingManager 150 (75.0%)"
    )


@pytest.mark.parametrize(
    ("workloads", "told"), [("W77", "workload 'W77' is unknown"), (",", "--workloads names none")]
)
def test_an_unknown_workload_or_none_is_refused_in_one_line(workloads, told, tmp_path, capsys) -> None:
    assert user_calls.main(["--device=cpu", f"--workloads={workloads}", f"--output={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1
