"""How long the steps of a serving engine take, on the device and on the host, as functions of their size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence as SequenceOf
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from statistics import mean
from typing import Any, Protocol

import numpy as np

from rosellm.bench.arrivals import Arrival
from rosellm.bench.benchmark_streaming import run_streaming
from rosellm.bench.job import Job
from rosellm.errors import RoseError
from rosellm.lab.records.watched_step import Begun, watched
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig

Coefficients = tuple[float, float, float]


class StepTimes(Protocol):
    """Seconds of an engine's steps, measured or planned, as a simulation needs them."""

    @property
    def run_ahead(self) -> int:
        """Steps that the scheduler leaves in flight."""

    def decode(self, rows: int, cached: int, longest: int) -> float:
        """Return the seconds of a decode step; cached: tokens of all rows together; longest: of one row."""

    def host(self, rows: int) -> float:
        """Return the host's seconds of a round that gave ``rows`` requests a token."""

    def prefill(self, prompts: int, tokens: int, earlier: int = 0) -> float:
        """Return the seconds of a prefill of ``tokens`` tokens of ``prompts`` prompts, whole or in part.

        earlier: pairs of these tokens with already cached tokens of their prompts.
        """


LEAST_STEPS = 8  # per batch size, to fit its times
HOST_BOUND = 1.1  # round time over step time from which the device waits for the host


@dataclass(frozen=True)
class ServingTimes:
    """Seconds of a streaming engine's steps, interpolated linearly between the batch sizes in ``rows``.

    decode_s: for each of ``rows`` a step's fixed seconds, seconds per cached token of the average row, and
    per token of the longest. host_s: for each what the host adds to a step; if steps run ahead, the host's
    time where the device waits for it. prefill_s: a prefill's fixed seconds, seconds per prompt and per
    token. run_ahead: steps that the scheduler leaves in flight.
    """

    rows: tuple[int, ...]
    decode_s: tuple[Coefficients, ...]
    host_s: tuple[float, ...]
    prefill_s: Coefficients
    run_ahead: int = 0

    @classmethod
    def from_dict(cls, figures: dict[str, Any]) -> ServingTimes:
        """Load from the result of :meth:`as_dict`, or JSON made from it."""
        lists = {name: tuple(figures[name]) for name in ("rows", "host_s", "prefill_s")}
        decode_s = tuple((one[0], one[1], one[2]) for one in figures["decode_s"])
        return cls(**lists, decode_s=decode_s, run_ahead=figures["run_ahead"])

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def decode(self, rows: int, cached: int, longest: int) -> float:
        """Return the seconds of a decode step; cached: tokens of all rows together; longest: of one row."""
        columns = zip(*self.decode_s, strict=True)
        fixed, each, of_longest = (np.interp(rows, self.rows, column) for column in columns)
        return max(0.0, float(fixed + each * cached / rows + of_longest * longest))

    def host(self, rows: int) -> float:
        """Return the host's seconds of a round that gave ``rows`` requests a token."""
        return float(np.interp(rows, self.rows, self.host_s))

    def prefill(self, prompts: int, tokens: int, earlier: int = 0) -> float:
        """Return the seconds of a prefill of ``tokens`` tokens; ``earlier`` has no effect."""
        fixed, each_prompt, each_token = self.prefill_s
        return max(0.0, fixed + each_prompt * prompts + each_token * tokens)


def measure_serving_times(
    engine: Engine, requests: SequenceOf[Arrival], batches: SequenceOf[int], rounds: int = 3
) -> ServingTimes:
    """Stream greedy requests of these lengths, all at once, at each batch size in turn, and fit.

    The engine must be idle. rounds: requests per slot.
    """
    draw, vocab_size, runs = np.random.default_rng(0), engine.config.vocab_size, []
    for rows in batches:
        several = [requests[i % len(requests)] for i in range(rounds * rows)]
        prompts = [draw.integers(vocab_size, size=one.prompt_tokens).tolist() for one in several]
        params = [
            SamplingParams(temperature=0.0, max_tokens=one.new_tokens, ignore_eos=True) for one in several
        ]
        with watched(engine) as steps:
            run_streaming(Job(engine, prompts, params, SchedulerConfig(max_batch_size=rows)))
        runs.append(steps)
    return fit_serving_times(engine, runs, batches)


def fit_serving_times(
    engine: Engine, runs: SequenceOf[list[Begun]], batches: SequenceOf[int]
) -> ServingTimes:
    """Fit the times of watched runs; a step counts towards the nearest of ``batches``.

    Batch sizes with fewer than ``LEAST_STEPS`` steps are skipped. Steps are timed by the engine's own clock,
    on a GPU the device's. Raises ``RoseError`` if every batch size has too few steps.
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
    """Yield each decode with the prefills after it, and the seconds until the next decode began."""
    at = [i for i, one in enumerate(steps) if one.kind == "decode"]
    for begin, end in pairwise(at):
        yield steps[begin:end], steps[end].began - steps[begin].began


def _host_s(rounds: list[tuple[float, float]], run_ahead: int) -> float:
    """Return ``host_s`` of ``ServingTimes``; rounds: seconds of the steps, and in total."""
    steps, whole = (mean(column) for column in zip(*rounds, strict=True))
    if not run_ahead:
        return max(0.0, whole - steps)
    return whole if whole > HOST_BOUND * steps else 0.0


def _run_ahead(engine: Engine) -> int:
    """Return the engine's steps in flight; 0 on a CPU, where a step ends as soon as it is launched."""
    return engine.step.run_ahead if engine.device.type == "cuda" else 0


def fitted(rows: Iterable[tuple[float, ...]]) -> Coefficients:
    """Fit :func:`non_negative` to three columns by the mean, so that disturbed steps count."""
    fixed, each, other = non_negative(rows)
    return fixed, each, other


def non_negative(rows: Iterable[tuple[float, ...]]) -> list[float]:
    """Return the least-squares coefficients of the last column over the others.

    Columns whose coefficient would be negative are excluded and get 0.
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
