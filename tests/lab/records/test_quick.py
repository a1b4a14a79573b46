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
from rosellm.lab.records.quick import Job, Recorder, TimeIsUp, _outcome, limited_to, work_off
from rosellm.lab.records.records import REFERENCE
from rosellm.lab.records.registry import EXPERIMENTS

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


def test_the_ends_of_the_ladder_come_before_its_other_rungs_and_short_runs_before_long_ones(recorder):
    names = [job.name for job in recorder.jobs()]
    assert names[:3] == ["steps-W0", "W0-dense", "W0-split_kv"]
    assert names.index("W1-split_kv") < names.index("W2-dense") < names.index("W0-paged")
    assert sorted(names) == sorted(
        [f"steps-W{i}" for i in range(4)]
        + [f"W{i}-{rung}" for i in range(6) for rung in recorder.rungs]
        + ["bookkeeping", "kv_append"]
    )
    assert names[-2:] == ["bookkeeping", "kv_append"]


def test_a_gpu_makes_the_short_experiments_too(recorder):
    recorder.device = torch.device("cuda")
    names = [job.name for job in recorder.jobs()]
    assert names[0] == "ceilings"
    assert names[-8:] == list(quick.QUICK["cuda"])
    assert set(quick.QUICK["cuda"]) <= set(EXPERIMENTS)


@pytest.mark.slow
def test_an_experiment_is_recorded_as_measure_does_and_not_made_twice(recorder, capsys):
    (job,) = [job for job in recorder.jobs() if job.name == "bookkeeping"]
    assert work_off([job], 60.0) == []
    assert capsys.readouterr().out.count("\n") == 1
    record = json.loads((recorder.folder / "bookkeeping.json").read_text())
    assert record["kind"] == "bookkeeping" and set(record["figures"]) == {"8", "256"}
    assert "bookkeeping" not in [job.name for job in recorder.jobs()]


def test_a_record_is_that_of_the_benchmark_itself_and_is_not_made_twice(recorder, capsys):
    jobs = recorder.jobs()
    assert work_off([jobs[1]], 60.0) == []
    record = json.loads((recorder.folder / "W0-dense.json").read_text())
    assert record["workload"] == "W0" and record["rung"] == "dense"
    assert record["results"]["online"]["repeat_runs"] == 1
    assert "W0-dense" not in [job.name for job in recorder.jobs()]
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and said.endswith("s] W0-dense\n")


@pytest.mark.slow
def test_a_record_of_steps_goes_on_at_the_rungs_that_it_lacks(recorder):
    recorder.rungs = ["dense"]
    recorder.steps("W0")
    first = json.loads((recorder.folder / "steps-W0.json").read_text())["figures"]["turns_us"]
    recorder.rungs = ["dense", "paged"]
    assert "steps-W0" in [job.name for job in recorder.jobs()]
    recorder.steps("W0")
    both = json.loads((recorder.folder / "steps-W0.json").read_text())["figures"]["turns_us"]
    assert list(both) == ["dense", "paged"] and both["dense"] == first["dense"]
    assert "steps-W0" not in [job.name for job in recorder.jobs()]


@pytest.mark.slow
@pytest.mark.parametrize("change", ["commit", "model", "context"])
def test_steps_begun_with_another_commit_model_or_context_are_measured_anew(recorder, change):
    recorder.rungs = ["dense"]
    recorder.steps("W0")
    path = recorder.folder / "steps-W0.json"
    begun = json.loads(path.read_text())
    begun["figures"]["turns_us"] = {"dense": [[1.0]]}
    at = {"commit": begun["environment"], "model": begun, "context": begun["figures"]}[change]
    at["git_commit" if change == "commit" else change] = "another"
    path.write_text(json.dumps(begun))
    recorder.rungs = ["dense", "paged"]
    assert "steps-W0" in [job.name for job in recorder.jobs()]
    recorder.steps("W0")
    record = json.loads(path.read_text())
    assert list(record["figures"]["turns_us"]) == ["dense", "paged"]
    assert record["figures"]["turns_us"]["dense"] != [[1.0]]


def test_steps_of_every_rung_are_done_whatever_their_commit_but_not_at_another_context(recorder):
    recorder.rungs = ["dense"]
    recorder.steps("W0")
    path = recorder.folder / "steps-W0.json"
    record = json.loads(path.read_text())
    record["environment"]["git_commit"] = "another"
    path.write_text(json.dumps(record))
    assert "steps-W0" not in [job.name for job in recorder.jobs()]
    record["figures"]["context"] += 1
    path.write_text(json.dumps(record))
    assert "steps-W0" in [job.name for job in recorder.jobs()]


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("W0-dense", {"not_comparable": ["num_requests=6 for 64"]}),
        ("W0-dense", {"kind": "rivals"}),
        ("bookkeeping", {"model": "rose-tiny", "figures": {}}),
        ("bookkeeping", {"model": "gpt2", "size": "small", "figures": {}}),
        ("steps-W0", {}),
    ],
)
def test_a_record_of_something_smaller_or_else_is_not_taken_as_done(recorder, name, record):
    (recorder.folder / f"{name}.json").write_text(json.dumps(record))
    assert name in [job.name for job in recorder.jobs()]


def test_the_time_ends_a_job_in_its_middle_and_the_rest_is_left():
    done = []
    jobs = [Job("one", lambda: done.append(1)), Job("two", lambda: time.sleep(30)), Job("three", done.clear)]
    start = time.monotonic()
    assert work_off(jobs, 0.2) == ["two", "three"]
    assert time.monotonic() - start < 5 and done == [1]


def test_a_job_that_fails_is_told_and_the_next_one_begins(capsys):
    def fail():
        raise RoseError("no room for it\nat all")

    assert work_off([Job("one", fail), Job("two", lambda: None)], 60.0) == ["one"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "one: not recorded: no room for it" and lines[1].endswith("two")


def test_a_limit_does_not_outlive_its_block():
    with limited_to(0.05):
        pass
    time.sleep(0.1)
    with pytest.raises(TimeIsUp), limited_to(0.05):
        time.sleep(5)


@pytest.mark.slow
def test_the_command_writes_this_machines_folder_beside_the_others_and_says_how_to_show_it(
    recorder, tmp_path, monkeypatch, capsys
):
    (tmp_path / "results" / REFERENCE).mkdir(parents=True)
    monkeypatch.setattr(Recorder, "jobs", lambda self: [Job("steps-W0", lambda: self.run("steps-W0"))])
    given = ["--device", "cpu", "--minutes", "1440"]  # the process may have run for long
    assert quick.main([*given, "--results", str(tmp_path / "results")]) == 0
    folder = this_machine(CPU)
    assert f"1 records made in {tmp_path / 'results' / folder}; show them" in capsys.readouterr().out
    assert find_machines(folder, tmp_path / "results")[1].names() == ["steps-W0"]


def test_the_outcome_tells_of_a_record_that_is_begun_and_shows_nothing_where_nothing_is(tmp_path):
    none = _outcome(tmp_path, 0, ["steps-W0", "W0-dense"])
    assert none.splitlines() == [
        f"0 records made in {tmp_path}",
        "2 left, steps-W0 first: make measure goes on there (MINUTES=60 takes longer)",
    ]
    (tmp_path / "steps-W0.json").write_text("{}")
    assert _outcome(tmp_path, 0, ["steps-W0"]).startswith(
        f"0 records made and steps-W0 begun in {tmp_path}; show"
    )
    assert _outcome(tmp_path, 1, []) == (
        f"1 records made in {tmp_path}; show them with: make notebooks P=record={tmp_path.name}"
    )
