"""Steps that the device has not finished, and the tokens they produce."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

import numpy as np
import torch

from rosellm.roseinfer.cache.device_state import ROUNDS
from rosellm.roseinfer.layers.logprobs import likely_of, tell
from rosellm.roseinfer.outputs import Done
from rosellm.roseinfer.ranks.group import ALONE, Group
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.steps.logprob_ring import LogprobRing
from rosellm.roseinfer.steps.rows import GIVEN_UP, Batch, Rows
from rosellm.roseinfer.steps.step import commit_tokens


class Clock:
    """The time at which a step ends on the device; on a CPU, the time of the call."""

    __slots__ = ("_event", "_time")

    def __init__(self, on_gpu: bool) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if on_gpu else None
        self._time = perf_counter()
        if self._event is not None:
            self._event.record()

    def has_ended(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, other: Clock) -> float:
        if self._event is None or other._event is None:
            return self._time - other._time
        return other._event.elapsed_time(self._event) / 1e3


@dataclass(slots=True)
class _Begun:
    """A step in flight: its rows, their rounds in the ring, the end of the previous step, and its own end.

    has_logprobs: whether it has_logprobs log-probabilities.
    """

    kind: Literal["prefill", "decode"]
    batch: Batch
    rounds: np.ndarray
    since: Clock
    clock: Clock
    has_logprobs: bool


class StepsInFlight:
    """Steps in order: begun, then committed once they have ended, then collected."""

    def __init__(self, rows: Rows, logprobs: LogprobRing, group: Group = ALONE) -> None:
        self._rows, self._logprobs, self._check = rows, logprobs, group.check
        self._ring = rows.state.ring.numpy()
        self._on_gpu = rows.state.rows.is_cuda
        self._begun: deque[_Begun] = deque()
        self._ended: deque[Done] = deque()
        self._clock = Clock(self._on_gpu)

    def __bool__(self) -> bool:
        return bool(self._begun)

    def start(self) -> None:
        """Call before a step's work: its time counts from the end of the previous step, or from now if idle.

        The ring has room for the tokens of ``ROUNDS`` steps: the oldest are committed before it is full.
        """
        if not self._begun:
            self._clock = Clock(self._on_gpu)
        elif len(self._begun) >= ROUNDS - 1:
            self.settle(leave=ROUNDS // 2)

    def note(self, kind: Literal["prefill", "decode"], batch: Batch, has_logprobs: bool) -> None:
        """Call after a step's work has been submitted to the device; has_logprobs: log-probabilities."""
        since, self._clock = self._clock, Clock(self._on_gpu)
        self._begun.append(
            _Begun(kind, batch, self._rows.round[batch.indices], since, self._clock, has_logprobs)
        )

    def settle(self, leave: int = 0) -> None:
        """Wait until at most ``leave`` steps are in flight; commit the others, to be collected later."""
        while len(self._begun) > leave:
            self._begun[0].clock.wait()
            self._check()
            self._ended.append(self._commit(self._begun.popleft()))

    def collect(self, leave: int) -> Iterator[Done]:
        """Like :meth:`settle`, and yield all that have ended, in order."""
        while True:
            while self._ended:
                yield self._ended.popleft()
            if not self._begun or (len(self._begun) <= leave and not self._begun[0].clock.has_ended()):
                return
            self.settle(leave=len(self._begun) - 1)

    def _commit(self, begun: _Begun) -> Done:
        """Move tokens from the ring to their sequences; sequences released meanwhile get none."""
        rows, sequences, indices = begun.batch
        tokens = self._ring[begun.rounds, indices].tolist()
        live = [i for i, row in enumerate(rows) if row.index != GIVEN_UP]
        if len(live) < len(rows):
            rows, sequences = [rows[i] for i in live], [sequences[i] for i in live]
            tokens = [tokens[i] for i in live]
        got, failed = commit_tokens(sequences, tokens, n_cached=int(begun.kind == "decode"))
        if begun.has_logprobs:
            self._tell(begun, live, set(got))
        for row in [row for row in rows if row.sequence.finish_reason is not None]:
            self._rows.free(row)
        return Done(begun.kind, got, begun.clock.seconds_since(begun.since), failed)

    def _tell(self, begun: _Begun, live: list[int], got: set[Sequence]) -> None:
        """Log-probabilities of new tokens; live: whose rows have not been released meanwhile."""
        sequences = begun.batch.sequences
        there = [i for i in live if sequences[i] in got and sequences[i].logprobs is not None]
        own = [sequences[i] for i in there]
        tell(own, likely_of(self._logprobs.read(begun.rounds[there], begun.batch.indices[there]), own))
