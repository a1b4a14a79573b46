"""The definition of a decode step's time, for notebooks and records, on every rung.

A step lasts from when the host sees the previous step end to when it sees this one end. Steps run unprofiled
and as in a scheduler, as far ahead of the host as the rung allows. Sequences have equal contexts; a stretch
of ``STRETCH`` steps takes them from just below the requested context to just above. Sides are compared in
alternation, so that background load affects all alike, and on several engines each, because an engine's place
in memory affects its step.
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
    """µs per decode step of one side: the mean of each turn of each engine, in the order measured."""

    turns_us: tuple[tuple[float, ...], ...]  # [engines][turns]

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
        """The smallest and largest repetition: engines' medians, or the turns of a single engine."""
        turns, *others = self.turns_us
        return self.range_us if others else (min(turns), max(turns))


def recorded_steps(results: Results, workload: str) -> dict[str, StepTimes]:
    """Return rung → its recorded step at a workload's batch size and mid-run context."""
    return step_times(results.load(f"steps-{workload}")["figures"]["turns_us"])


def steps_of(results: Results, workload: str, *rungs: str) -> list[StepTimes]:
    """Return the recorded steps of some rungs. Raises RecordError, listing the recorded rungs."""
    steps = recorded_steps(results, workload)
    for rung in rungs:
        if rung not in steps:
            raise RecordError(
                f"{results.folder.name} has no step of {rung!r} at {workload}: there are {', '.join(steps)}"
            )
    return [steps[rung] for rung in rungs]


def step_times(turns_us: Mapping[str, list[list[float]]]) -> dict[str, StepTimes]:
    """Convert a record's figures to name → step times."""
    return {name: StepTimes(tuple(map(tuple, engines))) for name, engines in turns_us.items()}


def figures_of(batch: int, context: int, steps: Mapping[str, StepTimes]) -> dict[str, Any]:
    """Return step times for a record; context: mean cached tokens per row."""
    turns = {name: [[round(us, 3) for us in own] for own in one.turns_us] for name, one in steps.items()}
    return {"batch": batch, "context": context, "turns_us": turns}


def step_shape(workload: Workload) -> tuple[int, int]:
    """Return a workload's batch size, and its cached tokens per sequence at mid-run.

    A text prompt counts as one token.
    """
    return workload.max_batch_size, (workload.prompt_tokens or 1) - 1 + workload.max_new_tokens // 2


def ladder_steps(model: Transformer, rungs: list[str], workload: Workload, **effort: Any) -> dict[str, Any]:
    """Time every rung's step at a workload's batch size and mid-run context, in alternation."""
    batch, context = step_shape(workload)
    prompts = make_prompts(batch, prompt_length(context), model.config.vocab_size)
    makers = {rung: partial(Bench, model, rung, prompts, room()) for rung in rungs}
    return figures_of(batch, context, measure_steps(makers, **effort))


def prompt_length(context: int) -> int:
    """Return the prompt length for which a stretch has ``context`` cached tokens halfway through."""
    return max(1, context - STRETCH // 2)


def room() -> int:
    """Return the new tokens per sequence that a stretch needs."""
    return STRETCH + 2


def measure_steps(
    makers: Mapping[str, MakeBench], engines: int = 3, seconds: float = 1.0, turns: int = TURNS
) -> dict[str, StepTimes]:
    """Return step times by name, from ``seconds`` of steps per name, over all engines and ``turns`` each.

    makers: each builds a bench with ``room()`` new tokens per prompt of ``prompt_length(context)``.
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
    """Return the mean µs per step of stretches that take ``seconds`` together; at least one stretch runs.

    The bench has ``room()`` new tokens per prompt.
    """
    stretches: list[float] = []
    while not stretches or sum(stretches) < seconds:
        stretches.append(_stretch(bench))
    return sum(stretches) / len(stretches) / STRETCH * 1e6


def _stretch(bench: Bench) -> float:
    """Restart the sequences, and return the seconds of ``STRETCH`` steps."""
    bench.restart()
    ends = drive(bench, STRETCH + 1)
    return ends[-1] - ends[0]
