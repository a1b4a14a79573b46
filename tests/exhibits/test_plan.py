"""What a fleet is asked: traffic of the lengths that it says, capacity, shares within limits."""

from __future__ import annotations

import numpy as np
import pytest

from rosellm.errors import RoseError
from rosellm.lab.records.serving_times import ServingTimes
from rosellm.roseinfer.exhibits import load_exhibit

plan = load_exhibit("plan")
Limits, Traffic, capacity, serve = plan.Limits, plan.Traffic, plan.capacity, plan.serve

# A step of 10 ms, whatever it is given; prefills take nothing.
STEADY = ServingTimes((1,), ((0.01, 0.0, 0.0),), (0.0,), (0.0, 0.0, 0.0))
TRAFFIC = Traffic(prompt=(10, 20), new=(20, 20))
FLEET = plan.Fleet(4, STEADY, most=8)


def test_running_requests_are_met_midway_and_the_longer_the_likelier() -> None:
    made = Traffic(prompt=(1, 1), new=(10, 100)).running(20_000)
    whole = [one.prompt_tokens + one.new_tokens for one in made]
    lengths = np.arange(10, 101)
    assert np.mean(whole) - 1 == pytest.approx((lengths**2).sum() / lengths.sum(), rel=0.02)
    assert np.mean([one.new_tokens for one in made]) == pytest.approx(np.mean(whole) / 2, rel=0.03)
    assert min(one.new_tokens for one in made) >= 2 and all(one.seconds == 0 for one in made)


@pytest.mark.parametrize(("new", "rate"), [((1, 4), 30.0), ((1, 1), 30.0), ((20, 20), 0.01)])
def test_short_answers_and_an_all_but_idle_fleet_are_served(new, rate) -> None:
    served = serve(FLEET, Traffic(prompt=(10, 20), new=new), rate, "fewest tokens", each=20)
    assert len(served.requests) == 4 * 20 // 2 - 1 and Limits(1.0, 1.0).share(served) == 1.0


def test_capacity_is_places_over_the_time_that_a_request_holds_one() -> None:
    assert capacity(FLEET, TRAFFIC) == pytest.approx(8 / (19 * 0.01), rel=0.05)


def test_requests_in_flight_follow_littles_law() -> None:
    assert plan.in_flight(FLEET.of(1), TRAFFIC, rate=20.0) == pytest.approx(20 * 0.195, abs=1)
    assert plan.in_flight(FLEET.of(1), TRAFFIC, rate=1000.0) == 8


def test_two_requests_have_no_later_half_and_three_have() -> None:
    with pytest.raises(RoseError, match="give more requests"):
        serve(FLEET.of(1), TRAFFIC, 20.0, "fewest tokens", each=2)
    assert len(serve(FLEET.of(3), TRAFFIC, 20.0, "fewest tokens", each=1).requests) == 1


def test_loads_below_capacity_keep_limits_that_loads_beyond_it_break() -> None:
    each_s = capacity(FLEET, TRAFFIC)
    calm, late = (serve(FLEET, TRAFFIC, load * each_s, "fewest tokens") for load in (0.6, 1.5))
    assert calm.ttft(90) <= 0.02 and late.ttft(50) > 10 * calm.ttft(99)
    limits = Limits(ttft_s=0.05, gap_s=1.0)
    assert limits.share(calm) == 1.0 and limits.share(late) < 0.9
    assert Limits(1e9, 1e9).share(late) == 1.0 and Limits(0.0, 0.0).share(calm) == 0.0


def test_a_long_prompts_first_token_may_take_its_prefill_more_and_both_limits_count() -> None:
    late = plan.Request(1.0, [1.5, 1.7, 1.8], number=0, prompt=1000, new=3)
    assert not Limits(0.2, 1.0).keeps(late) and Limits(0.5, 1.0).keeps(late)
    assert Limits(0.2, 1.0, alone=lambda tokens: tokens * 0.3e-3).keeps(late)
    assert not Limits(0.2, 1.0, alone=lambda tokens: tokens * 0.2e-3).keeps(late)
    assert not Limits(0.5, 0.1).keeps(late)
