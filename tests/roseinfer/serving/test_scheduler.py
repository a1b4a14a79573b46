"""The schedulers: same tokens as alone, who is admitted when, and what a request that ends leaves behind."""

from __future__ import annotations

from collections import Counter

import pytest

from rosellm.errors import RoseError
from rosellm.roseinfer.request import RequestMetrics
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.scheduler import OfflineScheduler, OnlineScheduler
from tests.helpers import random_prompts, uncached_greedy
from tests.late_step import run_late
from tests.roseinfer.serving.common import Calls, assert_all_free, engine_of, greedy, run_to_end

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
    assert [40] not in calls.chunks and [10] in calls.chunks


@pytest.mark.parametrize("policy", ["fifo", "pack"])
def test_a_cut_prompt_goes_on_before_others_are_admitted(policy, monkeypatch):
    engine = engine_of()
    calls = Calls(engine, monkeypatch)
    config = SchedulerConfig(prefill_token_budget=10, admission_policy=policy, prefill_max_batch_size=2)
    scheduler = OnlineScheduler(engine, config)
    long = scheduler.add_request([1] * 25, greedy(3))
    first = scheduler.step()
    short, _, shortest = scheduler.add_requests([[2] * 3, [3] * 2, [4]], greedy(3))
    second, third = scheduler.step(), scheduler.step()
    run_to_end(scheduler)
    nearest = {"fifo": (short, 3), "pack": (shortest, 1)}[policy]
    assert calls.of("prefill")[:3] == [[long], [long], [long, nearest[0]]]
    assert calls.chunks[:3] == [[10], [10], [5, nearest[1]]]
    assert (first, second) == ([], [])
    assert [s.request_id for s in third] == [long, nearest[0]]


def of_lengths(*lengths: int) -> list[list[int]]:
    return [[i + 1] * n for i, n in enumerate(lengths)]


def test_fifo_admits_strictly_in_order(monkeypatch):
    engine = engine_of(num_kv_blocks=5)
    calls = Calls(engine, monkeypatch)
    OfflineScheduler(engine).run(of_lengths(20, 30, 1), greedy(4))
    assert calls.chunks == [[20], [30], [1]]  # the third would fit at once, and waits behind the second


@pytest.mark.parametrize(
    ("lengths", "options", "chunks"),
    [
        ((12, 5, 3, 4, 1), {"prefill_token_budget": 12, "pack_lookahead": 4}, [[3, 4, 5], [1, 11], [1]]),
        ((5, 4, 3, 1), {"prefill_max_batch_size": 1, "fifo_every": 2}, [[1], [5], [3], [4]]),
    ],
    ids=["the shortest of the look-ahead", "every second round in order"],
)
def test_pack_admits(monkeypatch, lengths, options, chunks):
    engine = engine_of()
    calls = Calls(engine, monkeypatch)
    config = SchedulerConfig(admission_policy="pack", **options)
    OfflineScheduler(engine, config).run(of_lengths(*lengths), greedy(2))
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
    engine = engine_of(num_kv_blocks=40)
    prompts = random_prompts([40, 36, 3])
    expected = [
        uncached_greedy(engine.model, prompt, n) for prompt, n in zip(prompts, (20, 3, 4), strict=True)
    ]
    if run_ahead:
        run_late(engine, run_ahead)
    calls = Calls(engine, monkeypatch)
    scheduler = OnlineScheduler(engine, SchedulerConfig(prefill_chunk=7))
    ids = [scheduler.add_request(prompts[0], greedy(20))]
    while scheduler.decode_steps < 2:
        scheduler.step()
    assert calls.chunks == [[40]]
    n_begun = len(calls.log)
    ids += [scheduler.add_request(prompt, greedy(n)) for prompt, n in zip(prompts[1:], (3, 4), strict=True)]
    run_to_end(scheduler)
    assert calls.chunks[1:] == [[7]] * 5 + [[1, 3]]
    names = [name for name, _ in calls.log[n_begun:]]
    beside = names[: len(names) - names[::-1].index("prefill")]
    assert beside == ["decode", "prefill"] * 6
    assert [scheduler.take_result(i).token_ids for i in ids] == expected
    assert_all_free(engine)


# Ends


@pytest.mark.parametrize(
    ("where", "error", "reasons"),
    [
        ("prefill", RuntimeError, ["length", "failed", "failed"]),
        ("decode", KeyboardInterrupt, ["failed", "failed", "length"]),
        ("collect", RoseError, ["failed", "failed", "length"]),
    ],
)
def test_an_error_in_the_engine_fails_active_requests_and_leaks_no_block(where, error, reasons, monkeypatch):
    engine = engine_of()
    scheduler = OnlineScheduler(engine, SchedulerConfig(max_batch_size=2))
    requests = scheduler.add_requests([[1] * 9, [2], [3]], [greedy(2), greedy(9), greedy(9)])
    scheduler.step()

    def fail_halfway(*_: object) -> None:
        engine.blocks.reserve_prompt(scheduler.requests[requests[1]].block_ids, 3)
        raise error("no luck")

    owner, name = (engine.step, where) if where == "collect" else (engine, f"begin_{where}")
    with monkeypatch.context() as broken:
        broken.setattr(owner, name, fail_halfway)
        with pytest.raises(error, match="no luck"):
            scheduler.step()
    assert_all_free(engine)
    run_to_end(scheduler)
    outputs = [scheduler.take_result(request) for request in requests]
    assert [output.finish_reason for output in outputs] == reasons
    if reasons[2] == "length":  # it was waiting
        assert outputs[2].token_ids == uncached_greedy(engine.model, [3], 9)


@pytest.mark.parametrize("run_ahead", [1, 3])
def test_a_scheduler_leaves_as_many_steps_unfinished_as_the_engine_runs_ahead(run_ahead):
    engine = engine_of()
    late = run_late(engine, run_ahead)
    scheduler = OfflineScheduler(engine)
    request = scheduler.add_request([1, 2], greedy(9))
    begun = []
    while scheduler.has_unfinished:
        scheduler.step()
        begun.append(len(late._begun))
    assert begun[: run_ahead + 1] == [*range(1, run_ahead + 1), run_ahead]
    assert begun[-1] == 0 and late.idle == 1
    assert (scheduler.decode_steps, scheduler.decode_tokens) == (8, 8)
    assert scheduler.decode_time_s == pytest.approx(8e-3)
    assert scheduler.take_result(request).token_ids == uncached_greedy(engine.model, [1, 2], 9)


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


def test_latency_figures_are_what_their_names_say():
    metrics = RequestMetrics(10.0, [12.0, 13.0, 16.0])
    assert (metrics.ttft, metrics.tpot, metrics.latency, metrics.itl) == (2.0, 2.0, 6.0, [1.0, 3.0])
    assert RequestMetrics(10.0, [12.0]).tpot is None
    nothing = RequestMetrics(10.0)
    assert (nothing.ttft, nothing.tpot, nothing.latency, nothing.itl) == (None, None, None, [])
