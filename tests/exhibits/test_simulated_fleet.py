"""Simulated replicas lose no request, and queueing theory's laws hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rosellm.bench.arrivals import Arrival, poisson_times
from rosellm.cluster.router import Routed
from rosellm.errors import RoseError
from rosellm.lab.records.serving_times import ServingTimes
from rosellm.roseinfer.exhibits import load_exhibit

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


def test_the_router_to_fewest_requests_ignores_their_lengths() -> None:
    router = ROUTERS["fewest requests"]()
    for replica in range(2):
        router.add(replica)
    assert assigned(router, range(1), n_new=100) == [(0, 0)]
    router.note(0, 99)
    assert assigned(router, range(1, 4)) == [(1, 1), (0, 2), (1, 3)]


def test_requests_that_run_already_are_not_prefilled_again() -> None:
    running = [Arrival(0.0, 10, 3), Arrival(0.0, 10, 2), Arrival(0.0, 10, 2)]  # the last finds no slot
    outcome = simulate_cluster([], Fleet(1, PLAIN, most=2), running=running)
    assert [one.token_times for one in outcome.requests] == [[0.0, 2.0, 3.0], [0.0, 2.0], [2.0, 3.0]]
