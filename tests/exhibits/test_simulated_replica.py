"""One simulated engine, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from rosellm.bench.arrivals import Arrival
from rosellm.lab.records.serving_times import ServingTimes
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.serving.admission import SchedulerConfig

simulated = load_exhibit("simulated_fleet")

# A decode takes a second, a prefill a tenth of one for each token.
PLAIN = ServingTimes(rows=(1,), decode_s=((1.0, 0.0, 0.0),), host_s=(0.0,), prefill_s=(0.0, 0.0, 0.1))


def simulate(arrivals: list[Arrival], times: ServingTimes = PLAIN, rows: int = 8, **config) -> list:
    fleet = simulated.Fleet(1, times, rows, SchedulerConfig(**config))
    return simulated.simulate_cluster(arrivals, fleet).requests


def token_times(*arrivals: tuple[float, int, int], **options) -> list[list[float]]:
    made = simulate([Arrival(*one) for one in arrivals], **options)
    return [[round(t, 6) for t in one.token_times] for one in made]


def test_a_request_is_prefilled_when_it_comes_and_then_decodes() -> None:
    assert token_times((2.0, 10, 3)) == [[3.0, 4.0, 5.0]]


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
    arrivals=st.lists(
        st.builds(Arrival, st.floats(0, 50), st.integers(1, 60), st.integers(1, 9)), min_size=1, max_size=20
    ),
    rows=st.integers(1, 5),
    budget=st.integers(1, 50),
    chunk=st.none() | st.integers(1, 50),
    run_ahead=st.sampled_from([0, 3]),
)
def test_every_request_gets_its_tokens_in_order_after_it_came(
    arrivals, rows, budget, chunk, run_ahead
) -> None:
    decode_s = (0.5, 0.0, 0.01), (0.9, 0.01, 0.0)
    times = ServingTimes((1, 5), decode_s, (0.0, 0.1), (0.2, 0.0, 0.03), run_ahead)
    made = simulate(arrivals, times, rows, prefill_token_budget=budget, prefill_chunk=chunk)
    for arrival, one in zip(sorted(arrivals, key=lambda a: a.seconds), made, strict=True):
        assert one.arrival == arrival.seconds < one.token_times[0]
        assert len(one.token_times) == arrival.new_tokens and all(gap >= 0 for gap in one.itl)
    changes = sorted([(one.first, 1) for one in made] + [(one.last, -1) for one in made])
    assert all(sum(change for _, change in changes[:n]) <= rows for n in range(len(changes)))


def test_a_simulated_run_has_a_live_runs_figures() -> None:
    """Two requests at 0: first tokens at 1.0 and 4.0, the gaps 1.0 and 2.0 between."""
    arrivals = [Arrival(0.0, 10, 3), Arrival(0.0, 10, 1)]
    made = simulated.simulated_run(arrivals, PLAIN, max_batch_size=1, limits_s=(1.5, 3.0))
    assert made["ttft_p50_s"] == pytest.approx(2.5) and made["itl_mean_s"] == pytest.approx(1.5)
    assert made["total_time_s"] == pytest.approx(4.0) and made["total_throughput_tok_s"] == pytest.approx(1.0)
    assert made["within_limits_share"] == 0.5 and made["goodput_req_s"] == pytest.approx(0.25)
    assert max(made["queue_waiting"]) == 2 and made["queue_in_flight"][-1] == 0
