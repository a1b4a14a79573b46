"""Sampling as requests ask for it: prompts, seeds, and when a sequence ends."""

from __future__ import annotations

import pytest

from rosellm.errors import PromptError
from rosellm.roseinfer.recipe import BEST_RUNG
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import SamplingParams
from tests.helpers import decode_all, generate, random_model, random_prompts, small_config, small_engine


def test_a_sequence_keeps_its_seed_and_gets_a_fresh_one_if_none_is_given():
    assert Sequence(1, [0], SamplingParams(seed=8), ()).seed == 8
    fresh = {Sequence(1, [0], SamplingParams(), ()).seed for _ in range(20)}
    assert len(fresh) == 20 and all(0 <= seed < 2**63 for seed in fresh)


@pytest.mark.parametrize(
    ("tokens", "options", "reason"),
    [
        ([7], {"max_tokens": 2}, None),
        ([7, 8], {"max_tokens": 2}, "length"),
        ([9], {}, "stop"),
        ([9], {"ignore_eos": True}, None),
        ([9], {"max_tokens": 1}, "stop"),
    ],
    ids=["shorter", "its length", "end token", "ignored end token", "end token as the last one allowed"],
)
def test_a_sequence_stops_at_its_length_or_end_token_and_leaves_the_callers_list_alone(
    tokens, options, reason
):
    prompt = [5, 6]
    one = Sequence(1, prompt, SamplingParams(**options), eos_token_ids=(9,))
    for i, token in enumerate(tokens):
        one.commit(token, num_newly_cached=1 if i else 2)
    assert (one.is_finished, one.finish_reason) == (reason is not None, reason)
    assert (one.prompt, one.output, one.n_output) == ([5, 6], tokens, len(tokens))
    assert (one.last_token, one.num_cached_tokens) == (tokens[-1], 1 + len(tokens)) and prompt == [5, 6]


def test_an_engine_ends_a_sequence_at_the_models_end_token():
    prompt = random_prompts([5])
    ((*_, last),) = outputs = generate(small_engine(random_model(2)), prompt, 12)
    n = outputs[0].index(last) + 1
    engine = small_engine(random_model(2, small_config(eos_token_ids=(last,))))
    stopping = [engine.make_sequence(p, SamplingParams(temperature=0.0, max_tokens=12)) for p in prompt]
    engine.prefill(stopping)
    assert decode_all(engine, stopping) == [outputs[0][:n]]
    assert stopping[0].finish_reason == "stop"


def test_seeded_sampling_gives_the_same_tokens_on_every_rung_and_in_any_batch():
    gpt, prompts = random_model(2), random_prompts([5, 9, 2])
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=10) for i in range(3)]

    def sample(rung: str, rows: list[int]) -> list[list[int]]:
        engine = small_engine(gpt, recipe=rung)
        sequences = [engine.make_sequence(prompts[row], params[row]) for row in rows]
        engine.prefill(sequences)
        return decode_all(engine, sequences)

    together = sample("resident_step", [0, 1, 2])
    assert sample("fused_head", [2, 1, 0]) == together[::-1]
    assert [sample(BEST_RUNG, [row])[0] for row in range(3)] == together


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "words"),
    [
        *(([], 1, "empty"), ("text", 1, "str"), ([101], 1, "101"), ([-1], 1, "-1"), ([1.0], 1, "1.0")),
        *(([True], 1, "True"), ([1] * 60, 5, "64 positions"), ([1] * 20, 20, "KV blocks")),
    ],
)
def test_a_prompt_that_can_never_run_is_refused(prompt, max_tokens, words):
    engine = small_engine(random_model(0), num_kv_blocks=4)
    with pytest.raises(PromptError, match=words):
        engine.make_sequence(prompt, SamplingParams(max_tokens=max_tokens))


def test_a_prompt_that_just_fits_runs_to_its_end():
    engine = small_engine(random_model(0), num_kv_blocks=8)
    ((*_, last),) = generate(engine, [[1] * 60], 4)
    assert last in range(101)
