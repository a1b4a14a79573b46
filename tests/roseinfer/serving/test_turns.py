"""Readers that wait for pieces: each gets all of them, and they are woken one after another."""

from __future__ import annotations

from _thread import interrupt_main
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from signal import SIGINT, signal
from sys import getswitchinterval, setswitchinterval
from threading import Event
from time import perf_counter, sleep
from types import FrameType

import pytest
from hypothesis import given, settings, strategies as st

from rosellm.roseinfer.serving import turns as turns_module
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
    interrupted, wait_at_gate = Pieces(turns), Pieces.wait_at_gate

    def interrupt(pieces: Pieces) -> None:
        if pieces is not interrupted:
            return wait_at_gate(pieces)
        if called_first:
            put(turns, [interrupted, *many], "a")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as thread, pytest.raises(KeyboardInterrupt):
        patch.setattr(Pieces, "wait_at_gate", interrupt)
        thread.submit(interrupted.get).result(WAIT_S)
    put(turns, [interrupted, *many], None)
    assert [one.result(WAIT_S) for one in reading] == [["a"] if called_first else []] * N_READERS


class InterruptedHereError(BaseException):
    pass


@pytest.fixture
def interrupts() -> Iterator[list[str]]:
    """SIGINT raises in whatever line of ``turns`` the main thread is, and does nothing elsewhere."""
    lines: list[str] = []

    def interrupt(_signal: int, frame: FrameType) -> None:
        if frame.f_code.co_filename == turns_module.__file__:
            lines.append(frame.f_code.co_name)
            raise InterruptedHereError

    before, switch_s = signal(SIGINT, interrupt), getswitchinterval()
    setswitchinterval(1e-6)  # threads take turns after every few lines
    yield lines
    setswitchinterval(switch_s)
    signal(SIGINT, before)


def test_a_main_thread_that_is_interrupted_anywhere_keeps_nobody_waiting(interrupts: list[str]) -> None:
    turns, fed = Turns(), Event()
    own, *many = pieces = [Pieces(turns) for _ in range(N_READERS)]

    def feed() -> int:
        n, end = 0, perf_counter() + WAIT_S
        while (n < 1000 or not {"wait", "get"} <= set(interrupts)) and perf_counter() < end:
            put(turns, pieces, "a")
            n += 1
            sleep(0)
        fed.set()
        put(turns, pieces, None)
        return n

    def interrupt() -> None:
        while not fed.is_set():
            interrupt_main()
            sleep(1e-5)

    with ThreadPoolExecutor(N_READERS + 1) as threads:
        reading = [threads.submit(read_all, one) for one in many]
        feeding, interrupting = threads.submit(feed), threads.submit(interrupt)
        piece: str | None = ""
        while piece is not None:
            with suppress(InterruptedHereError):
                piece = own.get()
        assert [len(one.result(WAIT_S)) for one in reading] == [feeding.result()] * len(many)
        interrupting.result()
    assert {"wait", "get"} <= set(interrupts)


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
