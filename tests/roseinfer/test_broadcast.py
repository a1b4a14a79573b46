"""Whatever requests come, are cancelled or preempted: rank 1 does on its device what rank 0 does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from rosellm.roseinfer.cache.device_state import FIELDS
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.scheduler import OnlineScheduler
from tests.helpers import MODERN, random_prompts, small_config
from tests.roseinfer.ranks import logits_of, ranks_of, saved, threaded_ranks, tokens_of
from tests.roseinfer.steps.fake_graphs import captured  # noqa: F401

VOCAB = 300
SHAPE = small_config(**MODERN | {"vocab_size": VOCAB, "d_ff": 64, "eos_token_ids": (5,)})
OPTIONS = {"block_size": 8, "max_batch_size": 5, "max_model_len": 64, "prefix_cache": True}
PROMPTS = random_prompts([1, 30, 5, 17, 9, 24], vocab_size=VOCAB)
PROMPTS += [PROMPTS[1][:20] + prompt[:9] for prompt in PROMPTS]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=0.8, seed=3, top_k=20, logprobs=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(SHAPE, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engines(model: str) -> Iterator[tuple[Engine, Engine, list[Engine]]]:
    """One rank with ample room, rank 0 with hardly any, and rank 1."""
    with threaded_ranks(model, **OPTIONS, num_kv_blocks=12) as (leader, others):
        yield ranks_of(model, 1, **OPTIONS), leader, others


sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.9]),
    top_k=st.sampled_from([0, 0, 7]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.5]),
    logprobs=st.sampled_from([None, None, 2]),
    max_tokens=st.integers(1, 30),
    seed=st.integers(0, 9),
)
some_requests = st.lists(st.tuples(st.sampled_from(PROMPTS), sampling_params), min_size=1, max_size=9)
some_cancels = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 8)), max_size=3)


def serve(engine: Engine, requests: list, cancels: list[tuple[int, int]]) -> list[list[int]]:
    """Tokens of all requests; a cancel is a number of steps and an index of a request."""
    scheduler = OnlineScheduler(engine, SchedulerConfig(prefill_token_budget=40, prefill_chunk=16))
    ids = [scheduler.add_request(prompt, params) for prompt, params in requests]
    n_steps = 0
    while scheduler.has_unfinished:
        scheduler.step()
        n_steps += 1
        for step, index in cancels:
            if step == n_steps and index < len(ids):
                scheduler.cancel(ids[index])
    engine.check_integrity()
    return [scheduler.take_result(request_id).token_ids for request_id in ids]


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(some_requests, some_cancels)
def test_any_program_gives_the_tokens_of_one_rank_and_leaves_both_in_one_state(engines, requests, cancels):
    one, leader, others = engines
    expected, found = serve(one, requests, []), serve(leader, requests, cancels)
    cancelled = {index for _, index in cancels}
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours == theirs or (i in cancelled and ours == theirs[: len(ours)])
    logits_of(leader, [[1, 2]], GREEDY, 0)  # rank 1's are among them, so it has run all that came before
    states = [engine.step.worker.state.rows[:, :FIELDS] for engine in (leader, *others)]
    assert torch.equal(*states)


@pytest.mark.parametrize(
    "when", ["later", *(pytest.param(when, marks=pytest.mark.slow) for when in ("at_start", "as_needed"))]
)
@pytest.mark.usefixtures("captured")
def test_ranks_that_capture_their_steps_give_the_tokens_of_one(model, when):
    mixed = [GREEDY, DRAWN, GREEDY, replace(DRAWN, repetition_penalty=1.2)]
    expected = [tokens_of(ranks_of(model, 1, **OPTIONS), PROMPTS[:4], p) for p in (GREEDY, mixed)]
    with threaded_ranks(model, **OPTIONS, warm_up=when == "at_start") as (engine, _):
        assert (engine.step.n_captured > 0) == (when == "at_start")
        if when == "later":
            engine.warm_up()
        assert [tokens_of(engine, PROMPTS[:4], p) for p in (GREEDY, mixed)] == expected
        assert engine.step.n_captured > 0 and (engine.late_captures > 0) == (when == "as_needed")
