"""Deferral of Ctrl-C to step boundaries, so that a step's bookkeeping is never interrupted."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType
from typing import ClassVar


class HeldInterrupt:
    """A SIGINT handler that holds the interrupt until :meth:`let_through` is called.

    A second SIGINT raises ``KeyboardInterrupt`` at once.
    """

    installed: ClassVar[HeldInterrupt | None] = None  # faster than ``signal.getsignal``
    is_held = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.is_held = not self.is_held
        if not self.is_held:
            signal.default_int_handler(number, frame)

    def let_through(self) -> None:
        """Raise ``KeyboardInterrupt`` if a SIGINT has arrived since the last call."""
        if self.is_held:
            self.is_held = False
            raise KeyboardInterrupt


@contextmanager
def held_interrupt() -> Iterator[Callable[[], None]]:
    """Hold SIGINT: raise ``KeyboardInterrupt`` only in calls of the yielded function, and on a regular exit.

    Has no effect in threads other than the main one, or if SIGINT does not raise ``KeyboardInterrupt``. In a
    nested context, the yielded function is that of the outer one.
    """
    outer, is_main = HeldInterrupt.installed, current_thread() is main_thread()
    if not is_main or outer or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield outer.let_through if is_main and outer else lambda: None
        return
    held = HeldInterrupt()
    signal.signal(signal.SIGINT, held)
    try:
        HeldInterrupt.installed = held
        yield held.let_through
    finally:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        finally:
            HeldInterrupt.installed = None
    held.let_through()
