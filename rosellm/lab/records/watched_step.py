"""Record which steps an engine runs, and how long each takes."""

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
    """One step of an engine.

    kind: "decode" or "prefill".
    rows: number of sequences.
    tokens: tokens that the step computes, of all sequences together.
    cached: tokens that were cached before the step, of all sequences together.
    longest: tokens that were cached before the step, of the longest sequence.
    began: when the host began the step, by ``perf_counter``.
    seconds: duration by the engine's clock (on a GPU, the device's); 0 until the step has ended.
    """

    kind: Literal["decode", "prefill"]
    rows: int
    tokens: int
    cached: int
    longest: int
    began: float
    seconds: float = 0.0


class WatchedStep:
    """A wrapper of an engine's step that appends each finished decode or prefill to ``begun``, in order."""

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
    """Record the steps that an engine runs during the context.

    Yields a list to which each step is appended when it ends. The engine must be idle before and after.
    """
    step = engine.step
    watch = WatchedStep(step)
    engine.step = cast("Step", watch)
    try:
        yield watch.begun
    finally:
        engine.step = step
