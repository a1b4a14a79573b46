"""Decode steps with equal and unequal contexts of the same sum, with rows whole and split."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rosellm.errors import OptionError, RecipeError
from rosellm.lab.records.bench import Bench, make_prompts
from rosellm.lab.records.step_time import StepTimes, measure_steps, prompt_length, room
from rosellm.models.model import Transformer
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.kernels.attention_plan import Variant, cut_rows, whole_rows
from rosellm.roseinfer.kernels.table import TORCH, Kernels, choose_kernels
from rosellm.roseinfer.layers.attention import AppendAndAttend
from rosellm.roseinfer.steps.resident import ResidentStep

RUNG = "split_kv"
BATCHES = (8, 64, 128, 256)
MEAN, TIMES = 240, 4  # cached tokens per row; length of the long row as a multiple
EQUAL, SPREAD, ONE_LONG = "equal", "spread", "one long"
WAYS: dict[str, Callable[..., Variant]] = {"whole": whole_rows, "cut": cut_rows}


def contexts_of(batch: int, mean: int = MEAN) -> dict[str, list[int]]:
    """Return the cached tokens of each row for each distribution of ``batch * mean`` tokens.

    "spread": evenly from an eighth of ``mean`` up; "one long": one row has ``TIMES`` the mean, or, with fewer
    than ``TIMES + 1`` rows, as much as leaves a share for the others. Rows are in a seeded random order.
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
    """Return the positions that the longest row needs."""
    return mean * TIMES + room()


def attention_kernels(device: torch.device) -> Kernels:
    """Return kernels with Triton attention: the engine's own on a GPU, Triton's interpreter on a CPU.

    On a CPU all other kernels are torch's. Raises ``RecipeError`` where Triton cannot run.
    """
    if device.type == "cuda":
        return choose_kernels("triton", "dependent", device)
    triton = choose_kernels("triton", "fixed", device)
    own = {"append_and_attend": triton.append_and_attend, "plan_attention": triton.plan_attention}
    return replace(TORCH, name="torch, attention by Triton", **own)


def launched(choose: Callable[..., Variant]) -> Callable[[Engine], None]:
    """Return a ``prepare`` for :class:`Bench` that makes ``choose`` select the attention variant.

    ``choose`` is called like ``variant_for``. Raises ``RecipeError`` if attention has no variants.
    """

    def prepare(engine: Engine) -> None:
        step = engine.step
        if not (isinstance(step, ResidentStep) and isinstance(step.worker.bind, AppendAndAttend)):
            raise RecipeError(f"attention of kernels {engine.kernels.name!r} is not launched in variants")
        step.worker.bind.choose = choose

    return prepare


def length_steps(model: Transformer, batch: int, mean: int = MEAN, **effort: Any) -> dict[str, StepTimes]:
    """Time steps of ``contexts_of`` with rows whole and split, alternating: "equal, whole", "equal, cut", …

    effort: see ``measure_steps``.
    """
    makers = {
        f"{name}, {way}": partial(_bench, model, lengths, choose)
        for name, lengths in contexts_of(batch, mean).items()
        for way, choose in WAYS.items()
    }
    return measure_steps(makers, **effort)


def _bench(model: Transformer, lengths: list[int], choose: Callable[..., Variant]) -> Bench:
    """Build a bench; ``lengths`` are those halfway through a stretch of steps."""
    prompts = make_prompts(len(lengths), [prompt_length(n) for n in lengths], model.config.vocab_size)
    kernels, prepare = attention_kernels(model.device), launched(choose)
    return Bench(model, RUNG, prompts, room(), kernels=kernels, prepare=prepare)
