"""Benchmark remedies: a few steps of each candidate, alternating with the diagnosed steps."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import torch

from rosellm.errors import RoseError
from rosellm.lab.diagnose.profile import mean_us
from rosellm.lab.diagnose.steps import EngineSteps, Steps, TransformersSteps
from rosellm.lab.records.records import number
from rosellm.models.model import Transformer
from rosellm.roseinfer.recipe import BEFORE, LADDER, best_rung

TURNS, ATTEMPTS = 4, 3
MOST_SPREAD = 2.0  # longest over shortest turn; beyond it, something else keeps the machine busy
WHEN_BUSY = "end what else runs (`top` or `nvidia-smi` lists it), then run again"
MOST_COPY_BYTES = 2 * 10**9  # largest weights to copy to another dtype
CAST = torch.bfloat16
MOST_RUNGS = 3
# Recipe fields that remove a cause.
CURES_ON_GPU = {
    "launch": ("runner", "indices", "step", "norm"),
    "waits": ("indices", "step"),
    "transfers": ("tables", "step"),
    "copies": ("attention", "append"),
    "bandwidth": ("attention",),
}
CURES_ON_CPU = {
    "Python": ("block_info", "pool", "step"),
    "calls": ("mask", "pool", "step", "norm"),
    "copies": ("attention", "step"),
}

Make = Callable[[], Steps]
Measured = TypeVar("Measured")


@dataclass(frozen=True)
class Trial:
    """Tokens per second of a candidate relative to the diagnosed steps.

    before_us, step_us: µs per step, medians over turns. sign: 1 if every turn is faster, -1 if slower, 0 if
    turns overlap. spread: longest turn over shortest of the unchanged steps. The printed form gives the ratio
    only if the difference is significant.
    """

    name: str
    before_us: float
    step_us: float
    ratio: float
    sign: int
    spread: float = 1.0

    @property
    def is_disturbed(self) -> bool:
        return self.spread > MOST_SPREAD

    def __str__(self) -> str:
        step = f"a step of {number(self.step_us)} µs against {number(self.before_us)}"
        if self.is_disturbed:
            longer = f"{ATTEMPTS} times the same steps took up to {number(self.spread)}× as long"
            return f"{self.name}: not determined; {longer}: {WHEN_BUSY}"
        if not self.sign:
            return f"{self.name}: no difference beyond the noise, {step}"
        return f"{self.name}: {number(self.ratio)}× the tokens a second, {step}"


def try_in_turns(before: Steps, after: Steps) -> Trial:
    """Run both sides ``TURNS`` times in alternation, after a warm-up run of each; repeat if disturbed."""
    for side in (before, after):
        mean_us(side)
    return undisturbed(lambda: _in_turns(before, after), lambda trial: trial.is_disturbed)


def undisturbed(measure: Callable[[], Measured], is_disturbed: Callable[[Measured], object]) -> Measured:
    """Return the first measurement that is not disturbed, or the last of ``ATTEMPTS``."""
    for _ in range(ATTEMPTS - 1):
        if not is_disturbed(found := measure()):
            return found
    return measure()


def _in_turns(before: Steps, after: Steps) -> Trial:
    sides = (before, after)
    turns = [[mean_us(side) for side in sides] for _ in range(TURNS)]
    old, new = (
        [us / side.work.batch for us in column]
        for side, column in zip(sides, zip(*turns, strict=True), strict=True)
    )
    sign = (min(old) > max(new)) - (max(old) < min(new))
    ratio, spread = median(old) / median(new), max(old) / min(old)
    steps_us = median(old) * before.work.batch, median(new) * after.work.batch
    return Trial(after.name, *steps_us, ratio, sign, spread)


def try_all(before: Steps, candidates: Mapping[str, Make]) -> tuple[tuple[Trial, ...], dict[str, str]]:
    """Return the trials, best first, and for each candidate that could not be tried the reason, by name."""
    trials, refused = [], {}
    for name, make in candidates.items():
        try:
            trials.append(try_in_turns(before, make()))
        except torch.OutOfMemoryError:
            refused[name] = "does not fit into the memory left; take a smaller batch or context"
        except RoseError as error:
            refused[name] = str(error)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return tuple(sorted(trials, key=lambda trial: -trial.ratio)), refused


def engine_candidates(steps: EngineSteps, causes: list[str]) -> dict[str, Make]:
    """Return rungs further up that address a cause, the best rung, twice the batch, and 16-bit weights."""
    engine, (batch, context) = steps.engine, _sizes(steps)
    model, recipe = engine.model, engine.rung or engine.recipe
    found: dict[str, Make] = {
        rung: _later(EngineSteps, model, rung, batch, context)
        for rung in rungs_for(engine.rung, causes, engine.device)
    }
    found[f"batch {2 * batch}"] = _named(
        _later(EngineSteps, model, recipe, 2 * batch, context), f"batch {2 * batch}"
    )
    if _can_cast(model):
        name = f"{str(CAST).removeprefix('torch.')} weights"
        found[name] = _named(lambda: EngineSteps(_cast(model), recipe, batch, context), name)
    return found


def rungs_for(rung: str | None, causes: list[str], device: torch.device) -> list[str]:
    """Return the rungs above ``rung`` to try: the first that addresses each cause, then the best one here.

    For a recipe that is not a rung (None), only the best rung.
    """
    best = best_rung(device)
    above = _climb(best)
    if rung is None:
        return [best]
    above = above[above.index(rung if rung in above else BEFORE[rung]) + 1 :]
    cures = CURES_ON_GPU if device.type == "cuda" else CURES_ON_CPU
    helping = [
        next((one for one in above if _changed(one) in cures.get(cause, ())), None) for cause in causes
    ]
    wanted = list(dict.fromkeys(one for one in helping if one))[: MOST_RUNGS - 1]
    return list(dict.fromkeys([*wanted, *above[-1:]]))


def transformers_candidates(
    steps: TransformersSteps, ours: Callable[[], Transformer] | None
) -> dict[str, Make]:
    """Return a static cache, twice the batch, 16-bit weights, and our best rung on the same checkpoint.

    ours: loads the checkpoint into our model; None if it is unknown.
    """
    model, (batch, context) = steps.model, _sizes(steps)
    found: dict[str, Make] = {
        "transformers, static cache": _later(TransformersSteps, model, batch, context, True)
    }
    name = f"batch {2 * batch}"
    found[name] = _named(_later(TransformersSteps, model, 2 * batch, context), name)
    if _can_cast(model):
        cast = f"{str(CAST).removeprefix('torch.')} weights"
        found[cast] = _named(lambda: TransformersSteps(_cast(model), batch, context), cast)
    if ours is not None:
        best = best_rung(steps.work.device)
        found[f"this engine, {best}"] = _named(
            lambda: EngineSteps(ours(), best, batch, context), f"this engine, {best}"
        )
    return found


def _sizes(steps: Steps) -> tuple[int, int]:
    return steps.work.batch, int(steps.work.context or 1)


def _climb(rung: str) -> list[str]:
    """List the rungs from the first to ``rung``."""
    path = [rung]
    while path[0] in BEFORE:
        path.insert(0, BEFORE[path[0]])
    return path


def _changed(rung: str) -> str:
    """Return the recipe field that a rung changes."""
    (field,) = LADDER[BEFORE[rung]].difference(LADDER[rung])
    return field


def _later(make: Callable[..., Steps], *arguments: Any) -> Make:
    return lambda: make(*arguments)


def _named(make: Make, name: str) -> Make:
    def made() -> Steps:
        steps = make()
        steps.name = name
        return steps

    return made


def _can_cast(model: torch.nn.Module) -> bool:
    first = next(model.parameters())
    size = sum(p.numel() for p in model.parameters()) * CAST.itemsize
    return first.dtype.itemsize > CAST.itemsize and size <= MOST_COPY_BYTES


def _cast(model: Any) -> Any:
    return deepcopy(model).to(CAST)
