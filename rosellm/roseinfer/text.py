"""The text of a sequence, decoded token by token."""

from __future__ import annotations

from rosellm.models.loading import AnyTokenizer


class IncrementalText:
    """The text of one sequence, decoded token by token, ending before the first stop string.

    Text that may be the beginning of a stop string is held back until that is settled, so what :meth:`take`
    has returned is final. Of several stop strings the first to be completed counts, wherever token boundaries
    fall.
    """

    def __init__(self, tokenizer: AnyTokenizer, stops: tuple[str, ...] = ()) -> None:
        self._stops = stops
        self._stream = tokenizer.stream()
        self._push = self._stream.push
        self._taken: list[str] = []
        self._pieces: list[str] = []  # settled, not taken yet
        self._held = ""
        self.stopped = False

    @property
    def text(self) -> str:
        """All settled text."""
        return "".join(self._taken + self._pieces)

    def push(self, token_id: int) -> None:
        """Add one token; ``stopped`` tells whether it completed a stop string."""
        piece = self._push(token_id)
        if not self._stops:
            self._pieces.append(piece)
        elif piece:
            self._absorb(piece)

    def take(self) -> str:
        """Settled text not taken before."""
        new = "".join(self._pieces)
        self._pieces.clear()
        self._taken.append(new)
        return new

    def finish(self) -> None:
        """The sequence has ended: settle what was held back, including incomplete characters."""
        if self.stopped:
            return
        rest = self._stream.finish()
        if self._stops:
            self._absorb(rest)
            rest, self._held = self._held, ""
        self._pieces.append(rest)

    def _absorb(self, piece: str) -> None:
        held = self._held + piece
        ends = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
        if ends:
            self.stopped = True
            self._pieces.append(held[: min(ends)[1]])
            self._held = ""
            return
        keep = _possible_stop(held, self._stops)
        self._pieces.append(held[: len(held) - keep])
        self._held = held[len(held) - keep :]


def _possible_stop(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest suffix of ``text`` that begins a stop string."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for n in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-n:]) for stop in stops):
            return n
    return 0
