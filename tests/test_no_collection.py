"""When the garbage collector is off, and that it is on again afterwards."""

from __future__ import annotations

import gc
from threading import Thread

import pytest

from rosellm.no_collection import no_collection


def test_nothing_is_collected_within_and_an_error_ends_that():
    with pytest.raises(RuntimeError), no_collection():
        assert not gc.isenabled()
        raise RuntimeError
    assert gc.isenabled()


def test_a_collector_that_was_off_before_stays_off():
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_only_the_end_of_the_last_of_several_enables_it():
    thread = Thread(target=_enter_and_leave)
    with no_collection():
        thread.start()
        thread.join()
        assert not gc.isenabled()
    assert gc.isenabled()


def _enter_and_leave() -> None:
    with no_collection():
        pass
