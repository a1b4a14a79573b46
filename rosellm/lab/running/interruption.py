"""What ends a command before its time: SIGINT and SIGTERM, and whole families of processes."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import psutil

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Within its ``with``, SIGINT and SIGTERM end nothing: they are noted, for the program to look at.

    ``number`` is the first one's, None before; ``reader`` is ready to be read from then on, so that
    ``multiprocessing.connection.wait`` returns. Only the main thread can enter it.
    """

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self.reader, self._writer = multiprocessing.Pipe(duplex=False)

    def __enter__(self) -> Interruption:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """As a shell tells it: 130 for SIGINT, 143 for SIGTERM."""
        assert self.number is not None
        return 128 + self.number

    def told(self, done: Iterable[str], names: Iterable[str]) -> str:
        """One line: which of ``names`` are done, and which are not."""
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
    """Within: neither this thread nor the processes that it starts get SIGINT or SIGTERM."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_running(pid: int) -> bool:
    """Whether there is such a process, and not only its exit status that nobody has asked for."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_family(process: psutil.Process) -> None:
    """End a process and all that descend from it; each is halted first, so that it starts no more."""
    with suppress(psutil.NoSuchProcess):
        process.suspend()
        kill_children(process)
        process.kill()


def kill_children(process: psutil.Process) -> None:
    """End all that descend from a process."""
    for child in process.children():
        kill_family(child)
