"""What is told of modern models' recorded whole runs."""

import json
from pathlib import Path

import pytest

from rosellm.lab.records.model_runs import floor, lease_table, runs_told
from rosellm.lab.records.records import Results, find, read_us
from rosellm.models.families.table import KNOWN_SHAPES


def write_run(folder: Path, model: str, workload: str, repeats: int) -> None:
    (folder / model).mkdir(exist_ok=True)
    record = {"results": {"offline": {"repeat_runs": repeats}}}
    (folder / model / f"{workload}.json").write_text(json.dumps(record))


def test_each_models_runs_are_counted_alone_and_a_range_is_told_where_they_differ(tmp_path):
    for model, workload, repeats in (("A", "D1", 1), ("B", "D1", 1), ("C", "D1", 2), ("C", "MIX", 3)):
        write_run(tmp_path, model, workload, repeats)
    (tmp_path / "C" / "ledgers.json").write_text("{}")
    assert runs_told(Results(tmp_path)) == "1 of A, B; 2 to 3 of C"


def test_every_recorded_model_is_named_once():
    told = runs_told(find())
    assert all(told.count(model) == 1 for model in ("Qwen3-0.6B", "Llama-3.2-1B", "Llama-3.1-8B"))


def test_a_floor_reads_weights_and_cache_at_the_recorded_bandwidth_and_multiplies_prompts() -> None:
    results, arch = find(), KNOWN_SHAPES["meta-llama/Llama-3.1-8B"]
    weights, cached = arch.n_step_parameters * 2, arch.kv_bytes_per_token(2)
    step_us = read_us(results, weights + 256 * cached)
    assert floor(results, "Llama-3.1-8B", "D1") == pytest.approx(1e6 / step_us, rel=3e-3)
    flops = 2 * arch.n_layers * sum(n * k for n, k in arch.shapes.values())
    flops += 2 * 1024 * arch.n_layers * arch.attention_width  # causal: half of the pairs
    most = max(results.load("ceilings")["figures"]["matmul_TFLOP_s"]) * 1e12
    assert floor(results, "Llama-3.1-8B", "PRE") == pytest.approx(most / flops, rel=2e-2)
    assert floor(results, "Llama-3.1-8B", "W0") is None


def test_both_engines_of_one_session_have_a_floor_that_neither_passes() -> None:
    for model in ("Qwen3-0.6B", "Llama-3.2-1B", "Llama-3.1-8B"):
        for row in lease_table(find(), model):
            best = (min if row.unit == "ms" else max)(row.ours, row.rival)
            assert best > row.floor if row.unit == "ms" else best < row.floor
