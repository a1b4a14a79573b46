"""The command that makes the committed records."""

import json
import os
import platform
import signal
from argparse import Namespace

import pytest

from rosellm.bench.workloads import WORKLOADS
from rosellm.lab import measure
from rosellm.lab.records import recordings, rungs, step_records
from rosellm.lab.records.sizes import SIZES, positions_needed
from rosellm.lab.records.step_time import StepTimes
from rosellm.lab.running.interruption import Interruption
from rosellm.lab.running.sweep import Finished
from rosellm.models.checkpoint import SHIPPED, checkpoint_folder, load_config
from rosellm.models.families.table import KNOWN_SHAPES
from rosellm.roseinfer.recipe import LADDER

SMALL = ["--device", "cpu"]


@pytest.mark.slow
def test_a_record_tells_the_model_that_was_measured_and_the_size(tmp_path, monkeypatch):
    for name in ("equality", "kv_pressure", "bookkeeping"):
        monkeypatch.setitem(recordings.EXPERIMENTS, name, lambda arguments: {})
    given = ["--experiments", "equality,kv_pressure,bookkeeping", "--model", "gpt2", "--size", "small"]
    assert measure.main([*SMALL, "--output", str(tmp_path), "--workloads", "", *given]) == 0

    def told(name):
        record = json.loads((tmp_path / f"{name}.json").read_text())
        return record.get("model"), record.get("size")

    assert told("equality") == (SHIPPED, "small")  # always measured on that one
    assert told("kv_pressure") == ("gpt2", "small")
    assert told("bookkeeping") == (None, None)  # of Python alone


def test_unknown_workloads_rungs_and_experiments_are_told_before_anything_runs(tmp_path, capsys):
    for option, known in (("--workloads", "W0"), ("--rungs", "dense"), ("--experiments", "counts")):
        assert measure.main([*SMALL, "--output", str(tmp_path / "out"), option, "W99"]) == 2
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and "W99" in message and known in message
    assert not (tmp_path / "out").exists()


def test_an_experiment_is_recorded_with_its_figures_and_environment(tmp_path):
    arguments = [*SMALL, "--output", str(tmp_path), "--workloads", "", "--experiments", "bookkeeping"]
    assert measure.main(arguments) == 0
    record = json.loads((tmp_path / "bookkeeping.json").read_text())
    assert record["kind"] == "bookkeeping" and record["environment"]["device_name"]
    assert set(record["figures"]["8"]) == {"tuple", "slots"}


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["--workloads", "W1,W0", "--model", "rose-tiny"], "W0: 1 prompt tokens and 512 new ones exceed"),
        (["--workloads", "W1", "--rungs", "dense,autotune"], "rung 'autotune' needs a GPU"),
        (
            ["--workloads", "W1", "--rungs", "dense,persistent_kernel", "--model", "rose-tiny-qwen3"],
            "rung 'persistent_kernel': exhibit='persistent_layers' cannot run a model of family qwen3",
        ),
        (["--experiments", "bookkeeping,autotune"], "experiment 'autotune' needs a GPU"),
        (["--experiments", "lengths-64"], "experiment 'lengths-64' needs a GPU"),
        (["--experiments", "bookkeeping,grid", "--model", "rose-tiny"], "grid needs 1014 positions"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_job_that_cannot_run_is_told_before_the_first_starts(asked, told, tmp_path, capsys):
    given = {"--workloads": "", "--experiments": ""} | dict(zip(asked[::2], asked[1::2], strict=True))
    options = [text for pair in given.items() for text in pair]
    assert measure.main(["--device=cpu", "--size=full", f"--output={tmp_path / 'out'}", *options]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and told in message
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_on_a_cpu_everything_is_small_and_said_to_be_and_shows_its_progress(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rungs, "LADDER", {rung: LADDER[rung] for rung in ("dense", "autotune", "paged")})
    options = ["--device=cpu", f"--output={tmp_path}", "--rungs=dense", "--repeats=1"]
    assert measure.main([*options, "--workloads=W2,W7", "--experiments=counts"]) == 0
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert counts["model"] == "rose-tiny" and set(counts["figures"]) == {"4", "4 mixed"}
    assert set(counts["figures"]["4"]) == {"dense", "paged"}
    record = json.loads((tmp_path / "W7-dense.json").read_text())
    assert "prompt_tokens=96 for 512" in record["not_comparable"]
    said = capsys.readouterr()
    assert "Not comparable with W2's records: num_requests=6 for 64" in said.out
    assert "counts, batch 4: paged" in said.err and "W7-dense" in said.err


@pytest.mark.slow
def test_rungs_that_cannot_run_the_model_are_left_out_unless_they_are_named(tmp_path, monkeypatch):
    known = {rung: LADDER[rung] for rung in ("dense", "persistent_kernel", "paged")}
    monkeypatch.setattr(rungs, "LADDER", known)
    options = ["--device=cpu", f"--output={tmp_path}", "--model=rose-tiny-qwen3", "--repeats=1"]
    assert measure.main([*options, "--workloads=W0", "--experiments=counts,equality"]) == 0
    names = ("W0-dense", "W0-paged", "counts", "equality")
    figures = {name: json.loads((tmp_path / f"{name}.json").read_text()).get("figures") for name in names}
    assert sorted(path.stem for path in tmp_path.iterdir()) == list(names)
    assert list(figures["counts"]["4"]) == ["dense", "paged"]
    assert list(figures["equality"]["float32"]) == list(known)  # of the shipped model, which all can run


def test_the_help_says_that_experiments_do_not_follow_rungs(capsys):
    with pytest.raises(SystemExit):
        measure.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "for workloads only; default: all; experiments always run all" in said


@pytest.mark.slow
def test_steps_ablations_and_the_best_recipe_less_one_field_are_recorded_in_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(rungs, "LADDER", {rung: LADDER[rung] for rung in ("dense", "dependent_launch")})
    monkeypatch.setattr(step_records, "ABLATED", ("fused_head",))
    names = "steps-W1,ablations-W1,leave_one_out-W1"
    assert (
        measure.main(["--device=cpu", f"--output={tmp_path}", "--workloads=", f"--experiments={names}"]) == 0
    )
    figures = {
        name: json.loads((tmp_path / f"{name}.json").read_text())["figures"] for name in names.split(",")
    }
    assert list(figures["steps-W1"]["turns_us"]) == ["dense", "dependent_launch"]
    between = figures["ablations-W1"]["fused_head"]["turns_us"]
    assert list(between) == ["fused_gelu", "vocabulary padded", "fused_head"]
    left_out = figures["leave_one_out-W1"]
    assert {"none", "head", "runner"} <= set(left_out["tok_s"]) and "norm" in left_out["refused"]
    assert all(value > 0 for values in left_out["tok_s"].values() for value in values)


@pytest.mark.parametrize(("size", "sizes"), [("full", (64, 240)), ("small", (4, 24))])
def test_unequal_contexts_are_recorded_in_a_size_that_fits(size, sizes, monkeypatch):
    asked = Namespace(model=SHIPPED, device="cpu", load_format="auto", size=SIZES[size])
    measured = {"equal, cut": StepTimes(((7.0, 8.0),))}
    monkeypatch.setattr(
        recordings, "length_steps", lambda _model, *given, **_effort: measured if given == sizes else {}
    )
    batch, context = sizes
    expected = {"batch": batch, "context": context, "turns_us": {"equal, cut": [[7.0, 8.0]]}}
    assert recordings.EXPERIMENTS["lengths-64"](asked) == expected


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=list(WORKLOADS))
def test_a_full_size_changes_no_workload(workload):
    assert SIZES["full"].of(workload) == workload


def test_every_job_of_either_size_fits_the_model_that_is_its_default():
    for size, shape in (("full", KNOWN_SHAPES["gpt2"]), ("small", load_config(checkpoint_folder(SHIPPED)))):
        assert max(positions_needed(SIZES[size]).values()) <= shape.n_positions


class Machines:
    """In place of a sweep over a cluster without a GPU: every task runs here, but for those that fail."""

    fails: tuple[str, ...] = ()
    ran: list[str] = []

    def __init__(self, _address: str, interruption: Interruption) -> None:
        self.interruption = interruption
        self.ran.clear()

    def __enter__(self):
        return self

    def __exit__(self, *_exception: object) -> None: ...

    def takes_gpu(self, device: str) -> bool:
        return device == "cuda"

    def call(self, task, on_gpu: bool):
        return task()

    def run(self, tasks, on_gpu: bool, unit: str):
        for name, task in tasks.items():
            self.ran.append(name)
            yield name, Finished(error="lost") if name in self.fails else Finished("far", 1.0, task())
            if self.interruption.number is not None:
                return


@pytest.fixture
def swept(tmp_path, monkeypatch):
    """Runs the command over a fake cluster; its exit status."""
    monkeypatch.setattr(measure, "Sweep", Machines)
    out, small = f"--output={tmp_path / 'out'}", ("--workloads=W1", "--rungs=dense", "--repeats=1")
    return lambda *options: measure.main(
        ["--cluster=head:6379", out, *small, "--experiments=bookkeeping", *options]
    )


@pytest.mark.slow
def test_a_sweep_lists_what_failed_and_the_next_one_makes_only_that(swept, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Machines, "fails", ("bookkeeping",))
    assert swept() == 2
    told = "FAILED bookkeeping: lost\nerror: 1 of 2 records are missing; the same command continues there\n"
    assert capsys.readouterr().err == told
    made = tmp_path / "out/W1-dense.json"
    before = made.stat().st_mtime_ns
    assert [path.name for path in made.parent.iterdir()] == [made.name]
    assert json.loads(made.read_text())["environment"]["machine"] == platform.node()
    monkeypatch.setattr(Machines, "fails", ())
    assert swept() == 0
    assert Machines.ran == ["bookkeeping"] and made.stat().st_mtime_ns == before
    assert f"1 of 2 records are in {made.parent} already" in capsys.readouterr().out


def test_a_sweep_that_is_interrupted_keeps_what_is_finished(swept, tmp_path, capsys, monkeypatch):
    def make_record(name: str, *_given: object) -> dict:
        os.kill(os.getpid(), signal.SIGTERM)
        return {"kind": name}

    monkeypatch.setattr(measure, "make_record", make_record)
    with pytest.raises(SystemExit) as leaving:
        swept()
    assert leaving.value.code == 128 + signal.SIGTERM
    assert json.loads((tmp_path / "out/bookkeeping.json").read_text()) == {"kind": "bookkeeping"}
    assert capsys.readouterr().err == "interrupted by SIGTERM: finished bookkeeping; not finished W1-dense\n"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["--workloads=W99"], "workload 'W99' is unknown"),
        (["--rungs=autotune"], "rung 'autotune' needs a GPU"),
        (["--experiments=ceilings"], "experiment 'ceilings' needs a GPU"),
    ],
)
def test_what_the_machines_cannot_run_is_told_before_anything_is_made(swept, tmp_path, capsys, asked, told):
    assert swept(*asked) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and told in message
    assert not (tmp_path / "out").exists() and not Machines.ran


@pytest.mark.gpu
def test_a_workload_is_recorded_on_a_gpu(tmp_path):
    arguments = [
        "--output",
        str(tmp_path),
        "--workloads",
        "W1",
        "--rungs",
        "reused_index_buffers",
        "--experiments",
        "",
    ]
    assert measure.main(arguments) == 0
    record = json.loads((tmp_path / "W1-reused_index_buffers.json").read_text())
    assert len(record["results"]["online"]["repeats"]) == 3
