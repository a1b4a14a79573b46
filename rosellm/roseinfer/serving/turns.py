"""Threads that wait for text, woken one after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from threading import Lock


class Gate:
    """Closed until it is opened, once, for the one reader that waits at it."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = Lock()
        self._lock.acquire()

    def open(self) -> None:
        self._lock.release()

    def wait(self) -> None:
        self._lock.acquire()


class Pieces:
    """The pieces of one request's text on their way from the worker to its reader; None is the end.

    ``append`` adds one and wakes nobody; :meth:`Turns.call` does.
    """

    __slots__ = ("_items", "_turns", "append", "gates")

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._items: deque[str | None] = deque()
        self.append = self._items.append
        self.gates: list[Gate] = []  # of readers to be called; guarded by the lock of the turns

    def __len__(self) -> int:
        return len(self._items)

    def get(self) -> str | None:
        """The next piece; waits for it."""
        while True:
            try:
                return self._items.popleft()
            except IndexError:
                self._turns.wait(self)


class Turns:
    """Wakes readers in turn: each one, once awake, wakes the next.

    Only one thread at a time runs in the interpreter. Of hundreds of readers woken at once each would come
    before the worker, which has the next step to begin; this way it competes with one or two. A reader whose
    turn comes late finds several pieces and takes them all.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._line: deque[Gate] = deque()
        self._is_moving = False  # a reader has been woken and will wake the next

    def call(self, many: Iterable[Pieces]) -> None:
        """Line up whoever waits for one of these; each has something to read."""
        with self._lock:
            for pieces in many:
                if pieces.gates:
                    self._line.extend(pieces.gates)
                    pieces.gates.clear()
            if self._is_moving or not self._line:
                return
            self._is_moving = True
        self._next()

    def wait(self, pieces: Pieces) -> None:
        """Until ``pieces`` may have something to read."""
        gate = Gate()
        with self._lock:
            if pieces:
                return
            pieces.gates.append(gate)
        try:
            gate.wait()
        except BaseException:
            self._give_up(pieces, gate)
            raise
        self._next()

    def _next(self) -> None:
        with self._lock:
            if not self._line:
                self._is_moving = False
                return
            gate = self._line.popleft()
        gate.open()

    def _give_up(self, pieces: Pieces, gate: Gate) -> None:
        """A reader was interrupted; if its turn has come already, it is passed on."""
        with self._lock:
            for waiting in (pieces.gates, self._line):
                if gate in waiting:
                    waiting.remove(gate)
                    return
        self._next()
