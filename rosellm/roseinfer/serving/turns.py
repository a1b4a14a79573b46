"""Wake threads that wait for text one after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from queue import SimpleQueue
from threading import Lock, current_thread, main_thread


class Pieces:
    """A queue of one request's text, from the worker to its reader; None marks the end.

    ``append`` adds a piece without waking a reader; :meth:`Turns.call` does that.
    """

    __slots__ = ("_gate", "_items", "_main_gate", "_turns", "append", "main_waits", "n_waiting")

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._items: deque[str | None] = deque()
        self._gate: SimpleQueue[None] = SimpleQueue()
        self._main_gate: SimpleQueue[None] = SimpleQueue()
        self.append = self._items.append
        # Waiting readers, and whether the main thread waits; guarded by the lock of ``Turns``.
        self.n_waiting, self.main_waits = 0, False

    def __len__(self) -> int:
        return len(self._items)

    def get(self) -> str | None:
        """Return the next piece; blocks until there is one."""
        while True:
            try:
                return self._items.popleft()
            except IndexError:
                self._turns.wait(self)

    def open_gate(self) -> None:
        """Let one waiting reader continue."""
        self._gate.put(None)

    def wait_at_gate(self) -> None:
        self._gate.get()

    def open_main_gate(self) -> None:
        self._main_gate.put(None)

    def wait_at_main_gate(self) -> None:
        self._main_gate.get()


class Turns:
    """Wakes readers one at a time: each reader, once awake, wakes the next.

    Only one thread at a time holds the interpreter lock. If hundreds of readers woke at once, each would run
    before the worker, which has the next step to begin; this way the worker competes with one or two. A
    reader whose turn comes late takes all the pieces that have accumulated. The main thread is woken
    separately: Ctrl-C can interrupt it anywhere, and must not hold up the other readers.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._line: deque[Pieces] = deque()
        self._is_moving = False  # a reader has been woken and will wake the next

    def call(self, many: Iterable[Pieces]) -> None:
        """Line up the readers that wait for any of these; each has something to read."""
        with self._lock:
            for pieces in many:
                if pieces.main_waits:
                    pieces.main_waits = False
                    pieces.open_main_gate()
                if pieces.n_waiting:
                    self._line.extend([pieces] * pieces.n_waiting)
                    pieces.n_waiting = 0
            if self._is_moving or not self._line:
                return
            self._is_moving = True
        self._next()

    def wait(self, pieces: Pieces) -> None:
        """Block until ``pieces`` may have something to read."""
        in_main = current_thread() is main_thread()
        with self._lock:
            if pieces:
                return
            if in_main:
                pieces.main_waits = True
            else:
                pieces.n_waiting += 1
        if in_main:
            return pieces.wait_at_main_gate()
        try:
            pieces.wait_at_gate()
        except BaseException:
            self._give_up(pieces)
            raise
        self._next()

    def _next(self) -> None:
        with self._lock:
            if not self._line:
                self._is_moving = False
                return
            pieces = self._line.popleft()
        pieces.open_gate()

    def _give_up(self, pieces: Pieces) -> None:
        """Handle an interrupted reader; if its turn has already come, pass it on."""
        with self._lock:
            if pieces.n_waiting:
                pieces.n_waiting -= 1
                return
            if pieces in self._line:
                self._line.remove(pieces)
                return
        self._next()
