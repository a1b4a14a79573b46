"""The command that makes the committed records."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rosellm.environment import environment
from rosellm.lab import measure
from rosellm.lab.records import ablations, runs
from rosellm.lab.records.registry import Job, plan
from rosellm.lab.running.interruption import Interruption
from rosellm.lab.running.sweep import Finished
from rosellm.models.checkpoint import SHIPPED
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.recipe import LADDER
from tests.lab.measuring import measured, refusal

SMALL = ["--device=cpu"]


def test_a_record_tells_the_model_that_was_measured_and_the_size_and_one_of_python_alone_neither(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        load_exhibit("bookkeeping"), "bookkeeping_cost", lambda *_sizes: {"tuple": [1.0], "slots": [1.0]}
    )
    bookkeeping = measured(tmp_path, "bookkeeping")
    assert bookkeeping["kind"] == "bookkeeping" and bookkeeping["environment"]["device_name"]
    assert set(bookkeeping["figures"]["8"]) == {"tuple", "slots"} and "model" not in bookkeeping
    run = measured(tmp_path, "D1", "--repeats=1")
    assert run["workload"] == "D1" and "max_new_tokens=8 for 512" in run["not_comparable"]
    assert len(run["results"]["offline"]["repeats"]) == 1


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("W99", "'W99' is unknown; use W0-…, W1-…"),
        (
            "W1-dense W0-dense --size=full --model=rose-tiny",
            "W0-dense needs 513 positions; the model has 512",
        ),
        ("W1-dense W1-autotune", "rung 'autotune': it needs a GPU"),
        (
            "W1-persistent_kernel --model=rose-tiny-qwen3",
            "rung 'persistent_kernel': exhibit='persistent_layers' cannot run a model of family qwen3",
        ),
        ("bookkeeping autotune", "autotune needs a GPU"),
        ("first_request --repeats=0", "'0'"),
        ("chunk_budget --size=full --model=gpt2", "chunk_budget needs 4608 positions; the model has 1024"),
        ("prompt_attention --model=mistralai/Mistral-7B-v0.1", "a window of 4096 tokens"),
        ("sampling_steps --model=nobody/knows", "nobody/knows"),
        ("all_reduce --all-reduce=ring", "'ring' is unknown; use library, one_shot"),
        ("all_reduce --ranks=1", "--ranks"),
        ("tensor_parallel-W4", "experiment 'tensor_parallel-W4' is unknown"),
        ("replicas-W8 --all-reduce=library", "replicas-W8 takes no --all-reduce"),
        ("tensor_parallel-L8K --size=full --model=rose-tiny", "needs 8448 positions; the model has 512"),
        ("versions", "versions needs --old"),
        ("versions --old=HEAD --workloads=,", "--workloads names none"),
        ("versions --old=no-such-commit", "no-such-commit"),
        ("versions --old=--output=x", "--output=x"),
    ],
)
def test_what_cannot_be_measured_is_told_in_one_line_before_anything_runs(asked, told, tmp_path, capsys):
    assert told in refusal(capsys, tmp_path, *asked.split())


def test_an_installed_package_tells_in_one_line_that_others_need_a_checkout(tmp_path):
    (tmp_path / "rosellm").symlink_to(Path(measure.__file__).parents[1])
    command = [sys.executable, "-m", "rosellm.lab.measure", "chunk_budget"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "'chunk_budget' is unknown" in done.stderr and "from a checkout of RoseLLM" in done.stderr


def test_records_are_measured_without_the_packages_of_notebooks():
    names = (
        "jupyterlab IPython ipykernel traitlets plotly kaleido jupyter_client papermill nbclient nbconvert"
    )
    names += " nbformat nbstripout PIL yaml"
    code = "import sys; sys.modules |= dict.fromkeys(sys.argv[1:]); import rosellm.lab.measure"
    subprocess.run([sys.executable, "-c", code, *names.split()], check=True)


def test_a_record_that_cannot_be_written_is_told_before_anything_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(load_exhibit("bookkeeping"), "bookkeeping_cost", None)
    (tmp_path / "bookkeeping.json").mkdir()
    assert "is not a regular file" in refusal(capsys, tmp_path, "bookkeeping")


@pytest.mark.slow
def test_on_a_cpu_everything_is_small_and_said_to_be_and_shows_its_progress(tmp_path, capsys, monkeypatch):
    known = {rung: LADDER[rung] for rung in ("dense", "autotune", "persistent_kernel", "paged")}
    monkeypatch.setattr(runs, "LADDER", known)
    given = ["W2", "W7-dense", "counts", "equality", "--model=rose-tiny-qwen3", "--repeats=1"]
    assert measure.main([*SMALL, f"--output={tmp_path}", *given]) == 0
    folder = tmp_path / "rose-tiny-qwen3"
    assert sorted(path.stem for path in folder.iterdir()) == ["W2-dense", "W2-paged", "W7-dense", "counts"]
    counts = json.loads((folder / "counts.json").read_text())
    assert counts["model"] == "rose-tiny-qwen3" and set(counts["figures"]) == {"4", "4 mixed"}
    assert list(counts["figures"]["4"]) == ["dense", "paged"]
    equality = json.loads((tmp_path / "equality.json").read_text())
    assert equality["model"] == SHIPPED and equality["size"] == "small"
    assert list(equality["figures"]["float32"]) == ["dense", "persistent_kernel", "paged"]
    said = capsys.readouterr()
    assert "Not comparable with W2's records: " in said.out
    assert "counts, batch 4: paged" in said.err and "W7-dense" in said.err


@pytest.mark.slow
def test_steps_ablations_and_the_best_recipe_less_one_field_are_recorded_in_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "LADDER", {rung: LADDER[rung] for rung in ("dense", "dependent_launch")})
    monkeypatch.setattr(ablations, "BETWEEN", {"fused_head": ablations.BETWEEN["fused_head"]})
    names = ["steps-W1", "ablations-W1", "leave_one_out-W1"]
    assert measure.main([*SMALL, f"--output={tmp_path}", *names]) == 0
    figures = {
        name: json.loads((tmp_path / SHIPPED / f"{name}.json").read_text())["figures"] for name in names
    }
    assert list(figures["steps-W1"]["turns_us"]) == ["dense", "dependent_launch"]
    between = figures["ablations-W1"]["fused_head"]["turns_us"]
    assert list(between) == ["fused_gelu", "vocabulary padded", "fused_head"]
    left_out = figures["leave_one_out-W1"]
    assert {"none", "head", "runner"} <= set(left_out["tok_s"]) and "norm" in left_out["refused"]
    assert all(value > 0 for values in left_out["tok_s"].values() for value in values)


@pytest.mark.parametrize(
    ("given", "model", "load_format", "folder"),
    [
        ("first_request", "rose-tiny", "auto", "rose-tiny"),
        ("first_request --size full", "gpt2", "dummy", "."),
        ("W1-dense --size full --model Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "dummy", "Qwen3-0.6B"),
        ("D1 --size full", "Qwen/Qwen3-0.6B", "dummy", "Qwen3-0.6B"),
        ("sampling_steps --size full", "gpt2", "dummy", "gpt2"),
        ("bookkeeping --model gpt2", SHIPPED, "auto", "."),
    ],
)
def test_the_model_and_the_folder_follow_from_the_experiment_and_the_size(given, model, load_format, folder):
    (job,) = plan(measure.parse([*SMALL, "--output=out", *given.split()]))
    assert (job.asked.model, job.asked.load_format) == (model, load_format)
    assert job.path.parent == Path("out") / folder


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
    out = f"--output={tmp_path / 'out'}"
    return lambda *options: measure.main(
        ["bookkeeping", "W1-dense", *options, "--cluster=head:6379", out, "--repeats=1"]
    )


@pytest.mark.slow
def test_a_sweep_lists_what_failed_and_the_next_one_makes_only_that(swept, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Machines, "fails", ("bookkeeping",))
    assert swept() == 2
    told = "FAILED bookkeeping: lost\nerror: 1 of 2 records are missing; the same command continues there\n"
    assert capsys.readouterr().err == told
    made = tmp_path / "out/rose-tiny/W1-dense.json"
    before = made.stat().st_mtime_ns
    assert [path.name for path in made.parent.iterdir()] == [made.name]
    assert json.loads(made.read_text())["environment"]["host"] == environment(torch.device("cpu"))["host"]
    monkeypatch.setattr(Machines, "fails", ())
    assert swept() == 0
    assert Machines.ran == ["bookkeeping"] and made.stat().st_mtime_ns == before
    assert f"1 of 2 records are in {tmp_path / 'out'} already" in capsys.readouterr().out


def test_a_sweep_that_is_interrupted_keeps_what_is_finished(swept, tmp_path, capsys, monkeypatch):
    def make_record(job: Job) -> dict:
        os.kill(os.getpid(), signal.SIGTERM)
        return {"kind": job.name}

    monkeypatch.setattr(measure, "make_record", make_record)
    with pytest.raises(SystemExit) as leaving:
        swept()
    assert leaving.value.code == 128 + signal.SIGTERM
    assert json.loads((tmp_path / "out/bookkeeping.json").read_text()) == {"kind": "bookkeeping"}
    assert capsys.readouterr().err == "interrupted by SIGTERM: finished bookkeeping; not finished W1-dense\n"


def test_what_the_machines_cannot_run_is_told_before_anything_is_made(swept, tmp_path, capsys):
    assert swept("ceilings") == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "ceilings needs a GPU" in message
    assert not (tmp_path / "out").exists() and not Machines.ran


@pytest.mark.gpu
def test_a_workload_is_recorded_on_a_gpu(tmp_path):
    assert measure.main(["--output", str(tmp_path), "W1-reused_index_buffers"]) == 0
    record = json.loads((tmp_path / "W1-reused_index_buffers.json").read_text())
    assert len(record["results"]["online"]["repeats"]) == 3
