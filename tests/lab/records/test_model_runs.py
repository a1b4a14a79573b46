"""What is told of modern models' recorded whole runs."""

import pytest

from rosellm.lab.records.records import find, read_us
from rosellm.models.families.table import KNOWN_SHAPES
from rosellm.roseinfer.exhibits import load_exhibit

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
