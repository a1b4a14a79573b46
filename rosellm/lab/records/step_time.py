"""The time of a decode step, defined once: for notebooks and records, on every rung.

A step lasts from the moment the host sees the step before it end to the moment it sees this one end. Steps
run un-profiled and as a scheduler runs them, as far ahead of the host as the rung goes. Sequences have equal
contexts, and a stretch of ``STRETCH`` steps takes them from just before the context asked for to just after.
What is compared is measured in turns, on several engines each: an engine's place in memory moves its step,
and background load affects all sides alike.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch

from rosellm.lab.records.bench import Bench
from rosellm.lab.records.ledger import drive
from rosellm.lab.records.records import RecordError, Results

STRETCH = 32  # steps
TURNS = 5  # for each engine

MakeBench = Callable[[], Bench]


@dataclass(frozen=True)
class StepTimes:
    """µs a decode step of one side: the mean of each turn of each engine, in the order measured."""

    turns_us: tuple[tuple[float, ...], ...]  # [engines][turns]

    @property
    def us(self) -> float:
        """The median of the engines' medians."""
        return median(median(turns) for turns in self.turns_us)

    @property
    def range_us(self) -> tuple[float, float]:
        """The least and the largest of the engines' medians."""
        medians = [median(turns) for turns in self.turns_us]
        return min(medians), max(medians)

    @property
    def spread_us(self) -> tuple[float, float]:
        """The least and the largest of what was repeated: engines' medians, or the turns of the only one."""
        turns, *others = self.turns_us
        return self.range_us if others else (min(turns), max(turns))


def recorded_steps(results: Results, workload: str) -> dict[str, StepTimes]:
    """Rung → its recorded step at a workload's batch size and mid-run context."""
    return step_times(results.load(f"steps-{workload}")["figures"]["turns_us"])


def steps_of(results: Results, workload: str, *rungs: str) -> list[StepTimes]:
    """The recorded steps of some rungs. Raises RecordError, listing the rungs there are."""
    steps = recorded_steps(results, workload)
    for rung in rungs:
        if rung not in steps:
            raise RecordError(
                f"{results.folder.name} has no step of {rung!r} at {workload}: there are {', '.join(steps)}"
            )
    return [steps[rung] for rung in rungs]


def step_times(turns_us: Mapping[str, list[list[float]]]) -> dict[str, StepTimes]:
    """Name → its step times, as a record keeps them."""
    return {name: StepTimes(tuple(map(tuple, engines))) for name, engines in turns_us.items()}


def prompt_length(context: int) -> int:
    """Tokens of a prompt, so that a stretch has ``context`` tokens cached in its middle."""
    return max(1, context - STRETCH // 2)


def room() -> int:
    """New tokens that a sequence of a stretch needs."""
    return STRETCH + 2


def measure_steps(
    makers: Mapping[str, MakeBench], engines: int = 3, seconds: float = 1.0, turns: int = TURNS
) -> dict[str, StepTimes]:
    """Step times by name; ``seconds`` of measured steps a name, over all its engines, in ``turns`` each.

    makers: each makes a bench with ``room()`` new tokens a prompt of ``prompt_length(context)``.
    """
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in makers}
    for _ in range(engines):
        benches = {name: make() for name, make in makers.items()}
        for bench in benches.values():
            _stretch(bench)
        own: dict[str, list[float]] = {name: [] for name in makers}
        for _ in range(turns):
            for name, bench in benches.items():
                own[name].append(turn_us(bench, seconds / engines / turns))
        for name, means in own.items():
            found[name].append(tuple(means))
        del benches, bench
        free_memory()
    return {name: StepTimes(tuple(one)) for name, one in found.items()}


def turn_us(bench: Bench, seconds: float) -> float:
    """Mean µs a step of stretches that take ``seconds`` together, or of one if that takes longer.

    The bench has ``room()`` new tokens a prompt.
    """
    stretches: list[float] = []
    while not stretches or sum(stretches) < seconds:
        stretches.append(_stretch(bench))
    return sum(stretches) / len(stretches) / STRETCH * 1e6


def _stretch(bench: Bench) -> float:
    """Seconds of ``STRETCH`` steps of sequences that begin anew."""
    bench.restart()
    ends = drive(bench, STRETCH + 1)
    return ends[-1] - ends[0]


def free_memory() -> None:
    """Of engines that nothing refers to any more, so that the next ones find it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
