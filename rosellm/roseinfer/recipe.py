"""Recipes: all choices among variants of the decode step, made once, when an engine is built."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import Any, Literal, NamedTuple, cast, get_args, get_type_hints

import torch

from rosellm.errors import DeviceError, RecipeError, describe
from rosellm.models.arch import Arch
from rosellm.models.model import Transformer
from rosellm.roseinfer.cache.block_tables import TABLES
from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.cache.kv_blocks import KVBlockManager, blocks_for
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.kernels.table import Kernels
from rosellm.roseinfer.layers import batch_invariant
from rosellm.roseinfer.layers.attention import Binder, build_binder
from rosellm.roseinfer.layers.choosers import NextTokens, build_chooser
from rosellm.roseinfer.layers.cut import cut_layers
from rosellm.roseinfer.layers.cut_head import cut_chooser
from rosellm.roseinfer.layers.fused import build_layers
from rosellm.roseinfer.layers.sampler import Sampler
from rosellm.roseinfer.ranks.group import ALONE, Group, Ranks
from rosellm.roseinfer.steps.captured_prefill import CapturedPrefill, room_of
from rosellm.roseinfer.steps.cuda_graph import graphs_on
from rosellm.roseinfer.steps.host import MASKS, HostStep
from rosellm.roseinfer.steps.kv_append import AppendGate, build_append
from rosellm.roseinfer.steps.logprob_ring import LogprobRing
from rosellm.roseinfer.steps.packed_prefill import PackedPrefill
from rosellm.roseinfer.steps.prefill import Prefill
from rosellm.roseinfer.steps.resident import ResidentStep
from rosellm.roseinfer.steps.runner import ATTENTION, RUNNERS
from rosellm.roseinfer.steps.worker import Worker


@dataclass(frozen=True)
class Recipe:
    """One variant per axis; README.md lists what each rung of the ladder changes."""

    attention: Literal["dense", "paged", "split"] = "dense"
    mask: Literal["dense", "none"] = "dense"
    tables: Literal["per_layer", "pinned", "resident"] = "per_layer"
    launch: Literal["fixed", "autotuned", "dependent"] = "fixed"
    runner: Literal["eager", "graph"] = "eager"
    append: Literal["index_put", "generic", "full_batch", "identity_pos", "fused"] = "index_put"
    block_info: Literal["tuple", "slots"] = "tuple"
    indices: Literal["fresh", "reused"] = "fresh"
    pool: Literal["per_layer", "shared"] = "per_layer"
    step: Literal["host", "resident"] = "host"
    prefill: Literal["padded", "packed"] = "padded"
    norm: Literal["separate", "fused"] = "separate"
    activation: Literal["separate", "epilogue"] = "separate"
    head: Literal["logits", "fused"] = "logits"
    gemm: Literal["library", "small_m"] = "library"
    numerics: Literal["fast", "invariant"] = "fast"
    all_reduce: Literal["library", "one_shot"] = "library"  # with several ranks only
    exhibit: Literal["none", "persistent_layers", "one_pass"] = "none"  # a file of notebooks/exhibits

    def __post_init__(self) -> None:
        for name, allowed in recipe_choices().items():
            if getattr(self, name) not in allowed:
                raise RecipeError(
                    f"{name}={describe(getattr(self, name))} is unknown; use one of {', '.join(allowed)}"
                )
        for rule in _RULES:
            broken = [name for name, allowed in rule.needs.items() if getattr(self, name) not in allowed]
            if getattr(self, rule.field) == rule.value and broken:
                needed = " or ".join(map(repr, rule.needs[broken[0]]))
                raise RecipeError(f"{rule.field}={rule.value!r} needs {broken[0]}={needed}: {rule.reason}")

    def check_serves(self, config: Arch) -> None:
        """Raise ``RecipeError``, with the reason, if a variant cannot run models of this architecture."""
        if self.exhibit != "none":
            load_exhibit(self.exhibit).check_serves(config)

    def check_ranks(self, n_ranks: int) -> None:
        """Raise ``RecipeError``, with the reason, if a variant cannot run on ``n_ranks`` ranks."""
        for name, allowed, reason in _OF_RANKS:
            if n_ranks > 1 and getattr(self, name) not in allowed:
                raise RecipeError(
                    f"tensor_parallel_size {n_ranks} needs {name}={' or '.join(map(repr, allowed))}, "
                    f"not {getattr(self, name)!r}: {reason}"
                )

    def check_sums(self, device: torch.device, kernels: Kernels) -> None:
        """Raise ``RecipeError``, with the reason, if the device cannot run this all-reduce."""
        if self.all_reduce == "one_shot" and kernels.name != "triton":
            raise RecipeError("all_reduce='one_shot' is a Triton kernel; use 'library' with kernels='torch'")

    def invariant(self) -> Recipe:
        """Return the recipe with a fixed summation order.

        Contexts are not split, since the split points depend on the other sequences.
        """
        whole = "paged" if self.attention == "split" else self.attention
        return replace(self, numerics="invariant", attention=whole)

    def as_dict(self) -> dict[str, str]:
        return asdict(self)

    def difference(self, other: Recipe) -> dict[str, tuple[str, str]]:
        """Return the fields in which ``other`` differs: name → (this value, the other value)."""
        mine, theirs = self.as_dict(), other.as_dict()
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}


_OF_RANKS = (
    ("step", ("resident",), "tensor parallelism requires the resident step, e.g. rung='split_kv'"),
    ("prefill", ("packed",), "the inputs of a separate, packed prefill are broadcast in one array"),
    ("exhibit", ("none",), "exhibits run on one GPU"),
    ("numerics", ("fast",), "an all-reduce sums in a different order"),
)


class _Rule(NamedTuple):
    """A variant, the reason it needs others, and for each such field the variants that satisfy it."""

    field: str
    value: str
    reason: str
    needs: dict[str, tuple[str, ...]]


def _rule(variant: str, reason: str, **needs: str) -> _Rule:
    """Build a rule. variant: ``field=value``; needs: a field's allowed variants, space-separated."""
    field, _, value = variant.partition("=")
    return _Rule(field, value, reason, {name: tuple(values.split()) for name, values in needs.items()})


_FIXED_SHAPES = "a captured graph has fixed shapes and reads its inputs from fixed addresses"
_ON_ITS_OWN = "the device can run ahead only if no part of a step needs the host"
_SPLITS = "the split kernels append, and the resident step chooses them by the longest context"
_ONE_ORDER = "only these kernels have a fixed summation order"
_RULES = (
    _rule("attention=dense", "dense keys are padded to the longest context", mask="dense"),
    _rule("launch=autotuned", "only the paged attention kernel is tuned", attention="paged split"),
    _rule("runner=graph", _FIXED_SHAPES, attention="paged split", mask="none", tables="pinned resident"),
    _rule("step=resident", _ON_ITS_OWN, attention="paged split", mask="none", pool="shared"),
    _rule("step=resident", _ON_ITS_OWN, tables="resident", append="identity_pos fused"),
    _rule("step=resident", _ON_ITS_OWN, launch="fixed dependent"),
    _rule("attention=split", _SPLITS, step="resident", append="fused"),
    _rule("append=fused", "the host-driven step appends after the model has run", step="resident"),
    _rule("prefill=packed", "its block tables and first tokens are on the device", step="resident"),
    _rule("exhibit=one_pass", "prompts join a decode step on the device", prefill="packed"),
    _rule("norm=fused", "only the resident step runs the layers separately", step="resident"),
    _rule("activation=epilogue", "the unfused model runs GELU as a separate operator", norm="fused"),
    _rule("head=fused", "the host's sampler takes logits", step="resident"),
    _rule("gemm=small_m", "its kernels fuse both", norm="fused", activation="epilogue"),
    _rule("exhibit=persistent_layers", "its one kernel holds whole layers", activation="epilogue"),
    _rule("exhibit=persistent_layers", "its one kernel holds whole layers", append="fused"),
    _rule("launch=dependent", "a chain of kernels overlaps within one captured step", step="resident"),
    _rule("numerics=invariant", _ONE_ORDER, prefill="packed", attention="paged", append="fused"),
    _rule("all_reduce=one_shot", "its kernel includes the norm", norm="fused"),
    _rule("numerics=invariant", _ONE_ORDER, head="fused", gemm="small_m", exhibit="none"),
)


@cache
def recipe_choices() -> dict[str, tuple[str, ...]]:
    """Return every field of a recipe with its variants."""
    hints = get_type_hints(Recipe)
    return {field.name: get_args(hints[field.name]) for field in fields(Recipe)}


# Each rung: its name, its base rung, and the one field it changes.
_RUNGS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("paged", "dense", {"attention": "paged"}),
    ("no_mask", "paged", {"mask": "none"}),
    ("pinned_h2d", "no_mask", {"tables": "pinned"}),
    ("autotune", "pinned_h2d", {"launch": "autotuned"}),
    ("cuda_graph", "pinned_h2d", {"runner": "graph"}),
    ("triton_append", "cuda_graph", {"append": "generic"}),
    ("full_batch", "triton_append", {"append": "full_batch"}),
    ("identity_pos", "full_batch", {"append": "identity_pos"}),
    ("mutable_block_info", "identity_pos", {"block_info": "slots"}),
    ("reused_index_buffers", "mutable_block_info", {"indices": "reused"}),
    ("resident_tables", "reused_index_buffers", {"tables": "resident"}),
    ("one_table", "resident_tables", {"pool": "shared"}),
    ("resident_step", "one_table", {"step": "resident"}),
    ("packed_prefill", "resident_step", {"prefill": "packed"}),
    ("fused_append", "packed_prefill", {"append": "fused"}),
    ("fused_norm", "fused_append", {"norm": "fused"}),
    ("fused_gelu", "fused_norm", {"activation": "epilogue"}),
    ("fused_head", "fused_gelu", {"head": "fused"}),
    ("small_gemm", "fused_head", {"gemm": "small_m"}),
    ("dependent_launch", "small_gemm", {"launch": "dependent"}),
    ("split_kv", "dependent_launch", {"attention": "split"}),
    ("persistent_kernel", "dependent_launch", {"exhibit": "persistent_layers"}),
    ("one_pass", "split_kv", {"exhibit": "one_pass"}),
)


def _climb() -> tuple[dict[str, Recipe], dict[str, str]]:
    ladder, before = {"dense": Recipe()}, {}
    for name, base, change in _RUNGS:
        ladder[name], before[name] = replace(ladder[base], **change), base
    return ladder, before


LADDER, BEFORE = _climb()
BEST_RUNG = "split_kv"


def _side_branches() -> frozenset[str]:
    on_the_way, rung = {"dense"}, BEST_RUNG
    while rung != "dense":
        on_the_way.add(rung)
        rung = BEFORE[rung]
    return frozenset(LADDER) - on_the_way


SIDE_BRANCHES = _side_branches()  # rungs not on the path to the best one


DEPENDENT_LAUNCH_FROM = 9, 0  # compute capability: programmatic dependent launch came with Hopper
TRITON_FROM = 7, 0  # tensor cores


def best_rung(device: torch.device) -> str:
    """Return the fastest rung that the device can run: GPUs before Hopper lack dependent launch.

    Raises ``DeviceError`` for a GPU with a compute capability below ``TRITON_FROM``.
    """
    capability = _capability(device)
    if capability is None or capability >= DEPENDENT_LAUNCH_FROM:
        return BEST_RUNG
    if capability < TRITON_FROM:
        raise DeviceError(
            f"{device} has compute capability {_dotted(capability)}; kernels need "
            f"{_dotted(TRITON_FROM)} or more: use device='cpu'"
        )
    rung = BEST_RUNG
    while LADDER[rung].launch == "dependent":
        rung = BEFORE[rung]
    return rung


def get_rung(name: str | None, device: torch.device | None = None) -> str:
    """Return ``name`` if it is a rung, or the best one for None; raise ``RecipeError`` otherwise."""
    if name is None:
        return BEST_RUNG if device is None else best_rung(device)
    if not isinstance(name, str) or name not in LADDER:
        raise RecipeError(f"rung {describe(name)} is unknown; use one of {', '.join(LADDER)}")
    return name


def check_launch(recipe: Recipe, device: torch.device) -> None:
    """Raise ``RecipeError`` if the device is a GPU that cannot launch the recipe's kernels."""
    best = best_rung(device)
    if recipe.launch == "dependent" and LADDER[best].launch != "dependent":
        raise RecipeError(
            f"launch='dependent' needs a GPU of compute capability {_dotted(DEPENDENT_LAUNCH_FROM)} or "
            f"more, {device} has {_dotted(_capability(device))}: use rung={best!r}"
        )


def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _dotted(capability: tuple[int, int] | None) -> str:
    return ".".join(map(str, capability or ()))


def build_step(
    recipe: Recipe,
    model: Transformer,
    blocks: KVBlockManager,
    kernels: Kernels,
    n_rows: int,
    max_model_len: int,
    gate: AppendGate,
    group: Group = ALONE,
) -> HostStep | ResidentStep:
    """Build the step of ``recipe`` for ``n_rows`` sequences of at most ``max_model_len`` tokens.

    The only place where variants are looked up by name.
    """
    width = blocks_for(max_model_len, blocks.block_size)
    if recipe.step == "resident":
        return _resident_step(recipe, model, blocks, kernels, width, n_rows, group)
    attention = ATTENTION[recipe.attention](kernels.paged_attention_decode, model.config)
    return HostStep(
        blocks=blocks,
        tables=TABLES[recipe.tables](model.device, width, blocks.max_blocks_per_layer),
        mask=MASKS[recipe.mask],
        runner=RUNNERS[recipe.runner](model, blocks, attention),
        append=build_append(recipe.append, recipe.indices, kernels, model.device, gate),
        prefill=Prefill(model, blocks),
        sampler=Sampler(kernels.gumbel_noise),
        most_rows=n_rows,
    )


def _resident_step(
    recipe: Recipe,
    model: Transformer,
    blocks: KVBlockManager,
    kernels: Kernels,
    width: int,
    n_rows: int,
    group: Group,
) -> ResidentStep:
    bind: Binder
    counts = torch.zeros(n_rows, model.config.vocab_size, dtype=torch.int32, device=model.device)
    if recipe.numerics == "invariant":
        dependent = recipe.launch == "dependent" and model.device.type == "cuda"
        kernels = batch_invariant.invariant_kernels(kernels, dependent)
        layers_for, prefill_layers_for = batch_invariant.invariant_layers(model, kernels)
        bind = batch_invariant.InvariantAppendAndAttend(kernels, blocks, model)
        chooser = batch_invariant.invariant_chooser(model, kernels, counts)
    elif group is not ALONE:
        ranks = cast(Ranks, group)
        fields = recipe.norm, recipe.activation, recipe.gemm, recipe.all_reduce
        layers_for = cut_layers(*fields, model, kernels, ranks)
        bind = build_binder(recipe.attention, recipe.append, kernels, blocks, model)
        prefill_layers_for, chooser = layers_for, cut_chooser(recipe.head, model, kernels, counts, ranks)
    else:
        layers_for = build_layers(recipe.norm, recipe.activation, recipe.gemm, model, kernels)
        bind = build_binder(recipe.attention, recipe.append, kernels, blocks, model)
        prefill_layers_for, chooser = layers_for, build_chooser(recipe.head, model, kernels, counts)
    state = DeviceState(n_rows + 1, width, model.device, model.config.eos_token_ids)  # the last is a spare
    next_tokens = NextTokens(chooser, kernels.advance)
    graphs = graphs_on(model.device) if recipe.runner == "graph" else None
    prompts: PackedPrefill | CapturedPrefill | None = None
    if recipe.prefill == "packed":
        prompts = PackedPrefill(model, kernels, prefill_layers_for, state, blocks, next_tokens)
        if graphs is not None:
            longest = width * blocks.block_size
            room = 0 if recipe.numerics == "invariant" else room_of(model, longest)
            prompts = CapturedPrefill(prompts, graphs, n_rows * longest, room)
    parts: dict[str, Any] = dict(
        state=state,
        blocks=blocks,
        counts=counts,
        layers_for=layers_for,
        bind=bind,
        next_tokens=next_tokens,
        logprobs=LogprobRing(state.first(n_rows), chooser.logits, model.config, model.dtype, graphs),
        graphs=graphs,
        prompts=prompts,
    )
    if recipe.exhibit != "none":
        return load_exhibit(recipe.exhibit).build_step(model, kernels, **parts)
    return ResidentStep.on(Worker(**parts), model, group)
