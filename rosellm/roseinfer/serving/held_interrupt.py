"""Ctrl-C between two steps: what a step has begun to write down, it finishes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType


class HeldInterrupt:
    """A handler of SIGINT that waits for :meth:`let_through`; a second one meanwhile interrupts at once."""

    def __init__(self) -> None:
        self.is_held = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_held:
            self.is_held = False
            signal.default_int_handler(number, frame)
        self.is_held = True

    def let_through(self) -> None:
        """Raises KeyboardInterrupt if a SIGINT came since the last call."""
        if self.is_held:
            self.is_held = False
            raise KeyboardInterrupt


@contextmanager
def held_interrupt() -> Iterator[Callable[[], None]]:
    """Within, SIGINT raises KeyboardInterrupt only where what is yielded is called, and at the end.

    In another thread than the main one, and where SIGINT does not raise KeyboardInterrupt, nothing changes.
    """
    before = signal.getsignal(signal.SIGINT)
    if current_thread() is not main_thread():
        yield lambda: None
    elif isinstance(before, HeldInterrupt):
        yield before.let_through
    elif before is not signal.default_int_handler:
        yield lambda: None
    else:
        held = HeldInterrupt()
        signal.signal(signal.SIGINT, held)
        try:
            yield held.let_through
        finally:
            signal.signal(signal.SIGINT, before)
        held.let_through()
