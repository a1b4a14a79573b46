"""End a command early on SIGINT and SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Iterable

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """A context in which SIGINT and SIGTERM end nothing, but are recorded for the program to check.

    ``number`` is the first signal's number, None before. Only the main thread can enter it.
    """

    number: signal.Signals | None = None

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
        listed = [", ".join(some) or "none" for some in (done, rest)]
        return f"interrupted by {self.number.name}: finished {listed[0]}; not finished {listed[1]}"

    def _note(self, number: int, _frame: object) -> None:
        self.number = self.number or signal.Signals(number)
