"""What a run saves if prompts join its decode steps."""

import pytest

from rosellm.bench.arrivals import Arrival
from rosellm.roseinfer.exhibits import load_exhibit

spared = load_exhibit("spared_passes")


def test_products_between_recorded_rows_lie_on_straight_lines() -> None:
    recorded = spared.recorded_products()
    assert spared.products_us(64) == recorded[64]
    assert spared.products_us(96) == pytest.approx((recorded[64] + recorded[128]) / 2)


def test_a_row_that_ends_is_given_to_the_next_request_in_the_following_step() -> None:
    requests = [Arrival(0.0, prompt, new) for prompt, new in ((5, 2), (6, 4), (7, 3), (900, 1))]
    assert spared.taken_by(requests, together=2) == [(0, 11), (2, 0), (1, 7), (2, 0), (1, 900)]
    assert spared.taken_by(requests, together=4, budget=12) == [(0, 18), (3, 900), (2, 0), (1, 0)]


def test_what_is_saved_is_a_pass_for_each_step_that_prompts_join() -> None:
    steps = [(0, 500), (256, 0), (256, 264), (256, 5000)]
    us = spared.products_us
    assert spared.saved_us(steps) == us(256) + us(264) - us(520) > 0
    assert [spared.joins(*step) for step in steps] == [False, False, True, False]
