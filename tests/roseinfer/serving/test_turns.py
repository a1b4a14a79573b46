"""Readers that wait for pieces: each gets all of them, and they are woken one after another."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from time import sleep

import pytest
from hypothesis import given, settings, strategies as st

from rosellm.roseinfer.serving.turns import Pieces, Turns

WAIT_S = 20.0
N_READERS = 12


def read_all(pieces: Pieces) -> list[str]:
    got = []
    while (piece := pieces.get()) is not None:
        got.append(piece)
    return got


def until(condition: Callable[[], object]) -> None:
    for _ in range(2000):
        if condition():
            return
        sleep(0.005)
    raise AssertionError("it never came to that")


def put(turns: Turns, many: list[Pieces], piece: str | None) -> None:
    for pieces in many:
        pieces.append(piece)
    turns.call(many)


@settings(max_examples=30, deadline=None)
@given(steps=st.lists(st.sets(st.integers(0, N_READERS - 1), min_size=1), max_size=30))
def test_every_reader_gets_its_pieces_in_order_whoever_else_is_called(steps: list[set[int]]) -> None:
    turns = Turns()
    many = [Pieces(turns) for _ in range(N_READERS)]
    with ThreadPoolExecutor(N_READERS) as threads:
        reading = [threads.submit(read_all, pieces) for pieces in many]
        for number, chosen in enumerate(steps):
            put(turns, [many[i] for i in chosen], str(number))
        put(turns, many, None)
        for i, one in enumerate(reading):
            assert one.result(WAIT_S) == [str(n) for n, chosen in enumerate(steps) if i in chosen]


@pytest.fixture
def waiting() -> tuple[Turns, list[Pieces], list[Future]]:
    """Readers that all wait at their gates."""
    turns = Turns()
    many = [Pieces(turns) for _ in range(N_READERS)]
    with ThreadPoolExecutor(N_READERS) as threads:
        reading = [threads.submit(read_all, pieces) for pieces in many]
        until(lambda: all(pieces.n_waiting for pieces in many))
        yield turns, many, reading
        put(turns, many, None)


def test_a_reader_is_woken_only_after_the_one_before_is_awake(
    waiting: tuple[Turns, list[Pieces], list[Future]], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, many, _ = waiting
    opened: list[Pieces] = []
    with monkeypatch.context() as patch:
        patch.setattr(Pieces, "open_gate", lambda pieces: opened.append(pieces))
        put(turns, many, "a")
        assert opened == many[:1]
        put(turns, many, "b")  # the first has not stirred yet
        assert opened == many[:1]
    opened[0].open_gate()
    until(lambda: not any(map(len, many)))


def test_a_reader_that_does_not_come_back_holds_up_nobody() -> None:
    turns, leave = Turns(), Event()
    many = [Pieces(turns) for _ in range(N_READERS)]
    with ThreadPoolExecutor(N_READERS) as threads:

        def walk_away(pieces: Pieces) -> None:
            assert pieces.get() == "a"
            assert leave.wait(WAIT_S)

        away = [threads.submit(walk_away, pieces) for pieces in many[::2]]
        reading = [threads.submit(read_all, pieces) for pieces in many[1::2]]
        until(lambda: all(pieces.n_waiting for pieces in many))
        for piece in ("a", "b", None):
            put(turns, many, piece)
        assert [one.result(WAIT_S) for one in reading] == [["a", "b"]] * len(reading)
        leave.set()
        assert [one.result(WAIT_S) for one in away] == [None] * len(away)


@pytest.mark.parametrize("called_first", [False, True])
def test_an_interrupted_reader_passes_its_turn_on(
    waiting: tuple[Turns, list[Pieces], list[Future]], monkeypatch: pytest.MonkeyPatch, called_first: bool
) -> None:
    turns, many, reading = waiting
    interrupted = Pieces(turns)

    def interrupt(_pieces: Pieces) -> None:
        if called_first:
            put(turns, [interrupted, *many], "a")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Pieces, "wait_at_gate", interrupt)
        interrupted.get()
    put(turns, [interrupted, *many], None)
    assert [one.result(WAIT_S) for one in reading] == [["a"] if called_first else []] * N_READERS


def test_two_readers_of_one_request_both_find_its_end() -> None:
    turns = Turns()
    pieces = Pieces(turns)
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(read_all, pieces) for _ in range(2)]
        until(lambda: pieces.n_waiting == 2)
        put(turns, [pieces], "a")
        pieces.append(None)
        put(turns, [pieces], None)
        assert sorted(one.result(WAIT_S) for one in both) == [[], ["a"]]
