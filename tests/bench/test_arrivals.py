"""When requests arrive: seeded, submitted by their deadlines."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rosellm.bench import benchmark_streaming
from rosellm.bench.arrivals import goodput, poisson_times, queue_over_time, submit_by_deadline
from rosellm.roseinfer.request import RequestMetrics

ONCE = ["--warmup-runs=0", "--repeat-runs=1"]
TINY = ["--device=cpu", "--rung=dense", "--max-batch-size=2", "--no-stop-on-eos", *ONCE]


def test_poisson_times_are_seeded_begin_at_0_and_have_the_gaps_of_their_rate() -> None:
    times = poisson_times(20.0, 5000, seed=1)
    gaps = np.diff(times)
    assert times[0] == 0 and (gaps > 0).all()
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.05)  # as of an exponential distribution
    assert times == poisson_times(20.0, 5000, seed=1) != poisson_times(20.0, 5000, seed=2)


class FakeClock:
    """Time passes only while one sleeps, a little longer than asked, or while a call takes long."""

    def __init__(self, oversleep: float) -> None:
        self.now, self.oversleep = 100.0, oversleep

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds + self.oversleep


@given(
    gaps=st.lists(st.floats(0, 3), max_size=20),
    costs=st.lists(st.floats(0, 5), min_size=20, max_size=20),
    oversleep=st.floats(0, 0.1),
)
def test_each_submission_is_at_its_time_or_as_soon_as_those_before_are_done(gaps, costs, oversleep) -> None:
    clock, made = FakeClock(oversleep), []

    def submit(i: int) -> None:
        made.append((i, clock.now - 100.0))
        clock.now += costs[i]

    times = np.cumsum(gaps).tolist()
    lags = submit_by_deadline(times, submit, clock, clock.sleep)
    assert [i for i, _ in made] == list(range(len(times)))
    free = 0.0
    for due, (i, at), lag in zip(times, made, lags, strict=True):
        assert lag == pytest.approx(at - due, abs=1e-9)
        assert max(due, free) - 1e-9 <= at <= max(due, free) + oversleep + 1e-9
        free = at + costs[i]


SERVED = [RequestMetrics(0.0, [1.0, 1.5, 2.0]), RequestMetrics(0.0, [2.0, 5.0]), RequestMetrics(4.0, [5.0])]


@pytest.mark.parametrize(
    ("ttft", "itl", "n_good"),
    [(math.inf, math.inf, 3), (1.0, math.inf, 1), (1.2, math.inf, 2), (2.0, 1.0, 2), (0.5, 1.0, 0)],
)
def test_goodput_counts_requests_that_keep_both_limits_from_when_they_were_due(ttft, itl, n_good) -> None:
    figures = goodput(SERVED, [0.0, 0.0, 0.1], 10.0, ttft, itl)
    assert figures == {"goodput_req_s": n_good / 10, "within_limits_share": n_good / 3}


def test_the_queue_is_counted_over_the_run() -> None:
    queue = queue_over_time(SERVED, 0.0, 5.0)
    at = {round(t, 2): i for i, t in enumerate(queue["queue_times_s"])}
    near = {t: at[min(at, key=lambda sample: abs(sample - t))] for t in (0.5, 1.7, 3.0, 4.5, 5.0)}
    assert [queue["queue_waiting"][i] for i in near.values()] == [2, 1, 0, 1, 0]
    assert [queue["queue_in_flight"][i] for i in near.values()] == [2, 2, 1, 2, 0]


def test_a_user_asks_for_a_rate_and_gets_goodput_and_the_queue(tmp_path: Path, capsys) -> None:
    record = tmp_path / "record.json"
    sizes = ["--num-requests", "4", "--max-new-tokens", "2", "--request-rate", "20", "--json", str(record)]
    assert benchmark_streaming.main([*TINY, *sizes, "--ttft-limit-ms=60000"]) == 0
    told = capsys.readouterr().out
    assert "\ngoodput_req_s " in told
    (repeat,) = json.loads(record.read_text())["results"]["streaming"]["repeats"]
    assert repeat["total_time_s"] >= poisson_times(20.0, 4, seed=0)[-1]
    assert repeat["within_limits_share"] == 1
    assert max(repeat["queue_in_flight"]) >= 1 and repeat["queue_in_flight"][-1] == 0
    assert benchmark_streaming.BENCHMARK.parse_options(["--request-rate=inf"]).request_rate is None
