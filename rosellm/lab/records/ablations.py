"""Split a rung's gain where its one field changes several things, and measure each field of the best rung.

Each ablation consists of a few variants between a rung and the previous rung, measured in alternation by
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

from rosellm.bench.benchmark_scheduler import run_scheduler
from rosellm.bench.job import Job
from rosellm.bench.workloads import Workload
from rosellm.errors import RecipeError
from rosellm.lab.records.bench import Bench, make_prompts
from rosellm.lab.records.step_time import (
    MakeBench,
    figures_of,
    measure_steps,
    prompt_length,
    room,
    step_shape,
)
from rosellm.lab.records.turns import in_turns
from rosellm.ladder.dense import Dense
from rosellm.ladder.rungs import fill_tables
from rosellm.models.model import Transformer
from rosellm.roseinfer.cache.kv_blocks import blocks_for
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.kernels.attention_plan import Plan, Variant
from rosellm.roseinfer.kernels.dependent_launch import AT_END
from rosellm.roseinfer.kernels.table import Kernels, triton_kernels
from rosellm.roseinfer.layers.attention import AppendAndAttend
from rosellm.roseinfer.layers.choosers import LogitsChooser
from rosellm.roseinfer.recipe import BEFORE, BEST_RUNG, LADDER, RECIPES, Recipe, recipe_choices
from rosellm.roseinfer.rung import Rung
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.steps.resident import ResidentStep

Variants = dict[str, MakeBench]


def ablation_steps(model: Transformer, rung: str, workload: Workload, **effort: Any) -> dict[str, Any]:
    """Time a decode step of the previous rung, of ``rung``, and of the variants between them.

    workload: determines batch size and context, as in ``step_shape``.
    effort: keyword arguments of ``measure_steps``.

    Returns the figures of a record, as in ``figures_of``.
    """
    batch, context = step_shape(workload)
    prompts = make_prompts(batch, prompt_length(context), model.config.vocab_size)

    def bench(recipe: str | Rung, **options: Any) -> Bench:
        return Bench(model, recipe, prompts, room(), **options)

    between = BETWEEN[rung](model, bench, batch, context)
    makers: Variants = {BEFORE[rung]: partial(bench, BEFORE[rung]), **between, rung: partial(bench, rung)}
    return figures_of(batch, context, measure_steps(makers, **effort))


def leave_one_out(
    model: Transformer, workload: Workload, repeats: int = 5, best: str = BEST_RUNG
) -> dict[str, Any]:
    """Measure, in alternation, whole runs of the rung ``best`` and of variants with one field reverted.

    Returns a dict:
    best: the rung.
    tok_s: reverted field, or "none", → tokens per second of each repeat's whole run.
    refused: field → why no recipe exists with only this field reverted.
    """
    length = 1 + workload.max_new_tokens
    blocks = workload.max_batch_size * blocks_for(length, 64)
    recipes, refused = one_step_back(best)
    prompts = make_prompts(workload.num_requests, 1, model.config.vocab_size)
    params = SamplingParams(temperature=0.0, max_tokens=workload.max_new_tokens, ignore_eos=True)

    def job(recipe: str | Recipe) -> Job:
        sizes: dict[str, Any] = {"max_batch_size": workload.max_batch_size, "max_model_len": length}
        return Job(Engine(model, recipe=recipe, num_kv_blocks=blocks, **sizes), prompts, params)

    def tok_s(job: Job) -> float:
        return run_scheduler(job)["total_throughput_tok_s"]

    jobs = {field: job(recipe) for field, recipe in ({"none": best} | recipes).items()}
    found = in_turns({field: partial(tok_s, job) for field, job in jobs.items()}, repeats)
    return {"best": best, "tok_s": found, "refused": refused}


def one_step_back(best: str) -> tuple[dict[str, Recipe], dict[str, str]]:
    """Return recipes that each revert one field of the rung ``best`` to its value before the last change.

    Returns two dicts:
    - field → recipe;
    - field → reason, for fields that cannot be reverted alone because others require the new value.
    """
    values: dict[str, Any] = {}
    rung = best
    while rung in BEFORE:
        for field, (old, _) in LADDER[BEFORE[rung]].difference(LADDER[rung]).items():
            if field in recipe_choices():
                values.setdefault(field, old)
        rung = BEFORE[rung]
    back, refused = dict[str, Recipe](), dict[str, str]()
    for field, value in values.items():
        try:
            back[field] = replace(RECIPES[best], **{field: value})
        except RecipeError as error:
            refused[field] = str(error)
    return back, refused


class PageableTables:
    """Sends the block tables of all pools to the device in one copy from one pageable buffer.

    from_lists: whether to build the buffer from nested Python lists, or by filling a NumPy array.
    """

    def __init__(self, device: torch.device, max_blocks: int, from_lists: bool) -> None:
        self.device, self.max_blocks, self.from_lists = device, max_blocks, from_lists

    def stage(self, block_ids: list[list[list[int]]]) -> Tensor:
        """Copy block tables to the device as ``[POOLS, B, MAX_BLOCKS]`` int32.

        block_ids: ``block_ids[pool][row]`` is a list of block ids.
        """
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
    """Use the new attention kernel but keep the separate append kernel, so that tokens are appended twice."""
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
    """Launch kernels dependently, but release each only when its predecessor ends, so that none overlap."""
    kernels: Kernels | str = triton_kernels(AT_END) if model.device.type == "cuda" else "auto"
    return {"released at the end": partial(bench, "dependent_launch", kernels=kernels)}


BETWEEN: Mapping[str, Callable[[Transformer, Callable[..., Bench], int, int], Variants]] = {
    "pinned_h2d": _tables,
    "fused_append": _attention,
    "fused_head": _head,
    "dependent_launch": _launch,
}
