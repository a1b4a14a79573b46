"""``make measure``: this machine's records, the most telling first, until the time is up."""

import json
import time

import pytest
import torch

from rosellm.bench.workloads import ALL_WORKLOADS, WORKLOADS, Workload
from rosellm.errors import RoseError
from rosellm.lab.records import experiment, quick
from rosellm.lab.records.bench import get_parts
from rosellm.lab.records.machines import find_machines, this_machine
from rosellm.lab.records.quick import Recorder, TimeIsUp, limited_to, work_off
from rosellm.lab.records.records import REFERENCE
from rosellm.roseinfer.exhibits import load_exhibit

CPU = torch.device("cpu")
TINY = Workload("W0", num_requests=1, max_new_tokens=4, max_batch_size=1)


@pytest.fixture
def recorder(tmp_path, monkeypatch) -> Recorder:
    """One of three rungs, with the shipped model and a small W0 instead of GPT-2 and the whole one."""
    monkeypatch.setattr(quick, "runnable", lambda *asked: ["dense", "paged", "split_kv"])
    monkeypatch.setattr(experiment, "get_parts", lambda *asked: get_parts("rose-tiny", "cpu"))
    for known in (WORKLOADS, ALL_WORKLOADS):
        monkeypatch.setitem(known, "W0", TINY)
    return Recorder(CPU, tmp_path)


def read(recorder: Recorder, name: str) -> dict:
    return json.loads((recorder.results.folder / f"{name}.json").read_text())


def test_the_ends_of_the_ladder_come_before_its_other_rungs_and_short_runs_before_long_ones(recorder):
    names = list(recorder.jobs())
    assert names[:3] == ["steps-W0", "W0-dense", "W0-split_kv"]
    assert names.index("W1-split_kv") < names.index("W2-dense") < names.index("W0-paged")
    assert sorted(names) == sorted(
        [f"steps-W{i}" for i in range(4)]
        + [f"W{i}-{rung}" for i in range(6) for rung in recorder.rungs]
        + ["bookkeeping", "kv_append"]
    )
    assert names[-2:] == ["bookkeeping", "kv_append"]


def test_records_are_those_of_the_benchmark_and_of_measure_and_are_not_made_twice(
    recorder, capsys, monkeypatch
):
    monkeypatch.setattr(load_exhibit("bookkeeping"), "bookkeeping_cost", lambda *_sizes: {"tuple": [1.0]})
    jobs = {name: run for name, run in recorder.jobs().items() if name in ("W0-dense", "bookkeeping")}
    assert work_off(jobs, 60.0) == []
    run, table = (read(recorder, name) for name in ("W0-dense", "bookkeeping"))
    assert (run["workload"], run["rung"]) == ("W0", "dense")
    assert run["results"]["online"]["repeat_runs"] == 1
    assert table["kind"] == "bookkeeping" and set(table["figures"]) == {"8", "256"}
    assert not {"W0-dense", "bookkeeping"} & set(list(recorder.jobs()))
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("s] W0-dense") and second.endswith("s] bookkeeping")


@pytest.fixture
def timed(monkeypatch) -> list[str]:
    """The rungs whose steps were timed, in place of measuring them."""
    rungs: list[str] = []

    def steps(_model, asked, _workload, **_effort):
        rungs.extend(asked)
        return {"turns_us": {rung: [[float(len(rungs))]] for rung in asked}}

    monkeypatch.setattr(quick, "ladder_steps", steps)
    return rungs


def test_a_record_of_steps_goes_on_at_the_rungs_that_it_lacks(recorder, timed):
    for rungs in (["dense"], ["dense", "paged"]):
        recorder.rungs = rungs
        assert "steps-W0" in list(recorder.jobs())
        recorder.run("steps-W0")
        assert "steps-W0" not in list(recorder.jobs())
    assert timed == ["dense", "paged"]
    assert read(recorder, "steps-W0")["figures"]["turns_us"] == {"dense": [[1.0]], "paged": [[2.0]]}


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("W0-dense", {"not_comparable": ["num_requests=6 for 64"]}),
        ("W0-dense", {"kind": "rivals"}),
        ("bookkeeping", {"model": "gpt2", "size": "small", "figures": {}}),
        ("steps-W0", {"figures": {"turns_us": {"dense": [[1.0]]}}}),
    ],
)
def test_a_record_of_something_smaller_or_else_is_not_taken_as_done(recorder, name, record):
    (recorder.results.folder / f"{name}.json").write_text(json.dumps(record))
    assert name in list(recorder.jobs())


def test_the_time_ends_a_job_in_its_middle_and_the_rest_is_left():
    done = []
    jobs = {"one": lambda: done.append(1), "two": lambda: time.sleep(30), "three": done.clear}
    start = time.monotonic()
    assert work_off(jobs, 0.2) == ["two", "three"]
    assert time.monotonic() - start < 5 and done == [1]


def fail():
    raise RoseError("no room for it\nat all")


def test_a_job_that_fails_is_told_and_the_next_one_begins(capsys):
    assert work_off({"one": fail, "two": lambda: None}, 60.0) == ["one"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "one: not recorded: no room for it" and lines[1].endswith("two")


def test_a_limit_does_not_outlive_its_block():
    with limited_to(0.05):
        pass
    time.sleep(0.1)
    with pytest.raises(TimeIsUp), limited_to(0.05):
        time.sleep(5)


def test_the_command_writes_this_machines_folder_beside_the_others_and_says_how_to_show_it(
    recorder, timed, tmp_path, monkeypatch, capsys
):
    (tmp_path / "results" / REFERENCE).mkdir(parents=True)
    monkeypatch.setattr(
        Recorder, "jobs", lambda self: {"steps-W0": lambda: self.run("steps-W0"), "W0-dense": fail}
    )
    given = ["--device", "cpu", "--minutes", "1440"]  # the process may have run for long
    assert quick.main([*given, "--results", str(tmp_path / "results")]) == 0
    folder = this_machine(CPU)
    said = capsys.readouterr().out
    assert f"1 records made in {tmp_path / 'results' / folder}; show them" in said
    assert "1 left, W0-dense first: make measure goes on there" in said
    assert find_machines(folder, tmp_path / "results")[1].names() == ["steps-W0"]
