"""A KV cache that runs dry: who gives up blocks, who is computed again, and that no token changes."""

from __future__ import annotations

import pytest

from rosellm.errors import PromptError
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import BEST_RUNG
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.scheduler import OfflineScheduler, OnlineScheduler
from tests.helpers import random_model, random_prompts, small_config, small_engine
from tests.roseinfer.serving.common import assert_all_free, greedy

PROMPTS = random_prompts([3, 9, 1, 17, 8, 5, 12, 2], seed=3)
N_TOKENS = 20
AMPLE = 64
MODEL = random_model(0)


def run(engine: Engine, prompts, params, **config) -> tuple[OnlineScheduler, list]:
    scheduler = OfflineScheduler(engine, SchedulerConfig(**config))
    outputs = scheduler.run(prompts, params)
    assert_all_free(engine)
    return scheduler, outputs


def tokens_of(outputs) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize(
    ("rung", "deterministic"), [("resident_step", False), (BEST_RUNG, False), (BEST_RUNG, True)]
)
def test_requests_that_outgrow_the_pool_finish_with_the_tokens_of_an_ample_one(rung, deterministic):
    """In deterministic mode their tokens are decoded again, penalised as the first time."""
    penalties = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.6}
    params = SamplingParams(temperature=1.2, max_tokens=N_TOKENS, seed=4, top_k=30, **penalties)
    options = {"recipe": rung, "deterministic": deterministic}
    ample, expected = run(small_engine(MODEL, num_kv_blocks=AMPLE, **options), PROMPTS, params)
    tight, outputs = run(small_engine(MODEL, num_kv_blocks=8, **options), PROMPTS, params)
    assert tokens_of(outputs) == tokens_of(expected)
    assert tight.preemptions > 0 == ample.preemptions
    assert sum(output.metrics.preemptions for output in outputs) == tight.preemptions
    assert [len(output.metrics.token_times) for output in outputs] == [N_TOKENS] * len(PROMPTS)


@pytest.mark.slow
def test_what_is_decoded_again_has_the_blocks_for_it_before_it_is_admitted():
    prompts, params = [[1, 2, 3]] * 6, greedy(150)
    model = random_model(0, small_config(n_positions=256))
    engines = [small_engine(model, num_kv_blocks=40, deterministic=again) for again in (True, False)]
    decoded_again, prefilled_again = (run(engine, prompts, params)[0].preemptions for engine in engines)
    assert 0 < decoded_again < 5 * prefilled_again  # not thirty times, by prefills that are given up at once


def test_the_youngest_is_preempted_and_the_oldest_never(monkeypatch):
    still_running = []
    preempt = OnlineScheduler._preempt

    def spy(scheduler, sequence):
        preempt(scheduler, sequence)
        others = [s.request_id for s in scheduler._active]
        still_running.append(max(others) < sequence.request_id)

    monkeypatch.setattr(OnlineScheduler, "_preempt", spy)
    engine = small_engine(MODEL, num_kv_blocks=6)  # each needs 3
    scheduler, outputs = run(engine, [[1]] * 6, greedy(24))
    assert all(still_running) and len(still_running) == scheduler.preemptions > 0
    assert outputs[0].metrics.preemptions == 0
    ends = [output.metrics.token_times[-1] for output in outputs]
    assert ends == sorted(ends)


def test_nobody_is_preempted_where_all_fit_at_their_full_length():
    engine = small_engine(MODEL, num_kv_blocks=18)
    scheduler, _ = run(engine, [[1]] * 6, greedy(24))
    assert scheduler.preemptions == 0


def test_cached_prefixes_are_evicted_before_anyone_is_preempted():
    engine = small_engine(MODEL, num_kv_blocks=8, prefix_cache=True)
    OfflineScheduler(engine).run([[i] * 12 for i in range(3)], greedy(1))
    assert len(engine.prefix_cache) == 3 and engine.blocks.num_free_blocks() == 2
    scheduler = OfflineScheduler(engine)
    scheduler.run([[7], [8]], greedy(30))  # 4 blocks each: all of the pool
    assert scheduler.preemptions == 0 and len(engine.prefix_cache) < 3


def test_a_request_that_can_never_fit_is_refused_with_the_numbers():
    engine = small_engine(MODEL, num_kv_blocks=3)
    with pytest.raises(PromptError, match="needs 4 KV blocks of 8 tokens per layer; the cache has 3"):
        OnlineScheduler(engine).add_request([1] * 10, greedy(16))
