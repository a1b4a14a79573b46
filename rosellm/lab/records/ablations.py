"""Split a rung's gain where its one field changes several things, and value each field of the best rung.

Each ablation is a few variants between a rung and the previous one, measured in alternation by
``step_time.measure_steps``. Variants that are not rungs are built here from the engine's own parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rosellm.errors import RecipeError
from rosellm.lab.records.bench import Bench, make_prompts
from rosellm.lab.records.step_time import MakeBench, prompt_length, room
from rosellm.ladder.dense import Dense
from rosellm.ladder.rungs import fill_tables
from rosellm.models.model import Transformer
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.kernels.attention_plan import Plan, Variant
from rosellm.roseinfer.kernels.dependent_launch import AT_END
from rosellm.roseinfer.kernels.table import Kernels, triton_kernels
from rosellm.roseinfer.layers.attention import AppendAndAttend
from rosellm.roseinfer.layers.choosers import LogitsChooser
from rosellm.roseinfer.recipe import BEFORE, BEST_RUNG, LADDER, RECIPES, Recipe, recipe_choices
from rosellm.roseinfer.rung import Rung
from rosellm.roseinfer.steps.resident import ResidentStep

Variants = dict[str, MakeBench]


def variants(rung: str, model: Transformer, batch: int, context: int) -> Variants:
    """Return the previous rung, the variants between, and ``rung``, by name.

    context: cached tokens per sequence.
    """
    bench = _bench(model, batch, context)
    between = BETWEEN[rung](model, bench, batch, context)
    return {BEFORE[rung]: partial(bench, BEFORE[rung]), **between, rung: partial(bench, rung)}


def one_step_back(best: str = BEST_RUNG) -> dict[str, Recipe | str]:
    """Map each field of a recipe to ``best`` with only that field as before its last change.

    If other fields depend on the change, the value is the reason instead of a recipe.
    """
    back: dict[str, Recipe | str] = {}
    for field, value in _replaced(best).items():
        try:
            back[field] = replace(RECIPES[best], **{field: value})
        except RecipeError as error:
            back[field] = str(error)
    return back


def _replaced(best: str) -> dict[str, Any]:
    """Map each field to the value that its latest change up to ``best`` replaced."""
    values: dict[str, Any] = {}
    rung = best
    while rung in BEFORE:
        for field, (old, _) in LADDER[BEFORE[rung]].difference(LADDER[rung]).items():
            if field in recipe_choices():
                values.setdefault(field, old)
        rung = BEFORE[rung]
    return values


def _bench(model: Transformer, batch: int, context: int) -> Callable[..., Bench]:
    prompts = make_prompts(batch, prompt_length(context), model.config.vocab_size)

    def bench(recipe: str | Rung, **options: Any) -> Bench:
        return Bench(model, recipe, prompts, room(), **options)

    return bench


class PageableTables:
    """All pools' tables in one pageable buffer, built from lists or in an array, sent in one copy."""

    def __init__(self, device: torch.device, max_blocks: int, from_lists: bool) -> None:
        self.device, self.max_blocks, self.from_lists = device, max_blocks, from_lists

    def stage(self, block_ids: list[list[list[int]]]) -> Tensor:
        """Convert ``block_ids[pool][row]`` to ``[POOLS, B, MAX_BLOCKS]`` int32 on the device."""
        return (self._of_lists if self.from_lists else self._of_array)(block_ids).to(self.device)

    def _of_lists(self, block_ids: list[list[list[int]]]) -> Tensor:
        tables = [[row + [0] * (self.max_blocks - len(row)) for row in rows] for rows in block_ids]
        return torch.tensor(tables, dtype=torch.int32)

    def _of_array(self, block_ids: list[list[list[int]]]) -> Tensor:
        tables = np.empty((len(block_ids), len(block_ids[0]), self.max_blocks), dtype=np.int32)
        fill_tables(tables, block_ids)
        return torch.from_numpy(tables)


def _tables(model: Transformer, bench: Callable[..., Bench], batch: int, context: int) -> Variants:
    def with_tables(engine: Engine, from_lists: bool) -> None:
        step = cast(Dense, engine.step)
        tables = PageableTables(engine.device, step.max_blocks, from_lists)
        step.stage_tables = tables.stage  # type: ignore[method-assign, assignment]

    before = BEFORE["pinned_h2d"]
    return {
        "one buffer, of lists": partial(bench, before, prepare=partial(with_tables, from_lists=True)),
        "one buffer, of an array": partial(bench, before, prepare=partial(with_tables, from_lists=False)),
    }


def _attention(model: Transformer, bench: Callable[..., Bench], batch: int, context: int) -> Variants:
    """Use the new attention kernel but keep the separate append kernel, so tokens are appended twice."""
    before = BEFORE["fused_append"]
    engine = bench(before).engine
    kernels, binder = engine.kernels, AppendAndAttend(engine.kernels, engine.blocks, model)
    plan = Plan(Variant.parse(binder.variant(batch, context, context)), model.config.window)

    def decode(*, context_lens: Tensor, **operands: Any) -> Tensor:
        return kernels.append_and_attend(**operands, positions=context_lens, plan=plan)

    return {
        "attention rewritten": partial(bench, before, kernels=replace(kernels, paged_attention_decode=decode))
    }


def _head(model: Transformer, bench: Callable[..., Bench], batch: int, context: int) -> Variants:
    """Compute all logits as before, with a vocabulary padded to a multiple of 64."""

    def pad(engine: Engine) -> None:
        kernels, step = engine.kernels, cast(ResidentStep, engine.step)
        padded, vocab = model.padded_head, len(model.lm_head.weight)
        step.worker.next_tokens.chooser = LogitsChooser(
            lambda hidden: F.linear(hidden, padded)[:, :vocab], kernels, step.worker.counts
        )

    return {"vocabulary padded": partial(bench, BEFORE["fused_head"], prepare=pad)}


def _launch(model: Transformer, bench: Callable[..., Bench], batch: int, context: int) -> Variants:
    """Launch dependently, but release only as the predecessor ends, so that the two do not overlap."""
    kernels: Kernels | str = triton_kernels(AT_END) if model.device.type == "cuda" else "auto"
    return {"released at the end": partial(bench, "dependent_launch", kernels=kernels)}


BETWEEN: Mapping[str, Callable[[Transformer, Callable[..., Bench], int, int], Variants]] = {
    "pinned_h2d": _tables,
    "fused_append": _attention,
    "fused_head": _head,
    "dependent_launch": _launch,
}
