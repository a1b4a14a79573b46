"""How long the steps of a serving engine take, on the device and on the host, by what they are given."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence as SequenceOf
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from statistics import mean
from typing import Any, Protocol

import numpy as np

from rosellm.bench.arrivals import Arrival
from rosellm.bench.benchmark_streaming import StreamingLoad, run_streaming_benchmark
from rosellm.bench.job import Job
from rosellm.errors import RoseError
from rosellm.lab.records.watched_step import Begun, watched
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig

Coefficients = tuple[float, float, float]


class StepTimes(Protocol):
    """Seconds of an engine's steps, measured or planned: what a simulation asks for."""

    @property
    def run_ahead(self) -> int:
        """Begun steps that the scheduler leaves unfinished."""

    def decode(self, rows: int, cached: int, longest: int) -> float:
        """cached: tokens of all rows together; longest: of one."""

    def host(self, rows: int) -> float:
        """Of a round that gave so many requests a token."""

    def prefill(self, prompts: int, tokens: int, earlier: int = 0) -> float:
        """prompts: of which it computes tokens, whole or in part.

        earlier: the pairs that these tokens make with those of their prompts that are cached already.
        """


LEAST_STEPS = 8  # of a batch that tell its times
HOST_BOUND = 1.1  # a round takes so many times its steps: the device waits for the host


@dataclass(frozen=True)
class ServingTimes:
    """Seconds of a streaming engine's steps; a batch between two of ``rows`` is between their times.

    decode_s: for each of ``rows`` a step's fixed seconds, those for each token that a row has cached on
    average, and those for each that the longest has. host_s: for each what the host adds to a step, or, if
    steps run ahead, what it takes where the device waits for it. prefill_s: a prefill's fixed seconds, those
    for each prompt and for each token. run_ahead: begun steps that the scheduler leaves unfinished.
    """

    rows: tuple[int, ...]
    decode_s: tuple[Coefficients, ...]
    host_s: tuple[float, ...]
    prefill_s: Coefficients
    run_ahead: int = 0

    @classmethod
    def from_dict(cls, figures: dict[str, Any]) -> ServingTimes:
        """From what :meth:`as_dict` gave, or JSON made of it."""
        lists = {name: tuple(figures[name]) for name in ("rows", "host_s", "prefill_s")}
        decode_s = tuple((one[0], one[1], one[2]) for one in figures["decode_s"])
        return cls(**lists, decode_s=decode_s, run_ahead=figures["run_ahead"])

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def decode(self, rows: int, cached: int, longest: int) -> float:
        """cached: tokens of all rows together; longest: of one."""
        columns = zip(*self.decode_s, strict=True)
        fixed, each, of_longest = (np.interp(rows, self.rows, column) for column in columns)
        return max(0.0, float(fixed + each * cached / rows + of_longest * longest))

    def host(self, rows: int) -> float:
        """Of a round that gave so many requests a token."""
        return float(np.interp(rows, self.rows, self.host_s))

    def prefill(self, prompts: int, tokens: int, earlier: int = 0) -> float:
        """prompts: of which it computes tokens, whole or in part; one costs the same wherever it stands."""
        fixed, each_prompt, each_token = self.prefill_s
        return max(0.0, fixed + each_prompt * prompts + each_token * tokens)


def streaming_job(
    engine: Engine, requests: SequenceOf[Arrival], config: SchedulerConfig | None = None, seed: int = 0
) -> Job:
    """Greedy requests of random token ids, of these lengths."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(engine.config.vocab_size, size=one.prompt_tokens).tolist() for one in requests]
    params = [SamplingParams(temperature=0.0, max_tokens=one.new_tokens, ignore_eos=True) for one in requests]
    return Job(engine, prompts, params, config)


def measure_serving_times(
    engine: Engine, requests: SequenceOf[Arrival], batches: SequenceOf[int], rounds: int = 3
) -> ServingTimes:
    """Watch the idle engine stream to such requests, all at once, at each batch size in turn, and fit.

    rounds: how often a place is taken.
    """
    runs = []
    for rows in batches:
        several = [requests[i % len(requests)] for i in range(rounds * rows)]
        job = streaming_job(engine, several, SchedulerConfig(max_batch_size=rows))
        with watched(engine) as steps:
            run_streaming_benchmark(job, StreamingLoad(), warmup_runs=0, repeat_runs=1)
        runs.append(steps)
    return fit_serving_times(engine, runs, batches)


def fit_serving_times(
    engine: Engine, runs: SequenceOf[list[Begun]], batches: SequenceOf[int]
) -> ServingTimes:
    """The times of watched runs; a step counts for the nearest of ``batches``, which some may not have.

    What a step takes the engine's own clock tells: on a GPU the device's. Raises ``RoseError`` if there are
    too few steps of every batch.
    """
    decodes: dict[int, list[Begun]] = defaultdict(list)
    rounds: dict[int, list[tuple[float, float]]] = defaultdict(list)
    prefills = [one for steps in runs for one in steps if one.kind == "prefill"]
    for step, whole in chain.from_iterable(map(_rounds, runs)):
        nearest = min(batches, key=lambda rows: abs(rows - step[0].rows))
        decodes[nearest].append(step[0])
        if len(step) == 1:  # before a prefill the engine may have waited for requests
            rounds[nearest].append((step[0].seconds, whole))
    known = [rows for rows in sorted(rounds) if len(rounds[rows]) >= LEAST_STEPS]
    if not known or not prefills:
        raise RoseError(f"too few steps to tell their times by: {LEAST_STEPS} of a batch are needed")
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
    """Each decode with the prefills after it, and the seconds until the next decode began."""
    at = [i for i, one in enumerate(steps) if one.kind == "decode"]
    for begin, end in pairwise(at):
        yield steps[begin:end], steps[end].began - steps[begin].began


def _host_s(rounds: list[tuple[float, float]], run_ahead: int) -> float:
    """See ``ServingTimes``. rounds: seconds of the steps, and in all."""
    steps, whole = (mean(column) for column in zip(*rounds, strict=True))
    if not run_ahead:
        return max(0.0, whole - steps)
    return whole if whole > HOST_BOUND * steps else 0.0


def _run_ahead(engine: Engine) -> int:
    """0 on a CPU: a step has ended when it has begun."""
    return engine.step.run_ahead if engine.device.type == "cuda" else 0


def fitted(rows: Iterable[tuple[float, ...]]) -> Coefficients:
    """:func:`non_negative` of three columns: as a mean, disturbed steps count."""
    fixed, each, other = non_negative(rows)
    return fixed, each, other


def non_negative(rows: Iterable[tuple[float, ...]]) -> list[float]:
    """Coefficients of the last column over the others, by least squares.

    A column whose coefficient would be negative is left out.
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
