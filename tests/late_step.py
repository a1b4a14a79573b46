"""A step that runs ahead of the host, as the GPU-resident one does, made from the host-driven one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from copy import copy

from torch import Tensor

from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.outputs import Done
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.steps.step import Step


class LateStep:
    """Runs ``step`` at once, on copies of the sequences, and hands tokens over ``run_ahead`` steps later.

    A copy shares its sequence's block lists; where it failed, its reason comes instead of a token.
    ``overtaken`` counts tokens of sequences that were released before these arrived; ``idle`` the decode
    steps that had nothing left to run.
    """

    def __init__(self, step: Step, run_ahead: int) -> None:
        self.step, self.run_ahead = step, run_ahead
        self.overtaken = self.idle = 0
        self._ahead: dict[Sequence, Sequence] = {}
        self._begun: deque[tuple[str, list[Sequence], list[int | str], list[int]]] = deque()

    def begin_prefill(self, sequences: list[Sequence], counts: list[int]) -> None:
        whole = [s for s, n in zip(sequences, counts, strict=True) if s.completes_prefill(n)]
        copies = []
        for sequence in sequences:
            ahead = self._ahead[sequence] = copy(sequence)
            ahead.tokens = list(sequence.tokens)
            copies.append(ahead)
        self.step.begin_prefill(copies, counts)
        for sequence, count in zip(sequences, counts, strict=True):
            if sequence not in whole:
                sequence.num_cached_tokens += count
        self._note("prefill", whole, [s.prefill_length - s.num_cached_tokens for s in whole])

    def begin_decode(self, sequences: list[Sequence]) -> int:
        running = [s for s in sequences if not self._ahead[s].is_finished]
        self.idle += not running
        if running:
            self.step.begin_decode([self._ahead[s] for s in running])
            self._note("decode", running, [1] * len(running))
        return len(running)

    def collect(self, leave: int = 0) -> Iterator[Done]:
        while len(self._begun) > leave:
            kind, sequences, tokens, counts = self._begun.popleft()
            got, failed = [], []
            for sequence, token, count in zip(sequences, tokens, counts, strict=True):
                if sequence not in self._ahead:
                    self.overtaken += 1
                elif isinstance(token, str):
                    sequence.fail(token)
                    failed.append(sequence)
                elif sequence.commit(token, count):
                    got.append(sequence)
            yield Done(kind, got, 1e-3, failed)

    def release(self, sequence: Sequence) -> None:
        if sequence in self._ahead:
            self.step.release(self._ahead.pop(sequence))

    def last_logits(self) -> Tensor:
        return self.step.last_logits()

    def _note(self, kind: str, sequences: list[Sequence], counts: list[int]) -> None:
        """``counts``: tokens of each that the step has cached."""
        for _ in self.step.collect():
            pass
        ahead = [self._ahead[s] for s in sequences]
        tokens = [a.error or a.tokens[a.num_cached_tokens] for a in ahead]
        self._begun.append((kind, sequences, tokens, counts))


def run_late(engine: Engine, run_ahead: int) -> LateStep:
    """Make ``engine`` run ahead; its step."""
    engine.step, engine.budget.run_ahead = LateStep(engine.step, run_ahead), run_ahead
    return engine.step
