"""The schedulers beside ``tests/soak``: who is admitted when, who gives up blocks, and what is measured."""

from __future__ import annotations

from collections import Counter

import pytest

from rosellm.errors import PromptError
from rosellm.roseinfer.recipe import BEST_RUNG
from rosellm.roseinfer.request import RequestMetrics
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.scheduler import OfflineScheduler, OnlineScheduler
from tests.helpers import random_model, random_prompts, small_engine
from tests.roseinfer.serving.common import Calls, assert_all_free, engine_of, greedy, run_to_end
from tests.soak.fake_step import VOCAB, fake_engine, tokens_after

# Admission


def test_budgets_of_batch_and_tokens_are_respected(monkeypatch):
    engine = engine_of()
    calls = Calls(engine, monkeypatch)
    prompts = random_prompts([4, 4, 4, 4, 1, 1, 1, 1, 1, 40, 3, 3])
    config = SchedulerConfig(max_batch_size=9, prefill_max_batch_size=3, prefill_token_budget=10)
    ids = OnlineScheduler(engine, config)
    requests = ids.add_requests(prompts, greedy(4))
    run_to_end(ids)
    computed = Counter()
    for batch, chunks in zip(calls.of("prefill"), calls.chunks, strict=True):
        assert 1 <= len(batch) <= 3 and sum(chunks) <= 10 and min(chunks) > 0
        computed.update(dict(zip(batch, chunks, strict=True)))
    assert computed == {request: len(prompt) for request, prompt in zip(requests, prompts, strict=True)}
    assert max(len(batch) for batch in calls.of("decode")) <= 9
    assert calls.chunks[:3] == [[4, 4, 2], [2, 4, 1], [1, 1, 1]]


PACK = {"admission_policy": "pack"}


@pytest.mark.parametrize(
    ("lengths", "n_blocks", "options", "chunks"),
    [
        ((20, 30, 1), 5, {}, [[20], [30], [1]]),  # the third would fit at once, and waits behind the second
        (
            (12, 5, 3, 4, 1),
            64,
            PACK | {"prefill_token_budget": 12, "pack_lookahead": 4},
            [[3, 4, 5], [1, 11], [1]],
        ),
        ((5, 4, 3, 1), 64, PACK | {"prefill_max_batch_size": 1, "fifo_every": 2}, [[1], [5], [3], [4]]),
    ],
    ids=["strictly in order", "the shortest of the look-ahead", "every second round in order"],
)
def test_requests_are_admitted(monkeypatch, lengths, n_blocks, options, chunks):
    engine = engine_of(num_kv_blocks=n_blocks)
    calls = Calls(engine, monkeypatch)
    prompts = [[i + 1] * n for i, n in enumerate(lengths)]
    OfflineScheduler(engine, SchedulerConfig(**options)).run(prompts, greedy(4))
    assert calls.chunks == chunks


@pytest.mark.parametrize("long_prompt", [14, 30], ids=["needs a place", "needs most of the cache"])
def test_pack_starves_nobody_under_a_stream_of_short_requests(long_prompt):
    engine = engine_of(num_kv_blocks=5, max_batch_size=4)
    config = SchedulerConfig(prefill_token_budget=14, admission_policy="pack", fifo_every=4)
    scheduler = OnlineScheduler(engine, config)
    scheduler.add_requests([[2]] * 2, greedy(3))
    long = scheduler.add_request([1] * long_prompt, greedy(4))
    for i in range(60):
        scheduler.add_requests([[2]] * 2, [greedy(3 + i % 4), greedy(4 + i % 5)])
        scheduler.step()
        if long in scheduler.finished:
            break
    assert scheduler.take_result(long).finish_reason == "length"


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_a_prompt_is_prefilled_at_once_while_nobody_decodes_and_in_chunks_while_somebody_does(
    run_ahead, monkeypatch
):
    engine = fake_engine(run_ahead, num_kv_blocks=40)
    prompts, counts = random_prompts([12, 36, 3], vocab_size=VOCAB), (20, 3, 4)
    expected = [list(tokens_after(tuple(prompt))[:n]) for prompt, n in zip(prompts, counts, strict=True)]
    calls = Calls(engine, monkeypatch)
    scheduler = OnlineScheduler(engine, SchedulerConfig(prefill_chunk=7))
    ids = [scheduler.add_request(prompts[0], greedy(20))]
    while scheduler.decode_steps < 2:
        scheduler.step()
    assert calls.chunks == [[12]]
    n_begun = len(calls.log)
    ids += [scheduler.add_request(prompt, greedy(n)) for prompt, n in zip(prompts[1:], (3, 4), strict=True)]
    run_to_end(scheduler)
    assert calls.chunks[1:] == [[7]] * 5 + [[1, 3]]
    names = [name for name, _ in calls.log[n_begun:]]
    beside = names[: len(names) - names[::-1].index("prefill")]
    assert beside == ["decode", "prefill"] * 6
    assert [scheduler.take_result(i).token_ids for i in ids] == expected
    assert_all_free(engine)


# Figures


def test_each_token_has_its_time_and_a_step_is_shared():
    scheduler = OfflineScheduler(engine_of())
    one, other = (output.metrics for output in scheduler.run([[1], [2, 3]], [greedy(5), greedy(3)]))
    assert (len(one.token_times), len(other.token_times)) == (5, 3)
    assert one.token_times[:3] == other.token_times
    assert [one.arrival, *one.token_times] == sorted([one.arrival, *one.token_times])
    assert (scheduler.decode_steps, scheduler.decode_tokens) == (4, 6)
    assert 0 < scheduler.decode_time_s < one.token_times[-1] - one.token_times[0]
    assert 0 < scheduler.prefill_time_s < one.ttft


@pytest.mark.parametrize(
    ("times", "figures"),
    [
        ([12.0, 13.0, 16.0], (2.0, 2.0, 6.0, [1.0, 3.0])),
        ([12.0], (2.0, None, 2.0, [])),
        ([], (None, None, None, [])),
    ],
)
def test_latency_figures_are_what_their_names_say(times, figures):
    metrics = RequestMetrics(10.0, times)
    assert (metrics.ttft, metrics.tpot, metrics.latency, metrics.itl) == figures


# Preemption: a KV cache that runs dry.

PROMPTS = random_prompts([3, 9, 1, 17, 8, 5, 12, 2], seed=3)
N_TOKENS = 20
MODEL = random_model(0)


def run(prompts, params, **options) -> tuple[OfflineScheduler, list]:
    engine = small_engine(MODEL, **options)
    scheduler = OfflineScheduler(engine)
    outputs = scheduler.run(prompts, params)
    assert_all_free(engine)
    return scheduler, outputs


@pytest.mark.parametrize(
    ("rung", "deterministic"), [("resident_step", False), (BEST_RUNG, False), (BEST_RUNG, True)]
)
def test_requests_that_outgrow_the_pool_finish_with_the_tokens_of_an_ample_one(rung, deterministic):
    """In deterministic mode their tokens are decoded again, penalised as the first time."""
    penalties = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.6}
    params = SamplingParams(temperature=1.2, max_tokens=N_TOKENS, seed=4, top_k=30, **penalties)
    options = {"recipe": rung, "deterministic": deterministic}
    ample, expected = run(PROMPTS, params, num_kv_blocks=64, **options)
    tight, outputs = run(PROMPTS, params, num_kv_blocks=8, **options)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert tight.preemptions > 0 == ample.preemptions
    assert sum(output.metrics.preemptions for output in outputs) == tight.preemptions
    assert [len(output.metrics.token_times) for output in outputs] == [N_TOKENS] * len(PROMPTS)


def test_the_oldest_is_never_preempted_and_ends_first_and_nobody_is_where_all_fit():
    tight, outputs = run([[1]] * 6, greedy(24), num_kv_blocks=6)  # each needs 3
    assert tight.preemptions > 0 == outputs[0].metrics.preemptions
    ends = [output.metrics.token_times[-1] for output in outputs]
    assert ends == sorted(ends)
    assert run([[1]] * 6, greedy(24), num_kv_blocks=18)[0].preemptions == 0


@pytest.mark.parametrize(("n_blocks", "is_ample"), [(32, True), (10, False)])
def test_slots_are_reserved_early_only_where_no_other_request_can_lack_them(n_blocks, is_ample):
    scheduler = OnlineScheduler(
        small_engine(MODEL, num_kv_blocks=n_blocks, max_batch_size=4), SchedulerConfig(prefill_chunk=2)
    )
    first = scheduler.requests[scheduler.add_request([5, 5], greedy(50))]  # needs 7 blocks of 8 tokens
    for _ in range(4):
        scheduler.step()
    assert len(first.block_ids) == (7 if is_ample else 1)
    scheduler.add_request([7] * 40, greedy(4))
    run_to_end(scheduler)
    assert scheduler.preemptions == 0


def test_cached_prefixes_are_evicted_before_anyone_is_preempted():
    engine = small_engine(MODEL, num_kv_blocks=8, prefix_cache=True)
    scheduler = OfflineScheduler(engine)
    scheduler.run([[i] * 12 for i in range(3)], greedy(1))
    assert len(engine.prefix_cache) == 3 and engine.blocks.num_free_blocks() == 2
    scheduler.run([[7], [8]], greedy(30))  # 4 blocks each: all of the pool
    assert scheduler.preemptions == 0 and len(engine.prefix_cache) < 3


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "words"),
    [
        *(([], 1, "empty"), ("text", 1, "str"), ([101], 1, "101"), ([-1], 1, "-1"), ([1.0], 1, "1.0")),
        *(([True], 1, "True"), ([1] * 64, 5, "64 positions")),
        ([1] * 33, 1, "the cache has 4 KV blocks of 8 tokens per layer"),
    ],
)
def test_a_prompt_that_can_never_run_is_refused(prompt, max_tokens, words):
    with pytest.raises(PromptError, match=words):
        OnlineScheduler(small_engine(MODEL, num_kv_blocks=4)).add_request(prompt, greedy(max_tokens))
