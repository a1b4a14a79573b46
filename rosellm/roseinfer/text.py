"""The text of a sequence, decoded token by token."""

from __future__ import annotations

from rosellm.models.loading import AnyTokenizer


class IncrementalText:
    """The text of one sequence, decoded token by token, ending before the first stop string.

    prompt: the ids before the text.
    stops: the stop strings.
    keep_stop: whether the text includes the stop string that ends it.
    skip_special: whether to omit special tokens.
    min_tokens: number of first tokens that complete no stop string.
    stopped: the stop string that has been completed, or None.

    Text that may be the beginning of a stop string is held back until more tokens decide, so text that
    :meth:`take` has returned is final. The first stop string to be completed counts, wherever token
    boundaries fall.
    """

    def __init__(
        self,
        tokenizer: AnyTokenizer,
        prompt: list[int],
        stops: tuple[str, ...] = (),
        keep_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._stops, self._keep_stop, self._n_unstopped = stops, keep_stop, min_tokens
        self._stream = tokenizer.stream(prompt, skip_special)
        self._push = self._stream.push
        self._taken: list[str] = []
        self._pieces: list[str] = []  # final, not taken yet
        self._held = ""
        self.stopped: str | None = None

    @property
    def text(self) -> str:
        """All text that is final, returned by :meth:`take` or not."""
        return "".join(self._taken + self._pieces)

    def push(self, token_id: int) -> None:
        """Add one token, and set ``stopped`` if it completes a stop string."""
        piece = self._push(token_id)
        if not self._stops:
            self._pieces.append(piece)
        elif piece:
            self._absorb(piece)
        self._n_unstopped -= 1

    def take(self) -> str:
        """Return the text that has become final since the last call."""
        new = "".join(self._pieces)
        self._pieces.clear()
        self._taken.append(new)
        return new

    def take_last(self, _n_without_text: int) -> str:
        """Return the rest of the text, after :meth:`finish`; the argument matters only to ``LateText``."""
        return self.take()

    def finish(self) -> None:
        """Flush the text held back, including incomplete characters, at the end of the sequence."""
        if self.stopped:
            return
        rest = self._stream.finish()
        if self._stops:
            self._absorb(rest)
            rest, self._held = self._held, ""
        self._pieces.append(rest)

    def _absorb(self, piece: str) -> None:
        held, ends = self._held + piece, []
        for stop in self._stops:
            at = held.find(stop, max(0, len(self._held) - len(stop) + 1))  # one that ends in the new piece
            if at >= 0:
                ends.append((at + len(stop), at, stop))
        if ends and self._n_unstopped <= 0:
            end, at, self.stopped = min(ends, key=lambda found: found[:2])
            self._pieces.append(held[: end if self._keep_stop else at])
            self._held = ""
            return
        keep = _possible_stop(held, self._stops)
        self._pieces.append(held[: len(held) - keep])
        self._held = held[len(held) - keep :]


class LateText:
    """The text of one sequence without stop strings, decoded only when it is taken.

    tokens: the sequence's list of tokens, which grows.
    begin: number of tokens of the prompt, which are not decoded.
    skip_special: whether to omit special tokens.
    """

    __slots__ = ("_at", "_push", "_stream", "_tokens")

    def __init__(
        self, tokenizer: AnyTokenizer, tokens: list[int], begin: int, skip_special: bool = True
    ) -> None:
        self._tokens, self._at = tokens, begin
        self._stream = tokenizer.stream(tokens[:begin], skip_special)
        self._push = self._stream.push

    def take(self) -> str:
        """Return the text of the tokens added since the last call, without an incomplete character."""
        begin, self._at = self._at, len(self._tokens)
        if self._at - begin == 1:
            return self._push(self._tokens[-1])
        return "".join(map(self._push, self._tokens[begin:]))

    def take_last(self, n_without_text: int) -> str:
        """Return the rest of the text when the sequence has ended.

        n_without_text: number of last tokens that have no text, such as the end-of-sequence token.
        """
        end = len(self._tokens) - n_without_text
        return "".join(map(self._push, self._tokens[self._at : end])) + self._stream.finish()


def _possible_stop(text: str, stops: tuple[str, ...]) -> int:
    """Return the length of the longest suffix of ``text`` with which a stop string begins."""
    longest = max(len(stop) - 1 for stop in stops)
    lengths = range(min(longest, len(text)), 0, -1)
    return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in stops)), 0)
