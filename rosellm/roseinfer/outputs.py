"""What steps and requests hand back: who got a token; the tokens, their text, and when each one came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal

from rosellm.roseinfer.request import Sequence


@dataclass(frozen=True, slots=True)
class Done:
    """A step of the engine that has ended.

    ``sequences`` got exactly one token each, which is now their last one; a step that computed only parts of
    prompts has none. seconds: what the device, or the host that drives it, spent in the step. failed: those
    that ended without a token, with the reason in ``Sequence.error``.
    """

    kind: Literal["prefill", "decode"]
    sequences: list[Sequence]
    seconds: float
    failed: list[Sequence] = field(default_factory=list)


@dataclass
class RequestMetrics:
    """When a request arrived and when each of its tokens came, in ``time.perf_counter`` seconds.

    The figures are seconds; those that need more tokens than there are, are None. preemptions: how often it
    gave up its KV blocks to others.
    """

    arrival: float
    token_times: list[float] = field(default_factory=list)
    preemptions: int = 0

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, on average."""
        n = len(self.token_times)
        return (self.token_times[-1] - self.token_times[0]) / (n - 1) if n > 1 else None

    @property
    def latency(self) -> float | None:
        """From arrival to the last token."""
        return self.token_times[-1] - self.arrival if self.token_times else None

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: the gap before each token but the first."""
        return [after - before for before, after in pairwise(self.token_times)]


@dataclass
class RequestOutput:
    """A request that has ended.

    ``token_ids`` are the generated ones, an end-of-sequence token included. ``finish_reason`` is "stop",
    "length", "cancelled" or "failed". ``text`` leaves out the end-of-sequence token and everything from a
    stop string on; it is decoded when first read, and None if the engine has no tokenizer.
    """

    request_id: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: str
    metrics: RequestMetrics
    decode: Callable[[], str | None] = field(repr=False, compare=False)

    @cached_property
    def text(self) -> str | None:
        return self.decode()


class IncrementalText:
    """The text of one sequence, decoded token by token, ending before the first stop string.

    Text that may turn out to be the beginning of a stop string is held back until that is settled, so what
    :meth:`take` has returned never has to be taken back. Of several stop strings the one completed first
    counts, wherever the borders between tokens fall.
    """

    def __init__(self, tokenizer, stops: tuple[str, ...] = ()) -> None:
        self._stops = stops
        self._stream = tokenizer.stream()
        self._push = self._stream.push
        self._taken: list[str] = []
        self._pieces: list[str] = []  # settled and not taken yet
        self._held = ""
        self.stopped = False

    @property
    def text(self) -> str:
        """All settled text."""
        return "".join(self._taken + self._pieces)

    def push(self, token_id: int) -> None:
        """One token more; ``stopped`` tells whether it completed a stop string."""
        piece = self._push(token_id)
        if not self._stops:
            self._pieces.append(piece)
        elif piece:
            self._absorb(piece)

    def take(self) -> str:
        """Settled text that was not taken before."""
        new = "".join(self._pieces)
        self._pieces.clear()
        self._taken.append(new)
        return new

    def finish(self) -> None:
        """The sequence has ended: settle what was held back or is a character in parts."""
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
    """Length of the longest end of ``text`` that begins a stop string."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for n in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-n:]) for stop in stops):
            return n
    return 0
