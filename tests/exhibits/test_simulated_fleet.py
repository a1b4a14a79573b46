"""Simulated replicas lose no request, and queueing theory's laws hold."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rosellm.bench.arrivals import Arrival, poisson_times
from rosellm.cluster.router import Routed
from rosellm.errors import RoseError
from rosellm.lab.records.serving_times import ServingTimes
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.serving.admission import SchedulerConfig

fleet, routers = load_exhibit("simulated_fleet"), load_exhibit("routers")
NEVER, Failures, Fleet, simulate_cluster = fleet.NEVER, fleet.Failures, fleet.Fleet, fleet.simulate_cluster
ROUTERS = routers.ROUTERS

# A decode takes a second, a prefill a tenth of one for each token.
PLAIN = ServingTimes(rows=(1,), decode_s=((1.0, 0.0, 0.0),), host_s=(0.0,), prefill_s=(0.0, 0.0, 0.1))
UNEVEN = ServingTimes(
    (1, 5), ((0.5, 0.001, 0.01), (0.9, 0.01, 0.002)), (0.0, 0.1), (0.2, 0.05, 0.03), run_ahead=0
)
ARRIVALS = st.lists(
    st.builds(Arrival, st.floats(0, 50), st.integers(1, 60), st.integers(1, 9)), min_size=1, max_size=30
)


def poisson(n: int, rate: float, prompt: int = 10, new: int = 8) -> list[Arrival]:
    return [Arrival(time, prompt, new) for time in poisson_times(rate, n, seed=0)]


def run(arrivals: list[Arrival], n: int = 3, times=UNEVEN, failures=NEVER, router="fewest tokens"):
    return simulate_cluster(arrivals, Fleet(n, times, most=4, report_s=0.0), ROUTERS[router](), failures)


@settings(max_examples=60, deadline=None)
@given(
    arrivals=ARRIVALS,
    n=st.integers(1, 4),
    together=st.integers(1, 4),
    mean_s=st.sampled_from([30.0, 100.0, math.inf]),
    router=st.sampled_from(list(ROUTERS)),
)
def test_every_request_is_answered_once_under_failures(arrivals, n, together, mean_s, router) -> None:
    answered: list[int] = []
    chosen = ROUTERS[router]()
    finish = chosen.finish
    chosen.finish = lambda number: (answered.append(number), finish(number))
    failures = Failures(mean_s, load_s=5.0, together=together)
    outcome = simulate_cluster(arrivals, Fleet(n, UNEVEN, most=4), chosen, failures)
    assert sorted(answered) == list(range(len(arrivals)))
    for one, arrival in zip(outcome.requests, sorted(arrivals, key=lambda a: a.seconds), strict=True):
        assert (one.arrival, one.prompt, len(one.token_times)) == arrival and one.attempts >= 1
        assert one.arrival < one.first <= one.last
    if not outcome.failures:
        assert all(one.attempts == 1 for one in outcome.requests)


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.5, 0.8])
def test_a_single_slot_with_equal_requests_waits_as_an_m_d_1_queue_does(load) -> None:
    """The mean wait is ρ s / 2 (1 − ρ) (Pollaczek and Khinchine)."""
    arrivals = poisson(40_000, rate=load, new=1)  # a prefill of 10 tokens: a second each
    outcome = simulate_cluster(arrivals, Fleet(1, PLAIN, most=1))
    wait = np.mean([one.first - one.arrival for one in outcome.requests]) - 1.0
    assert wait == pytest.approx(load / 2 / (1 - load), rel=0.1)


def test_a_request_takes_its_steps_and_starts_over_after_a_failure() -> None:
    alone = run([Arrival(2.0, 10, 3)], times=PLAIN).requests[0]
    assert alone.token_times == [3.0, 4.0, 5.0]
    failures = next(
        found for seed in range(99) if 3.0 < first_failure(found := Failures(6.0, 1.5, seed=seed)) < 5.0
    )
    outcome = run([Arrival(2.0, 10, 3)], n=1, times=PLAIN, failures=failures)
    (again,) = outcome.requests
    assert outcome.failures >= 1 and again.attempts == outcome.failures + 1
    assert again.last - again.first == 2.0 and again.first >= first_failure(failures) + 1.5 + 1.0


def first_failure(failures: Failures) -> float:
    return np.random.default_rng(failures.seed).exponential(failures.mean_s)


def test_replicas_none_of_which_lasts_are_refused() -> None:
    with pytest.raises(RoseError, match="given to 100 replicas, and none lasted"):
        run([Arrival(0.0, 60, 9)], n=1, failures=Failures(1e-3, load_s=0.0))


def assigned(router, numbers: range, n_new: int = 1) -> list[tuple[int, int]]:
    for number in numbers:
        router.submit(Routed(number, 1, n_new))
    return router.assign()


def test_a_host_whose_replicas_all_failed_hands_its_requests_to_another() -> None:
    router = routers.Dealer(2, routers.in_turn())
    for replica in range(4):
        router.add(replica)
    assert sorted(assigned(router, range(4))) == [(0, 0), (1, 2), (2, 1), (3, 3)]
    assert router.lose(0) == [0] and router.assign() == [(1, 0)]
    assert sorted(router.lose(1)) == [0, 2]
    assert sorted(number for replica, number in router.assign() if replica in (2, 3)) == [0, 2]
    router.add(1)
    assert 1 in [replica for replica, _ in assigned(router, range(4, 6))]


def test_requests_that_run_already_are_not_prefilled_again() -> None:
    running = [Arrival(0.0, 10, 3), Arrival(0.0, 10, 2), Arrival(0.0, 10, 2)]  # the last finds no slot
    outcome = simulate_cluster([], Fleet(1, PLAIN, most=2), running=running)
    assert [one.token_times for one in outcome.requests] == [[0.0, 2.0, 3.0], [0.0, 2.0], [2.0, 3.0]]


# One replica, counted by hand.


def simulate(arrivals: list[Arrival], times: ServingTimes = PLAIN, rows: int = 8, **config) -> list:
    return simulate_cluster(arrivals, Fleet(1, times, rows, SchedulerConfig(**config))).requests


def token_times(*arrivals: tuple[float, int, int], **options) -> list[list[float]]:
    made = simulate([Arrival(*one) for one in arrivals], **options)
    return [[round(t, 6) for t in one.token_times] for one in made]


def test_a_request_that_finds_no_slot_waits_for_one() -> None:
    assert token_times((0.0, 10, 3), (0.0, 10, 2), rows=1) == [[1, 2, 4], [4, 5]]


def test_a_long_prompt_delays_running_requests_by_a_chunk_at_a_time() -> None:
    arrivals = (0.0, 10, 9), (1.5, 40, 1)
    whole, _ = token_times(*arrivals)
    assert whole[:4] == [1.0, 2.0, 7.0, 8.0]  # it comes before the second step ends: 2.0 + 1.0 + 4.0
    chunked, long = token_times(*arrivals, prefill_chunk=10)
    assert chunked[:7] == [1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 11.0] and long == [10.0]


def test_steps_get_the_contexts_of_their_rows() -> None:
    """A step takes a second for each token of the mean context, and ten for each of the longest."""
    times = replace(PLAIN, decode_s=((0.0, 1.0, 10.0),))
    (long, short) = token_times((0.0, 20, 3), (0.0, 10, 2), times=times)
    assert long == [3, 3 + 15 + 200, 3 + 15 + 200 + 21 + 210] and short == [3, 218]


def test_the_host_adds_to_each_round_and_sets_the_pace_if_it_is_slower_than_its_device() -> None:
    assert token_times((0.0, 10, 3), times=replace(PLAIN, host_s=(0.25,))) == [[1.0, 2.25, 3.5]]
    (made,) = token_times((0.0, 10, 12), times=replace(PLAIN, host_s=(1.5,), run_ahead=3))
    assert [after - before for before, after in zip(made[2:8], made[3:9], strict=True)] == [1.5] * 6


def test_steps_that_run_ahead_delay_a_newcomer_and_the_last_tokens_come_together() -> None:
    times = replace(PLAIN, run_ahead=3)
    assert token_times((0.0, 10, 6), times=times) == [[1, 2, 3, 6, 6, 6]]
    running, new = token_times((0.0, 10, 20), (4.5, 10, 2), times=times)
    assert new[0] == 10.0  # its prefill follows the four steps, 6.0 to 9.0, that had been begun
    assert running[:11] == [1, 2, 3, 4, 5, 7, 7, 8, 9, 11, 12]  # that round collected two steps


@given(
    arrivals=ARRIVALS,
    rows=st.integers(1, 5),
    budget=st.integers(1, 50),
    chunk=st.none() | st.integers(1, 50),
    run_ahead=st.sampled_from([0, 3]),
)
def test_every_request_gets_its_tokens_in_order_after_it_came(
    arrivals, rows, budget, chunk, run_ahead
) -> None:
    made = simulate(
        arrivals, replace(UNEVEN, run_ahead=run_ahead), rows, prefill_token_budget=budget, prefill_chunk=chunk
    )
    for arrival, one in zip(sorted(arrivals, key=lambda a: a.seconds), made, strict=True):
        assert one.arrival == arrival.seconds < one.token_times[0]
        assert len(one.token_times) == arrival.new_tokens and all(gap >= 0 for gap in one.itl)
    changes = sorted([(one.first, 1) for one in made] + [(one.last, -1) for one in made])
    assert all(sum(change for _, change in changes[:n]) <= rows for n in range(len(changes)))


def test_a_simulated_run_has_a_live_runs_figures() -> None:
    """Two requests at 0: first tokens at 1.0 and 4.0, the gaps 1.0 and 2.0 between."""
    arrivals = [Arrival(0.0, 10, 3), Arrival(0.0, 10, 1)]
    made = fleet.simulated_run(arrivals, PLAIN, max_batch_size=1)
    assert made["ttft_p50_s"] == pytest.approx(2.5) and made["itl_mean_s"] == pytest.approx(1.5)
    assert made["total_time_s"] == pytest.approx(4.0) and made["total_throughput_tok_s"] == pytest.approx(1.0)
