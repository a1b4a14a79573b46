"""A step that records its requests and their durations."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, cast

from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.outputs import Done
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.steps.step import Step


@dataclass(slots=True)
class Begun:
    """A decode of ``rows`` sequences, or a prefill of ``tokens`` tokens of that many.

    cached: previously cached tokens of all rows together; longest: of one row. began: start by
    ``perf_counter``; seconds: duration by the engine's clock, once it has ended.
    """

    kind: Literal["decode", "prefill"]
    rows: int
    tokens: int
    cached: int
    longest: int
    began: float
    seconds: float = 0.0


class WatchedStep:
    """A wrapper of ``step`` that records finished requests in ``begun``, in order."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._unfinished: deque[Begun] = deque()
        self.begun: list[Begun] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def begin_prefill(self, sequences: list[Sequence], counts: list[int]) -> None:
        note = self._note("prefill", sequences, sum(counts))
        self._step.begin_prefill(sequences, counts)
        self._unfinished.append(note)

    def begin_decode(self, sequences: list[Sequence]) -> int:
        note = self._note("decode", sequences, len(sequences))
        note.rows = self._step.begin_decode(sequences)
        if note.rows:
            self._unfinished.append(note)
        return note.rows

    def collect(self, leave: int = 0) -> Iterator[Done]:
        for done in self._step.collect(leave):
            note = self._unfinished.popleft()
            note.seconds = done.seconds
            self.begun.append(note)
            yield done

    def _note(self, kind: Literal["decode", "prefill"], sequences: list[Sequence], tokens: int) -> Begun:
        cached = [sequence.num_cached_tokens for sequence in sequences]
        return Begun(kind, len(sequences), tokens, sum(cached), max(cached), perf_counter())


@contextmanager
def watched(engine: Engine) -> Iterator[list[Begun]]:
    """Yield the steps of an engine in the order in which they ended; it must be idle before and after."""
    step = engine.step
    watch = WatchedStep(step)
    engine.step = cast("Step", watch)
    try:
        yield watch.begun
    finally:
        engine.step = step
