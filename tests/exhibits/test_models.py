"""What is told of modern models' recorded whole runs, also beside another machine's."""

import shutil

import pytest

from rosellm.lab.records.machines import find_machines
from rosellm.lab.records.records import find, read_us, results_folder
from rosellm.models.families.table import KNOWN_SHAPES
from rosellm.roseinfer.exhibits import load_exhibit
from tests.lab.made_up_machine import FOLDER, NAME, add_made_up_machine

models = load_exhibit("models")


def test_a_floor_reads_weights_and_cache_at_the_recorded_bandwidth_and_multiplies_prompts() -> None:
    results, arch = find(), KNOWN_SHAPES["meta-llama/Llama-3.1-8B"]
    weights, cached = arch.n_step_parameters * 2, arch.kv_bytes_per_token(2)
    step_us = read_us(results, weights + 256 * cached)
    assert models.floor(results, "Llama-3.1-8B", "D1") == pytest.approx(1e6 / step_us, rel=3e-3)
    flops = 2 * arch.n_layers * sum(n * k for n, k in arch.shapes.values())
    flops += 2 * 1024 * arch.n_layers * arch.attention_width  # causal: half of the pairs
    most = max(results.load("ceilings")["figures"]["matmul_TFLOP_s"]) * 1e12
    assert models.floor(results, "Llama-3.1-8B", "PRE") == pytest.approx(most / flops, rel=2e-2)
    assert models.floor(results, "Llama-3.1-8B", "W0") is None


def test_both_engines_of_one_session_have_a_floor_that_neither_passes() -> None:
    for model in ("Qwen3-0.6B", "Llama-3.2-1B", "Llama-3.1-8B"):
        for row in models.lease_table(find(), model):
            best = (min if row.unit == "ms" else max)(row.ours, row.rival)
            assert best > row.floor if row.unit == "ms" else best < row.floor


def test_a_modern_models_chart_and_ladder_take_machines_with_and_without_it(tmp_path) -> None:
    model, speeds_beside = "Qwen3-0.6B", load_exhibit("model_ladder").speeds_beside
    shutil.copytree(results_folder(), tmp_path / "results")
    add_made_up_machine(tmp_path / "results")
    machines = find_machines(FOLDER, tmp_path / "results")
    assert speeds_beside(machines[1:], model, "D1") == {NAME: {}}
    assert NAME in models.against_floor(machines, model).table.splitlines()[0]
    shutil.copytree(machines[0].folder / model, machines[1].folder / model)
    speeds = speeds_beside(machines, model, "D1")
    assert speeds["NVIDIA H200"] == speeds[NAME] and speeds[NAME]["dense"] > 0
    (drawn,) = (trace.x for trace in models.against_floor(machines, model).data if trace.name == NAME)
    rows = {row.workload: row for row in models.table(machines[0], model)}
    lease = [rows[row.workload] for row in models.lease_table(machines[0], model)]
    assert list(drawn) == pytest.approx([100 * models.shares_of_floor(row)[0] for row in lease])
