"""Measurements of an engine under pressure, and of bits whatever else is in the batch."""

from __future__ import annotations

from statistics import median

import pytest
import torch

from rosellm.bench.workloads import Workload
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.recipe import BEST_RUNG
from tests.helpers import random_model, random_prompts, small_config

robustness = load_exhibit("robustness")
bits_changed, final_logits = robustness.bits_changed, robustness.final_logits
MODEL = random_model(0, small_config(n_positions=256))
PROBE, *OTHERS = random_prompts([70, 3, 65, 20], seed=3)
TOKENS = 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_bits_changed_counts_elements_not_bits_and_sees_a_difference_of_one_step(dtype):
    a = torch.tensor([[0.0, 1.0, float("nan"), 3.0, 1.0]] * 2, dtype=dtype)
    b = torch.tensor([[-0.0, 1.0, float("nan"), -4.0, 1.0]] * 2, dtype=dtype)
    b[1, 4] += torch.finfo(dtype).eps
    assert bits_changed(a, b) == bits_changed(a.t(), b.t()) == 2 * 2 + 1
    assert bits_changed(a, a.clone()) == 0


def engine_of(**options) -> Engine:
    return Engine(MODEL, **({"max_batch_size": 8, "num_kv_blocks": 40, "block_size": 16} | options))


CIRCUMSTANCES = {
    "again": {},
    "one other": {"other_prompts": OTHERS[:1]},
    "three others": {"other_prompts": OTHERS},
    "chunks of 64": {"chunk": 64},
    "preempted": {"preempted_after": 3},
    "preempted, in chunks, in a batch": {"preempted_after": 2, "chunk": 64, "other_prompts": OTHERS},
}


@pytest.fixture(scope="module")
def invariant() -> tuple[Engine, torch.Tensor]:
    engine = engine_of(deterministic=True)
    return engine, final_logits(engine, PROBE, TOKENS)


@pytest.mark.parametrize("case", CIRCUMSTANCES)
def test_final_logits_in_the_mode_are_bitwise_those_of_the_request_alone(case, invariant):
    engine, alone = invariant
    logits = final_logits(engine, PROBE, TOKENS, **CIRCUMSTANCES[case])
    assert logits.shape == (MODEL.config.vocab_size,)
    assert bits_changed(alone, logits) == 0
    engine.check_integrity()
    assert engine.budget.available == engine.num_kv_blocks


def test_final_logits_with_a_cached_prefix_are_bitwise_those_without(invariant):
    engine = engine_of(deterministic=True, prefix_cache=True)
    first, again = (final_logits(engine, PROBE, TOKENS) for _ in range(2))
    assert engine.prefix_cache.hits > 0
    assert bits_changed(invariant[1], first) == bits_changed(invariant[1], again) == 0


def test_final_logits_are_those_the_last_token_was_chosen_from():
    engine = engine_of()
    made = []
    make_sequence = engine.make_sequence
    engine.make_sequence = lambda *arguments: made.append(make_sequence(*arguments)) or made[-1]
    for n, others in ((1, []), (2, OTHERS), (TOKENS, OTHERS)):
        logits = final_logits(engine, PROBE, n, other_prompts=others)
        probe = made[-1]
        assert probe.prompt == PROBE
        assert probe.n_output == n
        assert int(logits.argmax()) == probe.last_token


def test_final_logits_preempts_by_giving_up_all_blocks():
    engine = engine_of(deterministic=True)
    released, release = [], engine.release

    def note_and_release(sequence):
        released.append((sequence.n_output, len(sequence.block_ids)))
        release(sequence)

    engine.release = note_and_release
    final_logits(engine, PROBE, TOKENS, preempted_after=3)
    assert [n_output for n_output, _ in released] == [3, TOKENS]
    assert all(blocks > 0 for _, blocks in released)


def test_without_the_mode_bits_do_change_in_a_batch():
    engine = engine_of(recipe="packed_prefill")
    alone = final_logits(engine, PROBE, TOKENS)
    assert bits_changed(alone, final_logits(engine, PROBE, TOKENS, other_prompts=OTHERS * 2)) > 0


@pytest.mark.slow
def test_invariance_asks_every_circumstance_with_and_without_the_mode():
    figures = robustness.invariance(MODEL, [1, 2, 4], prompt_tokens=70, new_tokens=6)
    hows = {"1 together", "2 together", "4 together"}
    hows |= {"prompt in chunks of 64", "prefix from the cache", "preempted"}
    assert set(figures) == {"fast", "invariant"}
    assert set(figures["fast"]) == set(figures["invariant"]) == hows
    assert set(figures["invariant"].values()) == {0}
    assert figures["fast"]["1 together"] == 0
    assert max(figures["fast"].values()) <= MODEL.config.vocab_size


@pytest.fixture(scope="module")
def pressure() -> dict:
    three = Workload("mine", num_requests=3, max_new_tokens=30, prompt_tokens=20)
    return robustness.tight_pool(MODEL, three, share=0.5, repeats=2, block_size=16, recipe=BEST_RUNG)


@pytest.mark.slow
def test_a_tight_pool_preempts_and_an_ample_one_does_not_and_it_changes_no_token(pressure):
    assert (pressure["ample"]["num_kv_blocks"], pressure["tight"]["num_kv_blocks"]) == (3 * 4, 6)
    assert all(run["preemptions"] > 0 for run in pressure["tight"]["repeats"])
    assert all(run["preemptions"] == 0 for run in pressure["ample"]["repeats"])
    runs = pressure["tight"]["repeats"] + pressure["ample"]["repeats"]
    assert len({run["tokens_sha256"] for run in runs}) == 1


def test_a_tight_pool_has_room_for_one_request_at_least():
    two = Workload("mine", num_requests=2, max_new_tokens=30, prompt_tokens=20)
    figures = robustness.tight_pool(MODEL, two, share=0.01, repeats=1, block_size=16)
    assert figures["tight"]["num_kv_blocks"] == 4


def test_ratio_and_throughput_are_of_medians_of_all_repeats(pressure):
    for name in ("tight", "ample"):
        speeds = [run["total_throughput_tok_s"] for run in pressure[name]["repeats"]]
        assert len(speeds) == 2 and pressure[name]["tok_s"] == median(speeds) > 0
    assert pressure["ratio"] == pressure["tight"]["tok_s"] / pressure["ample"]["tok_s"]
    asked = {"requests": 3, "prompt_tokens": 20, "new_tokens": 30, "share": 0.5}
    assert {key: pressure[key] for key in asked} == asked


def test_determinism_cost_is_the_share_of_throughput_lost():
    workload = Workload("mine", num_requests=3, max_new_tokens=4, max_batch_size=2, prompt_tokens=5)
    figures = robustness.determinism_cost(MODEL, workload, repeats=2)
    assert set(figures) == {"cost", "fast", "invariant"}
    assert figures["cost"] == 1 - figures["invariant"]["tok_s"] / figures["fast"]["tok_s"]
    assert all(len(figures[name]["repeats"]) == 2 for name in ("fast", "invariant"))
