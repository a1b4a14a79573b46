"""Prompts that join a decode step: the same tokens as in passes of their own, and one pass for both."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from rosellm.errors import OptionError
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.recipe import LADDER, RECIPES
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.scheduler import OnlineScheduler
from tests.helpers import (
    MODERN,
    decode_all,
    generate,
    greedy_sequences,
    random_model,
    random_prompts,
    small_config,
    small_engine,
)
from tests.roseinfer.steps.fake_graphs import captured
from tests.roseinfer.steps.test_captured_prefill import GARBAGE, random_requests

__all__ = ["captured"]
one_pass = load_exhibit("one_pass")
MODEL = random_model(0)
JOINED = LADDER["one_pass"]
RUNGS = {
    name: replace(RECIPES[name], exhibit="one_pass") for name in ("fused_append", "fused_head", "split_kv")
}


def serve(engine: Engine, requests: list, seed: int, **config) -> tuple[list, list[float]]:
    """Requests that come over time: tokens, reasons and log-probabilities of all."""
    scheduler, draw = OnlineScheduler(engine, SchedulerConfig(**config)), random.Random(seed)
    waiting, ids = list(requests), []
    while waiting or scheduler.has_unfinished:
        for _ in range(min(draw.randint(0, 2), len(waiting))):
            ids.append(scheduler.add_request(*waiting.pop()))
        scheduler.step()
    engine.check_integrity()
    results = [scheduler.take_result(one) for one in ids]
    return [(r.token_ids, r.finish_reason) for r in results], [r.cumulative_logprob or 0 for r in results]


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("graphs", [True, False])
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**9))
def test_tokens_are_those_of_a_padded_prefill_whatever_the_buffers_held(request, rung, graphs, seed):
    if graphs:
        request.getfixturevalue("captured")
    requests = random_requests(random.Random(seed), 9)
    config = {"prefill_chunk": random.Random(seed).choice((None, 5, 17))}
    expected = serve(small_engine(MODEL, recipe="resident_step"), requests, seed, **config)
    engine = small_engine(MODEL, recipe=RUNGS[rung])
    joined = engine.step.joined
    for _ in range(2):  # what no run has sent yet must not matter
        joined._buffer.words.fill_(GARBAGE)
        joined._hidden.fill_(float("nan"))
        joined.state.rows[-1, 1:] = -1  # the spare row
        found = serve(engine, requests, seed, **config)
        assert found[0] == expected[0] and found[1] == pytest.approx(expected[1], rel=1e-4)
    assert engine.late_captures == 0


def running_engine(n: int = 3, **options) -> tuple[Engine, list]:
    """An engine on which ``n`` sequences decode."""
    engine = small_engine(MODEL, recipe=JOINED, **options)
    sequences = greedy_sequences(engine, random_prompts([5] * n), 12)
    engine.prefill(sequences)
    return engine, sequences


def test_a_step_with_prompts_runs_the_layers_once_over_rows_and_tokens(monkeypatch):
    engine, running = running_engine()
    late = greedy_sequences(engine, random_prompts([6, 9]), 4)
    ran: list[int] = []  # rows of each run of the layers
    for owner in (engine.step.worker, engine.step.joined.packed):
        before = owner.layers_for
        monkeypatch.setattr(owner, "layers_for", lambda rows, b=before: (ran.append(rows), b(rows))[1])
    assert engine.begin_decode(running) == 3 and ran == []
    assert engine.begin_prefill(late, [6, 4]) == late[:1]
    kinds = [(done.kind, done.sequences) for done in engine.step.collect()]
    assert kinds == [("decode", running), ("prefill", late[:1])]
    assert ran == [4 + 10] and [s.n_output for s in (*running, *late)] == [2, 2, 2, 1, 0]


@pytest.mark.parametrize("call", ["collect", "release", "last_logits", "begin_decode", "begin_prefill"])
def test_a_held_decode_step_is_begun_by_whatever_call_comes_next(monkeypatch, call):
    engine, running = running_engine()
    begun, begin = [], engine.step._begin_step
    monkeypatch.setattr(engine.step, "_begin_step", lambda *given: (begun.append(given[0]), begin(*given))[1])
    monkeypatch.setattr(engine.step.joined, "takes", lambda counts: False)
    engine.begin_decode(running)
    assert begun == []
    arguments = {"release": running[0], "begin_decode": running}
    arguments["begin_prefill"] = greedy_sequences(engine, [[1]], 1)
    owner = engine if call in arguments else engine.step
    getattr(owner, call)(*[arguments[call]] if call in arguments else [])
    assert begun == [running]


@pytest.mark.gpu
def test_on_a_gpu_a_long_prompt_that_joins_in_chunks_gives_the_tokens_of_the_whole():
    """Before its last tokens attention takes its keys in pieces."""
    model = random_model(0, small_config(n_positions=4096, **MODERN)).to("cuda")
    prompts = random_prompts([5, 3000])
    options = {"max_batch_size": 2, "block_size": 64}
    expected = generate(small_engine(model, recipe="split_kv", **options), prompts, 60)
    engine = small_engine(model, recipe=JOINED, **options)
    running, late = greedy_sequences(engine, prompts, 60)
    engine.prefill([running])
    for chunk in [64] * 46 + [56]:
        engine.begin_decode([running])
        engine.begin_prefill([late], [chunk])
    assert decode_all(engine, [running, late]) == expected
    assert engine.late_captures == 0 and any(cut for *_, cut in engine.step.joined._layer_runs)


def test_too_many_prompts_for_the_free_rows_are_refused_and_the_decode_step_is_not_lost():
    engine, running = running_engine(3, max_batch_size=4)
    late = greedy_sequences(engine, random_prompts([2, 2]), 3)
    engine.begin_decode(running)
    with pytest.raises(OptionError, match="2 more sequences exceed the 4"):
        engine.begin_prefill(late)
    list(engine.step.collect())
    assert [s.n_output for s in running] == [2, 2, 2]


def test_what_is_captured_serves_every_number_of_rows_tokens_and_prompts(captured):
    engine = small_engine(MODEL, recipe=JOINED, max_batch_size=300, num_kv_blocks=4, warm_up=False)
    joined = engine.step.joined
    keys = {capture.args for capture in joined.captures(lambda rows: [""])}
    for rows in range(1, 301):
        for tokens, places in ((1, 1), (33, 1), (129, 17), (1024, 64)):
            rows_of, tokens_of, places_of = joined.sizes(rows, [tokens - places + 1] + [1] * (places - 1))
            assert {(rows_of, tokens_of, "", False), (rows_of, places_of, "greedy")} <= keys
    assert one_pass.captured_sizes(1, 1, 1) == (32, 32, 16)
