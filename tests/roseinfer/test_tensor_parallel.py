"""Several ranks give the tokens of one: fp32, processes of a CPU, gloo."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from rosellm import SamplingParams
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import LADDER
from rosellm.roseinfer.serving.streaming import StreamingManager
from tests.helpers import MODERN, random_prompts, small_config
from tests.roseinfer.ranks import ranks_of, run, saved, tokens_of

N_TOKENS = 12
PROMPTS = random_prompts([1, 40, 7, 200, 16, 17, 3, 90], seed=2, vocab_size=4096)
SHARED = [PROMPTS[3][:100] + prompt[:20] for prompt in PROMPTS]
GREEDY = SamplingParams(temperature=0.0, max_tokens=N_TOKENS, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, max_tokens=N_TOKENS, ignore_eos=True, seed=5)
WISHES = [
    GREEDY,
    DRAWN,
    replace(DRAWN, top_k=40, top_p=0.9),
    replace(DRAWN, min_p=0.02, seed=None, temperature=0.0),
    replace(DRAWN, repetition_penalty=1.3, frequency_penalty=0.4),
    replace(GREEDY, presence_penalty=0.7, repetition_penalty=1.2),
    replace(DRAWN, top_p=0.8, seed=7),
    replace(DRAWN, top_k=3, presence_penalty=0.5),
]
GROUPS = [("rose-tiny", 2), pytest.param(("rose-tiny-qwen3", 2), marks=pytest.mark.slow)]


def alone(model: str, **options) -> Engine:
    return ranks_of(model, 1, **options)


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    """One rank with ample room, and several with few KV blocks and a prefix cache."""
    model, n_ranks = request.param
    yield alone(model), ranks_of(model, n_ranks, num_kv_blocks=24, prefix_cache=True)


def test_ranks_give_the_greedy_tokens_of_one_for_prompts_of_mixed_lengths(pair):
    expected, got = (tokens_of(run(engine, PROMPTS, GREEDY)[1]) for engine in pair)
    assert got == expected


@pytest.mark.slow
def test_requests_that_sample_in_every_way_together_get_the_tokens_of_one_rank(pair):
    expected, got = (tokens_of(run(engine, PROMPTS, WISHES)[1]) for engine in pair)
    assert got == expected


@pytest.mark.slow
def test_preempted_requests_get_the_tokens_of_one_rank(pair):
    prompts, wish = [prompt[:15] for prompt in SHARED], replace(DRAWN, max_tokens=60)
    one, several = (run(engine, prompts, wish) for engine in pair)
    assert several[0].preemptions > 0 == one[0].preemptions
    assert tokens_of(several[1]) == tokens_of(one[1])
    pair[1].check_integrity()


@pytest.mark.slow
def test_four_ranks_give_the_tokens_of_one():
    prompts, wishes = PROMPTS[:4], WISHES[:4]
    expected, got = (tokens_of(run(ranks_of("rose-tiny", n_ranks), prompts, wishes)[1]) for n_ranks in (1, 4))
    assert got == expected


@pytest.mark.slow
def test_prompts_that_begin_alike_are_prefilled_from_the_prefix_cache(pair):
    one, several = pair
    expected = tokens_of(run(one, SHARED, GREEDY)[1])
    run(several, SHARED[:1], GREEDY)
    sequence = several.make_sequence(SHARED[1], GREEDY)
    several.match_prefixes([sequence])
    assert sequence.n_cached >= 96
    several.release(sequence)
    assert tokens_of(run(several, SHARED, GREEDY)[1]) == expected


def test_log_probabilities_are_those_of_the_whole_vocabulary(pair):
    one, several = pair
    wish = replace(GREEDY, logprobs=3, max_tokens=4)
    expected, outputs = (run(engine, PROMPTS[:5], wish)[1] for engine in pair)
    for theirs, ours in zip(expected, outputs, strict=True):
        for likely, other in zip(theirs.logprobs, ours.logprobs, strict=True):
            assert list(likely) == list(other)
            for token, known in likely.items():
                assert other[token].logprob == pytest.approx(known.logprob, abs=1e-4)
                assert other[token].rank == known.rank


def test_the_latest_logits_are_those_of_one_rank(pair):
    logits = []
    for engine in pair:
        sequences = [engine.make_sequence(prompt, GREEDY) for prompt in PROMPTS[:3]]
        engine.prefill(sequences)
        first = engine.step.last_logits().clone()
        engine.decode(sequences)
        logits.append((first, engine.step.last_logits().clone()))
        for sequence in sequences:
            engine.release(sequence)
    for theirs, ours in zip(*logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


def test_a_streaming_manager_runs_ranks_from_its_own_thread(pair):
    one, several = pair
    texts = []
    for engine in one, several:
        with StreamingManager(engine) as manager:
            ids = [manager.add_request(prompt, GREEDY) for prompt in PROMPTS[:3]]
            texts.append(["".join(manager.stream_text(request_id)) for request_id in ids])
    assert texts[0] == texts[1]


SIZES = {"n_heads": 8, "d_model": 64, "d_ff": 128, "vocab_size": 500, "n_positions": 256, "head_dim": 8}
GROUPED = small_config(**MODERN | SIZES)


@pytest.mark.slow
def test_key_value_heads_are_repeated_where_there_are_fewer_than_ranks(tmp_path):
    model = saved(GROUPED, tmp_path)
    prompts = random_prompts([1, 9, 33, 100], vocab_size=500)
    expected = tokens_of(run(alone(model), prompts, GREEDY)[1])
    several = ranks_of(model, 4)
    assert several.model.config.n_kv_heads == 1
    assert tokens_of(run(several, prompts, GREEDY)[1]) == expected


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU here")
def test_the_kernels_give_the_tokens_of_one_rank(tmp_path):
    model = saved(GROUPED, tmp_path)
    prompts, wish = random_prompts([1, 5, 12], vocab_size=500), replace(GREEDY, max_tokens=3)
    expected = tokens_of(run(alone(model), prompts, wish)[1])
    several = ranks_of(model, 2, kernels="triton", max_batch_size=3)
    assert tokens_of(run(several, prompts, wish)[1]) == expected


def test_every_rung_that_ranks_can_run_is_told_by_its_recipe():
    assert {name for name, recipe in LADDER.items() if _can(recipe)} == {
        *("fused_append", "fused_norm", "fused_gelu", "fused_head", "small_gemm"),
        *("dependent_launch", "split_kv"),
    }


def _can(recipe) -> bool:
    try:
        recipe.check_ranks(2)
    except ValueError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU here")
def test_a_sum_by_one_kernel_over_shared_memory_gives_the_tokens_of_one_rank(tmp_path):
    model = saved(GROUPED, tmp_path)
    prompts, wish = random_prompts([1, 5, 70], vocab_size=500), replace(GREEDY, max_tokens=3)
    expected = tokens_of(run(alone(model), prompts, wish)[1])
    recipe = replace(LADDER["split_kv"], all_reduce="one_shot")
    several = ranks_of(model, 2, recipe=recipe, kernels="triton", max_batch_size=3)
    assert tokens_of(run(several, prompts, wish)[1]) == expected
