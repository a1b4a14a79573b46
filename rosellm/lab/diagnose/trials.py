"""Benchmark remedies: a few steps of each candidate, alternating with the diagnosed steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch

from rosellm.errors import RoseError
from rosellm.lab.diagnose.profile import mean_us
from rosellm.lab.diagnose.rules import Finding
from rosellm.lab.diagnose.steps import EngineSteps, Steps, TransformersSteps
from rosellm.lab.records.records import number
from rosellm.lab.records.step_time import free_memory
from rosellm.models.model import Transformer
from rosellm.roseinfer.recipe import BEFORE, LADDER, best_rung

TURNS, ATTEMPTS = 3, 3
MOST_SPREAD = 2.0  # longest over shortest turn; beyond it, something else keeps the machine busy
WHEN_BUSY = "end what else runs (`top` or `nvidia-smi` lists it), then run again"
MOST_COPY_BYTES = 2 * 10**9  # largest weights to copy to another dtype
MOST_RUNGS = 3

Make = Callable[[], Steps]


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
    for _ in range(ATTEMPTS):
        old, new = zip(*[(mean_us(before), mean_us(after)) for _ in range(TURNS)], strict=True)
        spread = max(old) / min(old)
        if spread <= MOST_SPREAD:
            break
    times_as_many = after.work.batch / before.work.batch
    ratios = [times_as_many * one / other for one in old for other in new]
    sign = (min(ratios) > 1) - (max(ratios) < 1)
    ratio = times_as_many * median(old) / median(new)
    return Trial(after.name, median(old), median(new), ratio, sign, spread)


def try_all(before: Steps, candidates: Mapping[str, Make]) -> tuple[tuple[Trial, ...], dict[str, str]]:
    """Return the trials, best first, and for each candidate that could not be tried the reason, by name."""
    trials, refused = [], {}
    for name, make in candidates.items():
        try:
            trials.append(replace(try_in_turns(before, make()), name=name))
        except torch.OutOfMemoryError:
            refused[name] = "does not fit into the memory left; take a smaller batch or context"
        except RoseError as error:
            refused[name] = str(error)
        free_memory()
    return tuple(sorted(trials, key=lambda trial: -trial.ratio)), refused


def candidates_for(
    steps: Steps, found: Iterable[Finding], ours: Callable[[], Transformer] | None
) -> dict[str, Make]:
    """Return what to try for an engine's or transformers' steps, by name; nothing for other steps.

    An engine tries the rungs that cure what was found, transformers a static cache and our best rung on the
    same checkpoint, which ``ours`` loads into our model (None if it is unknown); both try twice the batch and
    16-bit weights.
    """
    if not isinstance(steps, (EngineSteps, TransformersSteps)):
        return {}
    model, batch, context = steps.model, steps.work.batch, steps.context
    made: dict[str, Make] = {}
    again: Callable[..., Steps]
    if isinstance(steps, EngineSteps):
        again = partial(EngineSteps, recipe=steps.recipe, context=context)
        for rung in rungs_for(steps.rung, [one.cures for one in found], model.device):
            made[rung] = partial(EngineSteps, model, rung, batch, context)
    else:
        again = partial(TransformersSteps, context=context)
        made["transformers, static cache"] = partial(again, model, batch=batch, static=True)
    made[f"batch {2 * batch}"] = partial(again, model, batch=2 * batch)
    dtype, n = torch.bfloat16, sum(p.numel() for p in model.parameters())
    if steps.work.dtype.itemsize > dtype.itemsize and n * dtype.itemsize <= MOST_COPY_BYTES:
        made["bfloat16 weights"] = lambda: again(deepcopy(model).to(dtype), batch=batch)
    if ours is not None and isinstance(steps, TransformersSteps):
        best = best_rung(steps.work.device)
        made[f"this engine, {best}"] = lambda: EngineSteps(ours(), best, batch, context)
    return made


def rungs_for(rung: str | None, cures: Iterable[tuple[str, ...]], device: torch.device) -> list[str]:
    """Return the rungs above ``rung`` to try: the first that helps with each of ``cures``, then the best.

    cures: recipe fields that remove a cause. For a recipe that is not a rung (None), only the best rung.
    """
    above = [best_rung(device)]
    if rung is None:
        return above
    while above[0] in BEFORE:
        above.insert(0, BEFORE[above[0]])
    above = above[above.index(rung if rung in above else BEFORE[rung]) + 1 :]
    changed = {one: next(iter(LADDER[BEFORE[one]].difference(LADDER[one]))) for one in above}
    helping = [next((one for one in above if changed[one] in fields), None) for fields in cures]
    wanted = list(dict.fromkeys(one for one in helping if one))[: MOST_RUNGS - 1]
    return list(dict.fromkeys([*wanted, *above[-1:]]))
