"""Time decode steps with equal and unequal contexts of the same sum, with attention whole and split.

Attention over the cached tokens of a sequence is "whole" if one program per head computes it, and "cut" if
several programs share it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rosellm.errors import OptionError, RecipeError
from rosellm.lab.records.bench import Bench, make_prompts
from rosellm.lab.records.experiment import Asked, table
from rosellm.lab.records.records import Results
from rosellm.lab.records.step_time import (
    StepTimes,
    figures_of,
    measure_steps,
    prompt_length,
    room,
    step_times,
)
from rosellm.models.model import Transformer
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.kernels.attention_plan import Variant, cut_rows, whole_rows
from rosellm.roseinfer.kernels.table import TORCH, Kernels, choose_kernels
from rosellm.roseinfer.layers.attention import AppendAndAttend
from rosellm.roseinfer.steps.resident import ResidentStep

RUNG = "split_kv"
BATCHES = (8, 64, 128, 256)
MEAN, TIMES = 240, 4  # cached tokens per sequence; those of the long sequence, as a multiple of the mean
EQUAL, SPREAD, ONE_LONG = "equal", "spread", "one long"
WAYS: dict[str, Callable[..., Variant]] = {"whole": whole_rows, "cut": cut_rows}


def contexts_of(batch: int, mean: int = MEAN) -> dict[str, list[int]]:
    """Return distribution → cached tokens of each sequence, in a seeded random order; all sum to the same.

    equal: all have ``mean`` tokens.
    spread: evenly spaced around ``mean``, starting at an eighth of it.
    one long: one has ``TIMES * mean`` tokens, or ``(batch - 1) * mean`` if that is less, so that tokens are
        left for the others.

    Raises ``OptionError`` for a mean below ``TIMES``.
    """
    if mean < TIMES:
        raise OptionError(f"mean is {mean}; give {TIMES} or more")
    half, least = batch // 2, max(1, mean // 8)
    low = [least + (mean - least) * i // half for i in range(half)]
    spread = [*low, *(2 * mean - n for n in low), *[mean] * (batch % 2)]
    long = mean * max(1, min(TIMES, batch - 1))
    each, more = divmod(batch * mean - long, max(1, batch - 1))
    others = [each + (i < more) for i in range(batch - 1)]
    shares = {EQUAL: [mean] * batch, SPREAD: spread, ONE_LONG: [long, *others]}
    return {name: random.Random(0).sample(lengths, batch) for name, lengths in shares.items()}


def positions_for(mean: int) -> int:
    """Return how many positions the model needs for the longest sequence of :func:`contexts_of`."""
    return mean * TIMES + room()


def attention_kernels(device: torch.device) -> Kernels:
    """Return a kernel table whose attention is Triton's, also on a CPU.

    On a CPU, attention runs in Triton's interpreter, and all other kernels are torch's. Raises
    ``RecipeError`` where Triton cannot run.
    """
    if device.type == "cuda":
        return choose_kernels("triton", "dependent", device)
    triton = choose_kernels("triton", "fixed", device)
    own = {"append_and_attend": triton.append_and_attend, "plan_attention": triton.plan_attention}
    return replace(TORCH, name="torch, attention by Triton", **own)


def launched(choose: Callable[..., Variant]) -> Callable[[Engine], None]:
    """Return an argument ``prepare`` for :class:`Bench` that replaces the choice of the attention variant.

    choose: takes the arguments of ``variant_for`` and returns the variant.

    The returned function raises ``RecipeError`` if the engine's attention has no variants.
    """

    def prepare(engine: Engine) -> None:
        step = engine.step
        if not (isinstance(step, ResidentStep) and isinstance(step.worker.bind, AppendAndAttend)):
            raise RecipeError(f"attention of kernels {engine.kernels.name!r} is not launched in variants")
        step.worker.bind.choose = choose

    return prepare


def length_steps(model: Transformer, batch: int, mean: int = MEAN, **effort: Any) -> dict[str, StepTimes]:
    """Time steps for each distribution of :func:`contexts_of`, with attention whole and cut, in alternation.

    effort: keyword arguments of ``measure_steps``.

    Returns "equal, whole", "equal, cut", … → step times.
    """
    makers = {
        f"{name}, {way}": partial(_bench, model, lengths, choose)
        for name, lengths in contexts_of(batch, mean).items()
        for way, choose in WAYS.items()
    }
    return measure_steps(makers, **effort)


def _bench(model: Transformer, lengths: list[int], choose: Callable[..., Variant]) -> Bench:
    """Build a bench whose contexts are ``lengths`` halfway through the measured steps."""
    prompts = make_prompts(len(lengths), [prompt_length(n) for n in lengths], model.config.vocab_size)
    kernels, prepare = attention_kernels(model.device), launched(choose)
    return Bench(model, RUNG, prompts, room(), kernels=kernels, prepare=prepare)


def mean_within(n_positions: int) -> int:
    """Return ``MEAN``, or the largest mean that ``n_positions`` allow. Raises ``OptionError`` if too few."""
    fits = (n_positions - room()) // TIMES
    if fits < TIMES:
        needed = positions_for(TIMES)
        raise OptionError(f"rows of unequal lengths need {needed} positions; there are {n_positions}")
    return min(MEAN, fits)


def recorded_lengths(results: Results) -> dict[int, dict[str, StepTimes]]:
    """Return batch → recorded ``length_steps``, for the recorded batches."""
    there = [batch for batch in BATCHES if f"lengths-{batch}" in results.names()]
    return {n: step_times(results.load(f"lengths-{n}")["figures"]["turns_us"]) for n in there}


def faster_way(steps: Mapping[str, StepTimes], share: str) -> str:
    """Return which way has the faster step for a distribution: "whole", "cut", or "either".

    "either" if the engines' ranges overlap, or differ by at most twice the larger spread.
    """
    whole, cut = (steps[f"{share}, {way}"] for way in WAYS)
    (least, most), (least_cut, most_cut) = whole.range_us, cut.range_us
    spread = max(most - least, most_cut - least_cut)
    if abs(whole.us - cut.us) <= 2 * spread or (least <= most_cut and least_cut <= most):
        return "either"
    return "whole" if whole.us < cut.us else "cut"


def lengths(asked: Asked, batch: int) -> dict:
    """Time decode steps with equal and unequal contexts of the same sum, attention whole and cut."""
    size, model = asked.size, asked.gpt
    rows, mean = min(batch, size.rows), min(MEAN, size.prompt // TIMES)
    return figures_of(rows, mean, length_steps(model, rows, mean, **size.effort))


EXPERIMENTS = [table(f"lengths-{batch}", partial(lengths, batch=batch), needs_gpu=True) for batch in BATCHES]
