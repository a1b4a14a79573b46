"""The garbage collector while an engine serves: what is off or passed over, and that it ends."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from threading import Thread

import pytest

from rosellm import SamplingParams
from rosellm.frozen_heap import _Freezes, frozen_heap
from rosellm.models.tokenizer import load_dummy_tokenizer
from rosellm.no_collection import no_collection
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


OLD = Circle()
BOTH = pytest.mark.parametrize(
    ("within", "holds"),
    [(frozen_heap, lambda: is_frozen(OLD)), (no_collection, lambda: not gc.isenabled())],
    ids=["frozen", "off"],
)
Within = Callable[[], AbstractContextManager]


@BOTH
def test_only_the_end_of_the_last_of_several_undoes_it(within: Within, holds: Callable[[], bool]):
    def enter_and_leave() -> None:
        with within():
            pass

    with within():
        thread = Thread(target=enter_and_leave)
        thread.start()
        thread.join()
        assert holds()
    assert not holds()


@BOTH
def test_an_error_within_undoes_it(within: Within, holds: Callable[[], bool]):
    with pytest.raises(RuntimeError), within():
        assert holds()
        raise RuntimeError
    assert not holds()


def test_a_run_of_all_requests_is_within_a_frozen_heap():
    engine, watched = small_engine(random_model(0)), Watched(3)
    OfflineScheduler(engine).run([[1, 2]], PARAMS, watched)
    assert watched.seen == {True}
    assert not is_frozen(watched)


def test_a_streaming_manager_is_within_a_frozen_heap_until_it_is_closed():
    engine = small_engine(random_model(0), tokenizer=load_dummy_tokenizer(small_config()))
    with StreamingManager(engine) as manager:
        manager.result(manager.add_request([1, 2], PARAMS))
        assert is_frozen(engine)
    assert not is_frozen(engine)
