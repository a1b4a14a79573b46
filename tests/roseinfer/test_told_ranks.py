"""Whatever requests come, are cancelled or preempted: rank 1 does on its device what rank 0 does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from rosellm.roseinfer.cache.device_state import FIELDS
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.scheduler import OnlineScheduler
from tests.helpers import MODERN, random_prompts, small_config
from tests.roseinfer.ranks import ranks_of, saved
from tests.roseinfer.threaded_ranks import threaded_ranks

VOCAB = 300
SHAPE = small_config(**MODERN | {"vocab_size": VOCAB, "d_ff": 64, "eos_token_ids": (5,)})
OPTIONS = {"block_size": 8, "max_batch_size": 5, "max_model_len": 64, "prefix_cache": True}
PROMPTS = random_prompts([1, 30, 5, 17, 9, 24], vocab_size=VOCAB)
PROMPTS += [PROMPTS[1][:20] + prompt[:9] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine, list[Engine]]]:
    """One rank with ample room, rank 0 with hardly any, and rank 1."""
    model = saved(SHAPE, tmp_path_factory.mktemp("model"))
    with threaded_ranks(model, **OPTIONS, num_kv_blocks=12) as (leader, others):
        yield ranks_of(model, 1, **OPTIONS), leader, others


wishes = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.9]),
    top_k=st.sampled_from([0, 0, 7]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.5]),
    logprobs=st.sampled_from([None, None, 2]),
    max_tokens=st.integers(1, 30),
    seed=st.integers(0, 9),
)
requests = st.lists(st.tuples(st.sampled_from(PROMPTS), wishes), min_size=1, max_size=9)
cancels = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 8)), max_size=3)


def serve(engine: Engine, asked: list, cancelled: list[tuple[int, int]]) -> list[list[int]]:
    scheduler = OnlineScheduler(engine, SchedulerConfig(prefill_token_budget=40, prefill_chunk=16))
    ids = [scheduler.add_request(prompt, wish) for prompt, wish in asked]
    steps = 0
    while scheduler.has_unfinished:
        scheduler.step()
        steps += 1
        for step, which in cancelled:
            if step == steps and which < len(ids):
                scheduler.cancel(ids[which])
    engine.check_integrity()
    return [scheduler.take_result(request_id).token_ids for request_id in ids]


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests, cancels)
def test_any_program_gives_the_tokens_of_one_rank_and_leaves_both_in_one_state(engines, asked, cancelled):
    one, leader, others = engines
    expected = serve(one, asked, [])
    got = serve(leader, asked, cancelled)
    stopped = {which for _, which in cancelled}
    for i, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        assert ours == theirs or (i in stopped and ours == theirs[: len(ours)])
    sequence = leader.make_sequence([1, 2], SamplingParams(temperature=0.0, max_tokens=2))
    leader.prefill([sequence])
    leader.step.last_logits()  # rank 1's are among them, so it has run all that was told before
    states = [engine.step.worker.state.rows[:, :FIELDS] for engine in (leader, *others)]
    assert torch.equal(*states)
    leader.release(sequence)
