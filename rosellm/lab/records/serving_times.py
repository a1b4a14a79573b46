"""Fit the durations of a serving engine's steps, on device and host, as functions of their size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence as SequenceOf
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import mean
from typing import Protocol

import numpy as np

from rosellm.errors import RoseError
from rosellm.lab.records.watched_step import Begun
from rosellm.roseinfer.engine import Engine

Coefficients = tuple[float, float, float]


class StepTimes(Protocol):
    """The durations of an engine's steps, measured or predicted, that a simulation of serving needs."""

    @property
    def run_ahead(self) -> int:
        """Number of begun steps that the scheduler leaves unfinished."""

    def decode(self, rows: int, cached: int, longest: int) -> float:
        """Return the seconds of a decode step.

        rows: number of sequences.
        cached: cached tokens of all sequences together.
        longest: cached tokens of the longest sequence.
        """

    def host(self, rows: int) -> float:
        """Return the host's seconds in an iteration of the scheduler that gives ``rows`` requests a token."""

    def prefill(self, prompts: int, tokens: int, earlier: int = 0) -> float:
        """Return the seconds of a prefill.

        prompts: number of prompts, whole or in part.
        tokens: tokens of all prompts that are computed.
        earlier: number of pairs of a computed token and an already cached token of the same prompt.
        """


LEAST_STEPS = 8  # per batch size, to fit its times
HOST_BOUND = 1.1  # iteration time / step time above which the device waits for the host


@dataclass(frozen=True)
class ServingTimes:
    """Fitted durations of a streaming engine's steps, interpolated linearly between batch sizes.

    rows: the batch sizes with fitted durations, ascending.
    decode_s: for each of ``rows``, three coefficients of a decode step: fixed seconds, seconds per cached
        token of the mean sequence, and seconds per cached token of the longest sequence.
    host_s: for each of ``rows``, the seconds that the host adds to a step. If steps run ahead: the host's
        whole time per step if the device waits for the host, otherwise 0.
    prefill_s: three coefficients of a prefill: fixed seconds, seconds per prompt, and seconds per token.
    run_ahead: number of begun steps that the scheduler leaves unfinished.
    """

    rows: tuple[int, ...]
    decode_s: tuple[Coefficients, ...]
    host_s: tuple[float, ...]
    prefill_s: Coefficients
    run_ahead: int = 0

    def decode(self, rows: int, cached: int, longest: int) -> float:
        """Return the seconds of a decode step, with the arguments of :meth:`StepTimes.decode`."""
        columns = zip(*self.decode_s, strict=True)
        fixed, each, of_longest = (np.interp(rows, self.rows, column) for column in columns)
        return max(0.0, float(fixed + each * cached / rows + of_longest * longest))

    def host(self, rows: int) -> float:
        """Return ``host_s``, interpolated for a batch of ``rows`` sequences."""
        return float(np.interp(rows, self.rows, self.host_s))

    def prefill(self, prompts: int, tokens: int, earlier: int = 0) -> float:
        """Return the seconds of a prefill, with the arguments of :meth:`StepTimes.prefill`.

        ``earlier`` has no effect.
        """
        fixed, each_prompt, each_token = self.prefill_s
        return max(0.0, fixed + each_prompt * prompts + each_token * tokens)


def fit_serving_times(
    engine: Engine, runs: SequenceOf[list[Begun]], batches: SequenceOf[int]
) -> ServingTimes:
    """Fit the durations of recorded steps.

    runs: the steps of each run, recorded by :func:`watched`.
    batches: batch sizes to fit; a step counts towards the nearest.

    Batch sizes with fewer than ``LEAST_STEPS`` steps are skipped. Raises ``RoseError`` if all of them are, or
    if there is no prefill.
    """
    decodes: dict[int, list[Begun]] = defaultdict(list)
    rounds: dict[int, list[tuple[float, float]]] = defaultdict(list)
    prefills = [one for steps in runs for one in steps if one.kind == "prefill"]
    for step, whole in chain.from_iterable(map(_rounds, runs)):
        nearest = min(batches, key=lambda rows: abs(rows - step[0].rows))
        decodes[nearest].append(step[0])
        if len(step) == 1:  # with a prefill, the engine may have waited for requests before it
            rounds[nearest].append((step[0].seconds, whole))
    known = [rows for rows in sorted(rounds) if len(rounds[rows]) >= LEAST_STEPS]
    if not known or not prefills:
        raise RoseError(f"too few steps to fit their times: {LEAST_STEPS} per batch size are needed")
    return ServingTimes(
        tuple(known),
        tuple(
            fitted([(1.0, one.cached / one.rows, one.longest, one.seconds) for one in decodes[rows]])
            for rows in known
        ),
        tuple(_host_s(rounds[rows], _run_ahead(engine)) for rows in known),
        fitted([(1.0, one.rows, one.tokens, one.seconds) for one in prefills]),
        _run_ahead(engine),
    )


def _rounds(steps: list[Begun]) -> Iterator[tuple[list[Begun], float]]:
    """Yield each decode step with the prefills after it, and the seconds until the next decode step began."""
    at = [i for i, one in enumerate(steps) if one.kind == "decode"]
    for begin, end in pairwise(at):
        yield steps[begin:end], steps[end].began - steps[begin].began


def _host_s(rounds: list[tuple[float, float]], run_ahead: int) -> float:
    """Return ``host_s`` of :class:`ServingTimes` for one batch size.

    rounds: for each decode step, its seconds on the device, and the seconds until the next one began.
    """
    steps, whole = (mean(column) for column in zip(*rounds, strict=True))
    if not run_ahead:
        return max(0.0, whole - steps)
    return whole if whole > HOST_BOUND * steps else 0.0


def _run_ahead(engine: Engine) -> int:
    """Return how many steps a scheduler leaves unfinished; 0 on a CPU, where launching a step runs it."""
    return engine.step.run_ahead if engine.device.type == "cuda" else 0


def fitted(rows: Iterable[tuple[float, ...]]) -> Coefficients:
    """Return :func:`non_negative` for rows of four columns as a tuple of three coefficients."""
    fixed, each, other = non_negative(rows)
    return fixed, each, other


def non_negative(rows: Iterable[tuple[float, ...]]) -> list[float]:
    """Return the coefficients with which the other columns predict the last one, by least squares.

    While a coefficient is negative, the most negative column is excluded and has the coefficient 0; the last
    remaining column is kept.
    """
    table = np.array(list(rows))
    kept = list(range(table.shape[1] - 1))
    while True:
        found = np.linalg.lstsq(table[:, kept], table[:, -1], rcond=None)[0]
        if found.min() >= 0 or len(kept) == 1:
            break
        del kept[found.argmin()]
    made = np.zeros(table.shape[1] - 1)
    made[kept] = found
    return made.tolist()
