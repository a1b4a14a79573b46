"""How long a serving engine's steps take: watched, fitted, kept."""

from __future__ import annotations

import pytest

from rosellm.bench.arrivals import Arrival
from rosellm.bench.benchmark_streaming import run_streaming
from rosellm.lab.records.arrivals import greedy_job
from rosellm.lab.records.serving_times import ServingTimes, fit_serving_times, fitted
from rosellm.lab.records.watched_step import Begun, watched
from rosellm.models.tokenizer import load_dummy_tokenizer
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.serving.admission import SchedulerConfig
from tests.helpers import generate, random_model, random_prompts, small_engine

TIMES = ServingTimes(
    rows=(1, 4),
    decode_s=((1.0, 0.1, 0.0), (4.0, 0.1, 0.2)),
    host_s=(0.5, 2.0),
    prefill_s=(1.0, 0.5, 0.25),
    run_ahead=3,
)


def test_times_between_two_measured_batches_are_between_theirs() -> None:
    assert TIMES.decode(1, 7, 7) == pytest.approx(1.7)
    assert TIMES.decode(4, 40, 16) == pytest.approx(4.0 + 1.0 + 3.2)
    assert TIMES.decode(2, 20, 10) == pytest.approx(2.0 + 1.0 + 0.2 / 3 * 10)
    assert TIMES.host(3) == 1.5 and TIMES.host(9) == 2.0
    assert TIMES.prefill(2, 8) == 4.0


@pytest.mark.parametrize(("last", "fit"), [(0.25, (2.0, 0.5, 0.25)), (-0.25, (1.5, 0.5, 0.0))])
def test_what_was_measured_is_fitted_and_no_time_shrinks_with_what_it_is_for(last, fit) -> None:
    rows = [(1.0, a, b, 2.0 + 0.5 * a + last * b) for a in range(5) for b in range(5)]
    assert fitted(rows) == pytest.approx(fit)


def test_a_step_counts_for_the_nearest_batch_and_a_wait_before_a_prefill_for_none() -> None:
    engine, at = small_engine(random_model(0)), 0.0
    steps: list[Begun] = []
    for i in range(40):  # a decode of 3 rows: 1 s, and 0.5 s of the host; every fourth is followed by a wait
        steps.append(Begun("decode", 3, 3, 30 + 3 * i, 10 + i, at, seconds=1.0))
        at += 1.5
        if i % 4 == 3:
            steps.append(Begun("prefill", 1, 8, 0, 0, at + 60, seconds=2.0))
            at += 64
    times = fit_serving_times(engine, [steps], [1, 4])
    assert times.rows == (4,) and times.host_s == pytest.approx((0.5,))
    assert times.decode(4, 80, 20) == pytest.approx(1.0) and times.prefill(1, 8) == pytest.approx(2.0)


@pytest.mark.parametrize("recipe", ["dense", "split_kv"])
def test_a_watched_engine_makes_the_same_tokens_and_every_step_is_noted(recipe: str) -> None:
    engine = small_engine(random_model(0), recipe=recipe)
    prompts, step = random_prompts([3, 9]), engine.step
    expected = generate(engine, prompts, [4, 2])
    with watched(engine) as steps:
        assert generate(engine, prompts, [4, 2]) == expected
    assert engine.step is step
    noted = [(one.kind, one.rows, one.tokens, one.cached, one.longest) for one in steps]
    assert noted == [
        ("prefill", 2, 12, 0, 0),
        ("decode", 2, 2, 12, 9),
        ("decode", 1, 1, 4, 4),
        ("decode", 1, 1, 5, 5),
    ]
    assert all(one.seconds > 0 for one in steps)
    assert [one.began for one in steps] == sorted(one.began for one in steps)


def test_the_times_of_a_streaming_engine_are_measured_at_each_batch_size() -> None:
    gpt = random_model(0)
    tokenizer = load_dummy_tokenizer(gpt.config)
    engine = Engine(gpt, tokenizer, recipe="packed_prefill", max_batch_size=4)
    requests = [Arrival(0.0, 4 + 3 * i, 8) for i in range(6)]
    runs = []
    for rows in (1, 4):
        with watched(engine) as steps:
            run_streaming(greedy_job(engine, 3 * rows * requests, SchedulerConfig(max_batch_size=rows)))
        runs.append(steps)
    times = fit_serving_times(engine, runs, (1, 4))
    assert times.rows == (1, 4) and times.run_ahead == 0  # on a CPU a step ends as it begins
    assert all(0 < times.decode(rows, 10 * rows, 12) < 1 for rows in (1, 3, 4))
    assert 0 < times.prefill(1, 10) < 1
