"""What a full garbage collection passes over while an engine serves, and what it still finds."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from threading import Thread

import pytest

from rosellm import SamplingParams
from rosellm.frozen_heap import _Freezes, frozen_heap
from rosellm.models.tokenizer import load_dummy_tokenizer
from rosellm.roseinfer.serving.scheduler import OfflineScheduler
from rosellm.roseinfer.serving.streaming import StreamingManager
from tests.helpers import random_model, small_config, small_engine

PARAMS = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


class Circle:
    def __init__(self) -> None:
        self.me = self


class Watched:
    """Progress that notes what is frozen."""

    def __init__(self, total: int) -> None:
        self.total, self.seen = total, set[bool]()

    def update(self, _n: int) -> None:
        self.seen.add(is_frozen(self))


def enter_and_leave() -> None:
    with frozen_heap():
        pass


def is_frozen(one: object) -> bool:
    """Whether a collection passes over it."""
    return not any(found is one for found in gc.get_objects())


@pytest.fixture(autouse=True)
def thawed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tests' own freeze is undone, and made again."""
    monkeypatch.setattr(_Freezes, "count", 0)
    gc.unfreeze()
    yield
    gc.freeze()


def test_circles_made_within_are_collected():
    with frozen_heap():
        gone = weakref.ref(Circle())
        gc.collect()
        assert gone() is None


def test_only_the_end_of_the_last_of_several_undoes_it():
    old = Circle()
    with frozen_heap():
        thread = Thread(target=enter_and_leave)
        thread.start()
        thread.join()
        assert is_frozen(old)
    assert not is_frozen(old)


def test_an_error_within_undoes_it():
    old = Circle()
    with pytest.raises(RuntimeError), frozen_heap():
        raise RuntimeError
    assert not is_frozen(old)


def test_a_run_of_all_requests_is_within():
    engine, watched = small_engine(random_model(0)), Watched(3)
    OfflineScheduler(engine).run([[1, 2]], PARAMS, watched)
    assert watched.seen == {True}
    assert not is_frozen(watched)


def test_a_streaming_manager_is_within_until_it_is_closed():
    engine = small_engine(random_model(0), tokenizer=load_dummy_tokenizer(small_config()))
    with StreamingManager(engine) as manager:
        manager.result(manager.add_request([1, 2], PARAMS))
        assert is_frozen(engine)
    assert not is_frozen(engine)
