"""Construction of a rung's KV cache and step; the only module that looks up variants by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from rosellm.ladder.museum import MuseumRung
from rosellm.models.model import Transformer
from rosellm.roseinfer.cache.device_state import FIELDS, DeviceState
from rosellm.roseinfer.cache.kv_blocks import KVBlocks, blocks_for
from rosellm.roseinfer.cache.token_counts import WORD_COLUMNS
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.kernels.speculation import DraftKernels, draft_kernels
from rosellm.roseinfer.kernels.table import Kernels
from rosellm.roseinfer.layers import batch_invariant
from rosellm.roseinfer.layers.attention import Binder, build_binder
from rosellm.roseinfer.layers.choosers import Chooser, NextTokens, build_chooser
from rosellm.roseinfer.layers.cut import cut_layers
from rosellm.roseinfer.layers.cut_head import cut_chooser
from rosellm.roseinfer.layers.fused import Layers, build_layers
from rosellm.roseinfer.ranks.group import ALONE, Group, Ranks
from rosellm.roseinfer.recipe import Recipe
from rosellm.roseinfer.rung import Rung
from rosellm.roseinfer.steps.captured_prefill import CapturedPrefill, room_of
from rosellm.roseinfer.steps.cuda_graph import graphs_on
from rosellm.roseinfer.steps.draft_model import DraftModel
from rosellm.roseinfer.steps.logprob_ring import LogprobRing
from rosellm.roseinfer.steps.packed_prefill import PackedPrefill
from rosellm.roseinfer.steps.resident import ResidentStep
from rosellm.roseinfer.steps.speculative import SpeculativeStep, SpeculativeWorker, verify_rows
from rosellm.roseinfer.steps.step import Step
from rosellm.roseinfer.steps.worker import Worker


def build_cache(
    rung: Rung, model: Transformer, block_size: int, n_blocks: int, form: str | None = None
) -> KVBlocks:
    """Build the KV cache of ``rung``, with ``n_blocks`` blocks per layer of ``block_size`` tokens each.

    form: the format of keys and values, as in ``KVBlocks``.
    """
    c = model.config
    if isinstance(rung, MuseumRung):
        sizes = c.n_layers, n_blocks, c.n_kv_heads, block_size, c.head_dim
        if blocks := rung.build_cache(sizes, model.device, model.dtype):
            return cast(KVBlocks, blocks)
    sizes = c.n_layers, c.n_kv_heads, c.head_dim, block_size, n_blocks
    return KVBlocks(*sizes, model.device, model.dtype, form=form)


def build_step(
    rung: Rung,
    model: Transformer,
    blocks: KVBlocks,
    kernels: Kernels,
    n_rows: int,
    max_model_len: int,
    group: Group = ALONE,
    n_drafts: int = 0,
    draft: Transformer | None = None,
) -> Step:
    """Build the step of ``rung``.

    blocks: the KV cache.
    n_rows: maximum number of sequences that decode together.
    max_model_len: maximum number of tokens of a sequence.
    group: the ranks that run the step.
    n_drafts: number of draft tokens per row, if the rung speculates.
    draft: the model that drafts, if the rung has one.
    """
    width = blocks_for(max_model_len, blocks.block_size)
    if isinstance(rung, MuseumRung):
        parts = partial(_parts, Recipe(), model, blocks, kernels, width, n_rows, group)
        return rung.build_step(model, blocks, kernels, n_rows, max_model_len, parts)
    recipe = cast(Recipe, rung)
    dependent = recipe.launch == "dependent" and model.device.type == "cuda"
    if recipe.numerics == "invariant":
        kernels = batch_invariant.invariant_kernels(kernels, dependent)
    step_parts = _parts(recipe, model, blocks, kernels, width, n_rows, group, n_drafts)
    if recipe.speculation != "none":
        drafting = draft_kernels(kernels.name, dependent, draft is not None)
        drafter = None if draft is None else _add_draft(recipe, draft, kernels, drafting, step_parts)
        given = model, kernels, drafting, n_drafts, recipe.numerics == "invariant", drafter
        return SpeculativeStep.on(SpeculativeWorker(*given, **step_parts), model, group)
    if recipe.exhibit != "none":
        return load_exhibit(recipe.exhibit).build_step(model, kernels, **step_parts)
    return ResidentStep.on(Worker(**step_parts), model, group)


def _parts(
    recipe: Recipe,
    model: Transformer,
    blocks: KVBlocks,
    kernels: Kernels,
    width: int,
    n_rows: int,
    group: Group,
    n_drafts: int = 0,
) -> dict[str, Any]:
    """Return the arguments of ``Worker`` for a recipe, by name.

    width: maximum number of blocks of a sequence.
    n_rows: maximum number of sequences that decode together.
    n_drafts: number of draft tokens per row and step.
    """
    n_columns = model.config.vocab_size + WORD_COLUMNS
    n_copies = verify_rows(n_rows, n_drafts) if n_drafts else 0
    counts = torch.zeros(n_rows + n_copies, n_columns, dtype=torch.int32, device=model.device)
    parts = _model_parts(recipe, model, blocks, kernels, counts, group)
    layers_for, prefill_layers_for, bind, chooser = parts
    sizes = n_rows + 1, width  # the last row is spare
    state = DeviceState(*sizes, model.device, model.config.eos_token_ids, 1 + n_drafts)
    next_tokens = NextTokens(chooser, kernels.advance)
    chosen = state.first(n_rows)
    if n_drafts:
        chosen = state.of(state.rows.new_zeros(n_rows * (1 + n_drafts), FIELDS))
    graphs = graphs_on(model.device) if recipe.runner == "graph" else None
    prompts: PackedPrefill | CapturedPrefill
    prompts = PackedPrefill(model, kernels, prefill_layers_for, state, blocks, next_tokens)
    if graphs is not None:
        longest = width * blocks.block_size
        room = 0 if recipe.numerics == "invariant" else room_of(model, longest)
        prompts = CapturedPrefill(prompts, graphs, n_rows * longest, room)
    return dict(
        state=state,
        blocks=blocks,
        counts=counts,
        layers_for=layers_for,
        bind=bind,
        next_tokens=next_tokens,
        logprobs=LogprobRing(
            chosen, chooser.logits, kernels.store_likely, model.config, model.dtype, graphs, 1 + n_drafts
        ),
        graphs=graphs,
        prompts=prompts,
    )


def _model_parts(
    recipe: Recipe, model: Transformer, blocks: KVBlocks, kernels: Kernels, counts: Tensor, group: Group
) -> tuple[Callable[[int], Layers], Callable[[int], Layers], Binder, Chooser]:
    """Return the layers of decode steps and of prefills, the attention, and the choice of tokens."""
    fields = recipe.norm, recipe.activation, recipe.gemm
    if recipe.numerics == "invariant":
        bind = batch_invariant.InvariantAppendAndAttend(kernels, blocks, model)
        chooser = batch_invariant.invariant_chooser(model, kernels, counts)
        return *batch_invariant.invariant_layers(model, kernels), bind, chooser
    one_in_ring = group is not ALONE and (recipe.all_reduce, recipe.gemm) == ("one_shot", "small_m")
    binder = build_binder(recipe.attention, kernels, blocks, model, one_in_ring)
    if group is ALONE:
        return (
            *build_layers(*fields, model, kernels),
            binder,
            build_chooser(recipe.head, model, kernels, counts),
        )
    ranks = cast(Ranks, group)
    layers = cut_layers(*fields, recipe.all_reduce, model, kernels, ranks)
    return *layers, binder, cut_chooser(recipe.head, model, kernels, counts, ranks)


def _add_draft(
    recipe: Recipe, draft: Transformer, kernels: Kernels, drafting: DraftKernels, parts: dict[str, Any]
) -> DraftModel:
    """Build a draft model on the rows and block ids of a step, and let prefills cache their prompts for it.

    parts: the arguments of ``Worker`` for the step.
    """
    shared, prompts = parts["blocks"], parts["prompts"]
    blocks = build_cache(recipe, draft, shared.block_size, shared.max_blocks_per_layer)
    counts = parts["counts"][:1]  # drafts have no counts, but a mode may need a table
    layers_for, prefill_layers_for, bind, chooser = _model_parts(
        recipe, draft, blocks, kernels, counts, ALONE
    )
    packed = prompts.packed if isinstance(prompts, CapturedPrefill) else prompts
    next_tokens = NextTokens(chooser, kernels.advance)
    packed.draft = PackedPrefill(draft, kernels, prefill_layers_for, packed.state, blocks, next_tokens)
    return DraftModel(packed.draft, layers_for, bind, drafting)
