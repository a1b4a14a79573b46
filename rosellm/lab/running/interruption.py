"""End a command early: SIGINT and SIGTERM, and whole process trees."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import psutil

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """A context in which SIGINT and SIGTERM end nothing, but are recorded for the program to check.

    ``number`` is the first signal's number, None before; ``reader`` is readable from then on, which makes
    ``multiprocessing.connection.wait`` return. Only the main thread can enter it.
    """

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self.reader, self._writer = multiprocessing.Pipe(duplex=False)

    def __enter__(self) -> Interruption:
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self.take_over()
        return self

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def take_over(self) -> None:
        """Reinstall the handlers, after a library has replaced them."""
        for number in SIGNALS:
            signal.signal(number, self._note)

    @property
    def exit_code(self) -> int:
        """Exit status by shell convention: 130 for SIGINT, 143 for SIGTERM."""
        assert self.number is not None
        return 128 + self.number

    def told(self, done: Iterable[str], names: Iterable[str]) -> str:
        """Describe in one line which of ``names`` are done, and which are not."""
        assert self.number is not None
        done = list(done)
        rest = [name for name in names if name not in done]
        return f"interrupted by {self.number.name}: finished {_listed(done)}; not finished {_listed(rest)}"

    def _note(self, number: int, _frame: object) -> None:
        if self.number is None:
            self.number = signal.Signals(number)
            self._writer.send_bytes(b"!")


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Block SIGINT and SIGTERM for this thread and the processes that it starts meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_running(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_family(process: psutil.Process) -> None:
    """Kill a process and all its descendants; each is stopped first, so that it starts no more."""
    with suppress(psutil.NoSuchProcess):
        process.suspend()
        kill_children(process)
        process.kill()


def kill_children(process: psutil.Process) -> None:
    """Kill all descendants of a process."""
    for child in process.children():
        kill_family(child)
