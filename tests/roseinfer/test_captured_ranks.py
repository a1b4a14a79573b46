"""Ranks capture and replay the same: graphs without a GPU (``fake_graphs``), in threads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rosellm.roseinfer.sampling import SamplingParams
from tests.helpers import random_prompts
from tests.roseinfer.ranks import ranks_of, run, tokens_of
from tests.roseinfer.steps.fake_graphs import captured  # noqa: F401
from tests.roseinfer.threaded_ranks import threaded_ranks

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=0.8, seed=3, top_k=20, logprobs=1)
PROMPTS = random_prompts([1, 70, 9, 33], vocab_size=4096)
OPTIONS = {"block_size": 16, "max_batch_size": 4, "max_model_len": 120, "num_kv_blocks": 40}


@pytest.mark.slow
@pytest.mark.parametrize("warm_up", [True, False], ids=["captured", "captured_when_needed"])
@pytest.mark.usefixtures("captured")
def test_ranks_that_capture_their_steps_give_the_tokens_of_one(warm_up):
    wishes = [GREEDY, DRAWN, GREEDY, replace(DRAWN, repetition_penalty=1.2)]
    expected = [tokens_of(run(ranks_of("rose-tiny", 1, **OPTIONS), PROMPTS, w)[1]) for w in (GREEDY, wishes)]
    with threaded_ranks("rose-tiny", **OPTIONS, warm_up=warm_up) as (engine, _):
        assert (engine.step.n_captured > 0) == warm_up
        assert [tokens_of(run(engine, PROMPTS, wish)[1]) for wish in (GREEDY, wishes)] == expected
        assert (engine.late_captures > 0) != warm_up


@pytest.mark.usefixtures("captured")
def test_a_later_warm_up_is_one_of_all_ranks():
    with threaded_ranks("rose-tiny", **OPTIONS, warm_up=False) as (engine, _):
        engine.warm_up()
        run(engine, PROMPTS, GREEDY)
        assert engine.step.n_captured > engine.late_captures == 0
