"""The ledgers of modern models' workloads, and the command that records them."""

import json
from dataclasses import replace

import pytest

from rosellm.bench.workloads import ALL_WORKLOADS, MODEL_WORKLOADS, WORKLOADS
from rosellm.lab import measure
from rosellm.lab.records import model_ledgers, recordings
from rosellm.lab.records.bench import get_model
from rosellm.lab.records.ledger import Ledger, step_ledger
from rosellm.lab.records.model_ledgers import workload_ledger

MODEL = "rose-tiny-qwen3"
SHORT = {
    "D8": replace(MODEL_WORKLOADS["D8"], max_batch_size=3, max_new_tokens=80),
    "PRE": replace(MODEL_WORKLOADS["PRE"], num_requests=3, prompt_tokens=40),
}


@pytest.fixture(scope="module")
def tiny():
    return get_model(MODEL, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rung", "shape"),
    [("D8", "split_kv", (3, 64 - 1 + 40, 8)), ("PRE", "split_kv", (3, 40, 4)), ("PRE", "dense", (3, 40, 4))],
)
def test_a_ledger_is_of_a_mid_run_step_or_of_one_iterations_prompts_with_rows_adding_up(
    tiny, name, rung, shape
):
    ledger = workload_ledger(tiny, rung, SHORT[name])
    assert (ledger.batch, ledger.context, ledger.steps) == pytest.approx(shape, abs=1)
    assert sum(row.us for row in ledger.rows) == pytest.approx(ledger.step_us)
    assert {"GEMM", "attention", "norm"} <= {row.cause for row in ledger.rows}


@pytest.mark.slow
def test_unequal_requests_have_half_of_their_own_outputs_and_sample_as_their_workload_does(tiny, monkeypatch):
    taken = []
    monkeypatch.setattr(
        model_ledgers,
        "step_ledger",
        lambda bench, steps: taken.append(bench.params) or step_ledger(bench, steps),
    )
    lengths = {"prompt_tokens": 90, "min_prompt_tokens": 60, "max_new_tokens": 120, "min_new_tokens": 60}
    ledger = workload_ledger(tiny, "split_kv", replace(WORKLOADS["W10"], max_batch_size=4, **lengths))
    assert ledger.batch == 4 and 60 + 30 < ledger.context < 90 + 60
    assert sum(row.us for row in ledger.rows) == pytest.approx(ledger.step_us)
    assert {(one.temperature, one.top_k, one.top_p) for one in taken[0]} == {(0.8, 50, 0.9)}


@pytest.mark.slow
def test_a_ledger_that_fails_is_told_and_the_others_are_recorded(tmp_path, monkeypatch, capsys):
    def out_of_memory(model, rung, workload):
        if workload.id == "D1":
            raise RuntimeError("out of memory\nand a long story")
        return workload_ledger(model, rung, workload)

    monkeypatch.setattr(recordings, "workload_ledger", out_of_memory)
    monkeypatch.setitem(ALL_WORKLOADS, "D8", SHORT["D8"])
    given = [f"--model={MODEL}", "--device=cpu", "--size=full", f"--output={tmp_path}"]
    status = measure.main(["ledgers", *given, "--workloads=D1,L32K,D8"])
    figures = json.loads((tmp_path / MODEL / "ledgers.json").read_text())["figures"]
    said = capsys.readouterr()
    assert status != 0 and Ledger.from_dict(figures.pop("D8")).name == "split_kv" and not figures
    assert "D1: no ledger: RuntimeError: out of memory\n" in said.out
    assert "L32K: no ledger: " in said.out and "32099 prompt tokens" in said.out
    assert "no ledger of D1, L32K" in said.err.splitlines()[-1]


@pytest.mark.gpu
def test_on_a_gpu_each_role_stands_beside_its_floor():
    model = get_model("Qwen/Qwen3-0.6B", "cuda", "auto", "dummy")
    for name in ("D1", "PRE"):
        rows = {row.cause: row for row in workload_ledger(model, "split_kv", MODEL_WORKLOADS[name]).rows}
        assert all(rows[cause].floor_us for cause in ("GEMM", "attention", "head"))
