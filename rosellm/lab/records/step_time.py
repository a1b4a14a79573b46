"""Measure the time of a decode step, on every rung, for notebooks and records.

A step lasts from when the host sees the previous step end to when it sees this step end. Steps run without a
profiler, and are launched as far ahead of their results as the rung allows, as by a scheduler. All sequences
have equal contexts. A stretch is ``STRETCH`` consecutive steps, during which the contexts grow from just
below the requested length to just above it. Rungs are measured in alternation, so that background load
affects all of them, and each on several engines, because an engine's memory addresses affect its speed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from rosellm.bench.workloads import Workload
from rosellm.lab.records.bench import Bench, free_memory, make_prompts
from rosellm.lab.records.ledger import drive
from rosellm.lab.records.records import RecordError, Results
from rosellm.lab.records.turns import in_turns
from rosellm.models.model import Transformer

STEP_WORKLOADS = ("W0", "W1", "W2", "W3")
STRETCH = 32  # steps
TURNS = 5  # for each engine

MakeBench = Callable[[], Bench]


@dataclass(frozen=True)
class StepTimes:
    """The measured times of a decode step.

    turns_us: ``turns_us[engine][turn]`` is the mean µs per step of a turn.
    """

    turns_us: tuple[tuple[float, ...], ...]

    @property
    def us(self) -> float:
        """The median of the engines' medians."""
        return median(median(turns) for turns in self.turns_us)

    @property
    def range_us(self) -> tuple[float, float]:
        """The smallest and largest of the engines' medians."""
        medians = [median(turns) for turns in self.turns_us]
        return min(medians), max(medians)

    @property
    def spread_us(self) -> tuple[float, float]:
        """The smallest and largest of the engines' medians, or of the turns if there is a single engine."""
        turns, *others = self.turns_us
        return self.range_us if others else (min(turns), max(turns))


def recorded_steps(results: Results, workload: str) -> dict[str, StepTimes]:
    """Return rung → its recorded step times at a workload's batch size and mid-run context.

    ``speculative`` is left out: its steps give several tokens each, so that they cannot be compared.
    """
    steps = step_times(results.load(f"steps-{workload}")["figures"]["turns_us"])
    return {rung: times for rung, times in steps.items() if rung != "speculative"}


def steps_of(results: Results, workload: str, *rungs: str) -> list[StepTimes]:
    """Return the recorded step times of ``rungs``, in their order.

    Raises RecordError, listing the recorded rungs, if one of them is not recorded.
    """
    steps = recorded_steps(results, workload)
    for rung in rungs:
        if rung not in steps:
            raise RecordError(
                f"{results.folder.name} has no step of {rung!r} at {workload}: there are {', '.join(steps)}"
            )
    return [steps[rung] for rung in rungs]


def step_times(turns_us: Mapping[str, list[list[float]]]) -> dict[str, StepTimes]:
    """Convert the entry ``turns_us`` of a record's figures to name → step times."""
    return {name: StepTimes(tuple(map(tuple, engines))) for name, engines in turns_us.items()}


def figures_of(batch: int, context: int, steps: Mapping[str, StepTimes]) -> dict[str, Any]:
    """Return the figures of a record of step times.

    batch: number of sequences.
    context: mean number of cached tokens per sequence.
    """
    turns = {name: [[round(us, 3) for us in own] for own in one.turns_us] for name, one in steps.items()}
    return {"batch": batch, "context": context, "turns_us": turns}


def step_shape(workload: Workload) -> tuple[int, int]:
    """Return a workload's batch size, and the cached tokens of a sequence halfway through its output.

    A text prompt counts as one token.
    """
    return workload.max_batch_size, (workload.prompt_tokens or 1) - 1 + workload.max_new_tokens // 2


def ladder_steps(model: Transformer, rungs: list[str], workload: Workload, **effort: Any) -> dict[str, Any]:
    """Time the decode step of several rungs in alternation, and return the figures of a record.

    workload: determines batch size and context, as in :func:`step_shape`.
    effort: keyword arguments of :func:`measure_steps`.
    """
    batch, context = step_shape(workload)
    prompts = make_prompts(batch, prompt_length(context), model.config.vocab_size)
    makers = {rung: partial(Bench, model, rung, prompts, room()) for rung in rungs}
    return figures_of(batch, context, measure_steps(makers, **effort))


def prompt_length(context: int) -> int:
    """Return the prompt length for which a stretch has ``context`` cached tokens halfway through."""
    return max(1, context - STRETCH // 2)


def room() -> int:
    """Return how many new tokens per sequence a stretch needs."""
    return STRETCH + 2


def measure_steps(
    makers: Mapping[str, MakeBench], engines: int = 3, seconds: float = 1.0, turns: int = TURNS
) -> dict[str, StepTimes]:
    """Measure decode steps of several benches in alternation, and return name → step times.

    makers: name → function that builds a bench with ``room()`` new tokens per prompt of
        ``prompt_length(context)`` tokens.
    engines: number of benches to build for each name, one after the other.
    seconds: duration of the measured steps for each name, over all engines and turns.
    turns: number of turns of each engine.
    """
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in makers}
    for _ in range(engines):
        benches = {name: make() for name, make in makers.items()}
        for bench in benches.values():
            _stretch(bench)
        sides = {name: partial(turn_us, bench, seconds / engines / turns) for name, bench in benches.items()}
        for name, means in in_turns(sides, turns, warm_up=False).items():
            found[name].append(tuple(means))
        del benches, bench, sides
        free_memory()
    return {name: StepTimes(tuple(one)) for name, one in found.items()}


def turn_us(bench: Bench, seconds: float) -> float:
    """Run stretches of steps for at least ``seconds``, and return their mean µs per step.

    bench: must be able to generate ``room()`` tokens per prompt.
    """
    stretches: list[float] = []
    while not stretches or sum(stretches) < seconds:
        stretches.append(_stretch(bench))
    return sum(stretches) / len(stretches) / STRETCH * 1e6


def _stretch(bench: Bench) -> float:
    """Restart the sequences, run one untimed step, and return the seconds of the next ``STRETCH`` steps."""
    bench.restart()
    ends = drive(bench, STRETCH + 1)
    return ends[-1] - ends[0]
