"""End a command early on SIGINT and SIGTERM."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Sequence

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """A context in which SIGINT and SIGTERM do not end the program, but are recorded for it to check.

    number: the number of the first signal; None before any signal.

    Only the main thread can enter the context.
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
        """Install the handlers, again if a library has replaced them."""
        for number in SIGNALS:
            signal.signal(number, self._note)

    def exit_unless_done(self, done: Iterable[str], names: Sequence[str]) -> None:
        """If a signal came and not all of ``names`` are done, print which are done, and exit.

        The exit status is the shell's: 130 for SIGINT, 143 for SIGTERM.
        """
        done = set(done)
        if self.number is not None and not done.issuperset(names):
            listed = [
                ", ".join(name for name in names if (name in done) == is_done) or "none"
                for is_done in (True, False)
            ]
            told = f"finished {listed[0]}; not finished {listed[1]}"
            print(f"interrupted by {self.number.name}: {told}", file=sys.stderr)
            raise SystemExit(128 + self.number)

    def _note(self, number: int, _frame: object) -> None:
        self.number = self.number or signal.Signals(number)
