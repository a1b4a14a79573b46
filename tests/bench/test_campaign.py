"""The campaign: it resumes, refuses mixtures, tells what is missing, and makes every record that is shown."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from rosellm.bench import campaign
from rosellm.bench.__main__ import main
from rosellm.bench.plan import PLAN, RUNGS, Block, Run
from rosellm.environment import COMMIT_VARIABLE, environment
from rosellm.lab import measure
from rosellm.lab.records.experiment import Experiment
from rosellm.lab.records.records import REFERENCE, results_folder
from rosellm.lab.records.registry import plan
from tests.test_docs import Parsed, stop_after_parsing

FAKE = """
import json, os, sys
from pathlib import Path
from subprocess import Popen

*names, _output, folder, _device, _cpu = sys.argv[1:]
for name in names:
    record = {"environment": json.loads(os.environ["FAKE"])}
    (Path(folder) / f"{name}.json").write_text(json.dumps(record))
    if name == os.environ.get("BREAKS"):
        sys.exit("no room")
    if name == os.environ.get("FORGETS"):
        (Path(folder) / f"{name}.json").unlink()
    if name == os.environ.get("KILLS"):
        os.kill(os.getppid(), 9)
    if name == os.environ.get("STARTS"):
        Popen([sys.executable, "-c", f"import time; time.sleep(60)  # {folder}"])
    print(f"[   0.1 s] {name}")
"""
HERE = environment(torch.device("cpu")) | {"git_commit": "abc", "git_dirty": False}


class Folder:
    """A campaign of two blocks, whose command writes records without measuring anything."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.set = path / "out", monkeypatch
        (path / "fake.py").write_text(FAKE)
        monkeypatch.setenv("PYTHONPATH", str(path))
        monkeypatch.setenv("FAKE", json.dumps(HERE))
        monkeypatch.setattr(campaign, "environment", lambda _device: HERE)
        self.blocks(a1=1.0, a2=1.0, a3=1.0)

    def blocks(self, **seconds: float) -> None:
        blocks = [Block("first", [Run("fake", seconds)]), Block("second", [Run("fake", {"b": 1.0})])]
        self.set.setattr(campaign, "PLAN", blocks)

    def run(self, *options: str) -> int | str | None:
        try:
            return main(["campaign", "--device=cpu", f"--out={self.path}", *options])
        except SystemExit as left:
            return left.code

    def made(self) -> dict[str, int]:
        return {path.stem: path.stat().st_mtime_ns for path in sorted(self.path.glob("*.json"))}

    def change(self, name: str, **facts: str | bool) -> None:
        (self.path / f"{name}.json").write_text(json.dumps({"environment": HERE | facts}))


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Folder:
    return Folder(tmp_path, monkeypatch)


def test_a_call_stops_where_the_time_does_not_suffice_and_the_next_one_goes_on_there(folder, capsys):
    folder.blocks(a1=1.0, a2=6000.0, a3=1.0)
    assert folder.run() == 1
    assert list(made := folder.made()) == ["a1"]
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("first: a1, 0 s of 1")
    assert "1 of 3 records; missing, 100.0 minutes: a2, a3" in told[1] and "missing, 0.0" in told[2]
    folder.blocks(a1=1.0, a2=1.0, a3=1.0)
    assert folder.run() == 0
    assert list(folder.made()) == ["a1", "a2", "a3", "b"] and folder.made()["a1"] == made["a1"]
    told = capsys.readouterr().out
    assert "first: a2 to a3" in told and "missing" not in told
    assert folder.run() == 0 and folder.made()["a1"] == made["a1"]


def test_a_list_measures_nothing(folder, capsys):
    assert folder.run("--list", "--block=first") == 0
    assert "0 of 3 records" in capsys.readouterr().out and not folder.path.exists()


def test_what_fails_is_told_and_only_its_unfinished_record_is_dropped(folder, capsys, monkeypatch):
    monkeypatch.setenv("BREAKS", "a2")
    assert folder.run() == 1
    assert list(folder.made()) == ["a1", "a3", "b"]
    told = capsys.readouterr().out
    assert "FAILED" in told and "missing, 0.0 minutes: a2\n" in told
    assert "no room" in (folder.path / "campaign.log").read_text()


def test_a_record_that_a_command_leaves_out_is_not_asked_for_again_in_a_call(folder, capsys, monkeypatch):
    monkeypatch.setenv("FORGETS", "a1")
    assert folder.run() == 1 and capsys.readouterr().out.count("FAILED") == 1
    assert list(folder.made()) == ["a2", "a3", "b"]


def test_a_record_that_is_begun_when_the_campaign_is_killed_does_not_count(folder):
    environment = os.environ | {"KILLS": "a2"}
    code = (
        "import json, os; from rosellm.bench import campaign; from rosellm.bench.plan import Block, Run;"
        "campaign.environment = lambda _device: json.loads(os.environ['FAKE']);"
        "campaign.PLAN = [Block('first', [Run('fake', {'a1': 1.0, 'a2': 1.0})])];"
        f"from rosellm.bench.__main__ import main; main(['campaign', '--device=cpu', '--out={folder.path}'])"
    )
    paths = os.pathsep.join([str(Path(campaign.__file__).parents[2]), os.environ["PYTHONPATH"]])
    killed = subprocess.run([sys.executable, "-c", code], env=environment | {"PYTHONPATH": paths})
    assert killed.returncode == -signal.SIGKILL and not folder.made()
    assert folder.run() == 0 and len(folder.made()) == 4


def test_processes_of_a_command_end_with_it(folder, monkeypatch):
    monkeypatch.setenv("STARTS", "a1")
    assert folder.run() == 0
    left = [
        p for p in psutil.process_iter(["cmdline"]) if str(folder.path) in " ".join(p.info["cmdline"] or [])
    ]
    assert left == []


@pytest.mark.parametrize("text", ["", "{}", "[1]"])
def test_a_file_that_is_not_a_record_is_refused_in_one_line(folder, capsys, text):
    folder.path.mkdir()
    (folder.path / "a1.json").write_text(text)
    assert folder.run() == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.endswith("a1.json is not a record: remove it\n")


def test_records_of_another_commit_made_during_a_call_are_refused(folder, capsys, monkeypatch):
    monkeypatch.setenv("FAKE", json.dumps(HERE | {"git_commit": "def"}))
    assert folder.run() == 2 and "another commit" in capsys.readouterr().err and not folder.made()


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"host": "other", "lease": "other"}, "another host and lease"),
        ({"git_commit": "def"}, "another commit"),
        ({"git_dirty": True}, "another commit"),
        ({"device_name": "NVIDIA H100"}, "another GPU"),
    ],
)
def test_an_unfinished_block_is_not_mixed_with_records_made_elsewhere(folder, capsys, facts, told):
    folder.path.mkdir()
    folder.change("a2", **facts)
    assert folder.run() == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and told in said and "a2.json" in said and "block first" in said
    assert list(folder.made()) == ["a2"]


def test_a_block_may_be_measured_where_another_one_was_not_finished(folder):
    folder.path.mkdir()
    folder.change("a1", host="other", lease="other")
    assert folder.run("--block=second") == 0 and list(folder.made()) == ["a1", "b"]


def test_each_block_may_have_a_lease_of_its_own_but_all_are_of_one_commit(folder, capsys):
    folder.path.mkdir()
    for name in ("a1", "a2", "a3"):
        folder.change(name, host="other", lease="other")
    assert folder.run() == 0
    folder.change("a1")
    assert folder.run() == 2 and "another host and lease" in capsys.readouterr().err
    for name in ("a1", "a2", "a3"):
        folder.change(name, git_commit="def")
    assert folder.run("--block=second") == 2 and "another commit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("facts", "told"),
    [({"git_dirty": True}, "commit your changes"), ({"git_commit": None}, "ROSELLM_COMMIT")],
)
def test_a_campaign_is_of_a_clean_commit(folder, capsys, monkeypatch, facts, told):
    monkeypatch.setattr(campaign, "environment", lambda _device: HERE | facts)
    assert folder.run() == 2 and told in capsys.readouterr().err and not folder.path.exists()


def test_real_commands_make_their_records_and_these_tell_where(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "none"))
    monkeypatch.setenv(COMMIT_VARIABLE, "abc")
    here = environment(torch.device("cpu"))
    runs = [
        Run("rosellm.lab.measure --repeats 1", {"rose-tiny/W1-paged": 1.0}),
        Run("rosellm.bench steps --rows 1 --turns 1 --json {record}", {"rose-tiny/steps_by_rows": 1.0}),
    ]
    monkeypatch.setattr(campaign, "PLAN", [Block("small", runs)])
    assert main(["campaign", "--device=cpu", f"--out={tmp_path}"]) == 0
    for name in ("W1-paged", "steps_by_rows"):
        own = json.loads((tmp_path / f"rose-tiny/{name}.json").read_text())["environment"]
        assert [own[key] for key in ("host", "lease")] == [here["host"], here["lease"]]


RUNS = [one for block in PLAN for one in block.runs]
MEASURED = [one for one in RUNS if one.command.startswith("rosellm.lab.measure")]


@pytest.mark.parametrize("one", MEASURED, ids=lambda one: next(iter(one.records)))
def test_the_records_of_a_run_are_where_its_command_writes_them(one, monkeypatch):
    _module, *arguments = one.arguments(Path("whole"), Path("out"), list(one.records))
    given = measure.parse([*arguments, "--size=full", "--device=cpu"])
    monkeypatch.setattr(Experiment, "check", lambda *_given: None)
    assert [job.path for job in plan(given)] == [Path("out", f"{record}.json") for record in one.records]


def test_other_commands_of_the_plan_take_their_options(monkeypatch):
    stop_after_parsing(monkeypatch)
    for one in RUNS:
        if one not in MEASURED:
            module, *arguments = one.arguments(Path("whole"), Path("out"), list(one.records))
            assert module == "rosellm.bench"
            with pytest.raises(Parsed):
                main([*arguments, "--device", "cuda"])


def test_a_block_fits_in_a_lease_and_a_record_in_a_call():
    assert all(block.seconds <= 25 * 60 for block in PLAN)
    assert max(one.expected_s([record]) for one in RUNS for record in one.records) < 8 * 60


# Records that no command of one GPU makes: the training of the models that ship, and trials of code that is
# gone or was never kept. Those of two GPUs, rivals, CPUs and another GPU are in other places.
TRAINING = {"train", "train-qwen3", "train-rose-tiny-draft", "train-rose-tiny-qwen3-draft"}
TRIALS = {"attention_trials", "flight_trials", "last_trials", "ring_trials", "suffix_match", "tuned_others"}
# Records that no page compares; they go with the next campaign.
DROPPED = {f"{workload}-{rung}" for workload in ("W6", "W7") for rung in RUNGS} | {"PFX-split_kv"}


def test_the_plan_makes_every_committed_record_of_one_gpu_so_that_a_page_can_read_no_other():
    folder = results_folder() / REFERENCE
    committed = {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.json")}
    made = [record for one in RUNS for record in one.records]
    assert len(made) == len(set(made))
    assert committed - {*made} - DROPPED == TRAINING | TRIALS
