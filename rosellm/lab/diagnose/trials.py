"""Benchmark remedies: run a few steps of each candidate, in alternation with the diagnosed steps."""

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
MOST_SPREAD = 2.0  # ratio of longest to shortest turn above which other programs disturb the trial
WHEN_BUSY = "end what else runs (`top` or `nvidia-smi` lists it), then run again"
MOST_COPY_BYTES = 2 * 10**9  # maximum size of weights that are copied to another dtype
MOST_RUNGS = 3

Make = Callable[[], Steps]


@dataclass(frozen=True)
class Trial:
    """The result of comparing a candidate with the diagnosed steps.

    before_us: µs per diagnosed step, the median over turns.
    step_us: µs per step of the candidate, the median over turns.
    ratio: tokens per second of the candidate divided by those of the diagnosed steps.
    sign: 1 if every turn of the candidate has more tokens per second than every turn of the diagnosed steps,
        -1 if every turn has fewer, 0 if the turns overlap.
    spread: longest turn of the diagnosed steps divided by their shortest.

    ``str`` states the ratio only if ``sign`` is not 0 and the machine was not disturbed.
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
    """Compare two sides, each run once to warm up, then ``TURNS`` times in alternation.

    If other programs disturb the turns, they are repeated, up to ``ATTEMPTS`` times in total.
    """
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
    """Try all candidates; return the trials, best first, and why the remaining candidates could not run.

    candidates: functions that make the steps to try, by name; the reasons are by name, too.
    """
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
    """Return functions that make the steps to try, by name.

    found: the findings for ``steps``.
    ours: loads the checkpoint of a transformers model into our model; None if there is no checkpoint.

    For an engine, these are the rungs that can remove the causes found; for transformers, a static cache and
    our best rung on the same checkpoint; for both, twice the batch and bfloat16 weights; for other steps,
    nothing.
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
    """Return the rungs to try: for each cause the first rung above ``rung`` that helps, then the best rung.

    At most ``MOST_RUNGS`` are returned, in the order of ``cures``.

    rung: None for a recipe that is not a rung, for which only the best rung is returned.
    cures: for each cause, the recipe fields that can remove it.
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
