"""Host time by function: nothing is lost, and time belongs to the function that spends it."""

import cProfile
from functools import partial

import pytest

from rosellm.lab.records.host_functions import host_functions
from rosellm.no_collection import no_collection


class Clock:
    """Time that passes only in ``spend``; a call is free."""

    now = 0.0


@pytest.fixture(autouse=True)
def profiled_by_that_clock(monkeypatch):
    monkeypatch.setattr(cProfile, "Profile", partial(cProfile.Profile, lambda: Clock.now))


def spin(seconds):
    Clock.now += seconds


def outer():
    spin(0.004)
    Clock.now += 0.01


def test_a_function_has_its_own_time_and_that_of_the_c_code_it_calls():
    functions = {f.name: f for f in host_functions(lambda: [outer(), outer()], steps=2)}
    assert functions["`test_host_functions.spin`"].us == pytest.approx(4000)
    assert functions["`test_host_functions.outer`"].us == pytest.approx(10_000)
    assert functions["`test_host_functions.outer`"].calls == 1


def test_what_is_not_named_is_summed_up_in_the_last_row():
    with no_collection():  # whose callbacks would be functions, too
        every = host_functions(lambda: [outer() for _ in range(2)], steps=2, most=9)
        most = host_functions(lambda: [outer() for _ in range(2)], steps=2, most=1)
    assert [f.name for f in most] == [every[0].name, f"{len(every) - 1} other functions"]
    assert sum(f.us for f in most) == pytest.approx(sum(f.us for f in every))
