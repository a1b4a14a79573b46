"""Recipes: every choice between variants of the decode step, made once, when an engine is built."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import Any, Literal, get_args, get_type_hints

import torch

from rosellm.errors import DeviceError, RecipeError
from rosellm.models.model import GPT
from rosellm.roseinfer.cache.block_tables import TABLES
from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.cache.kv_blocks import KVBlockManager
from rosellm.roseinfer.kernels.table import Kernels
from rosellm.roseinfer.layers.attention import BINDERS, Binder
from rosellm.roseinfer.layers.batch_invariant import (
    InvariantAppendAndAttend,
    invariant_chooser,
    invariant_kernels,
    invariant_layers,
)
from rosellm.roseinfer.layers.choosers import build_chooser
from rosellm.roseinfer.layers.exhibits import load_exhibit
from rosellm.roseinfer.layers.fused import build_layers
from rosellm.roseinfer.layers.sampler import Sampler
from rosellm.roseinfer.steps.cuda_graph import graph_pool
from rosellm.roseinfer.steps.host import MASKS, HostStep
from rosellm.roseinfer.steps.kv_append import AppendGate, build_append
from rosellm.roseinfer.steps.packed_prefill import PackedPrefill
from rosellm.roseinfer.steps.prefill import Prefill
from rosellm.roseinfer.steps.resident import ResidentStep
from rosellm.roseinfer.steps.runner import ATTENTION, RUNNERS


@dataclass(frozen=True)
class Recipe:
    """One variant an axis; see the README for what each rung of the ladder changes."""

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
    gemm: Literal["library", "small_m", "persistent"] = "library"
    numerics: Literal["fast", "invariant"] = "fast"

    def __post_init__(self) -> None:
        for name, allowed in recipe_choices().items():
            if getattr(self, name) not in allowed:
                raise RecipeError(
                    f"{name}={getattr(self, name)!r} is unknown; use one of {', '.join(allowed)}"
                )
        if self.attention == "dense" and self.mask == "none":
            raise RecipeError(
                "attention='dense' needs mask='dense': dense keys are padded to the longest context"
            )
        if self.attention == "dense" and self.launch == "autotuned":
            raise RecipeError(
                "launch='autotuned' tunes the paged attention kernel; attention='dense' has none"
            )
        paged = self.attention != "dense" and self.mask == "none"
        if self.runner == "graph" and (not paged or self.tables == "per_layer"):
            raise RecipeError(
                "runner='graph' needs attention='paged', mask='none' and tables='pinned' or 'resident': "
                "a captured graph has fixed shapes and reads its inputs from fixed addresses"
            )
        for (name, value), needs, reason in _NEEDS:
            wrong = [(n, v) for n, v in needs.items() if getattr(self, n) not in v]
            if getattr(self, name) == value and wrong:
                told = " or ".join(repr(v) for v in wrong[0][1])
                raise RecipeError(f"{name}={value!r} needs {wrong[0][0]}={told}: {reason}")

    def as_dict(self) -> dict[str, str]:
        return asdict(self)

    def difference(self, other: Recipe) -> dict[str, tuple[str, str]]:
        """The fields in which ``other`` differs: name → (here, there)."""
        mine, theirs = self.as_dict(), other.as_dict()
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}


# A variant, what it needs of other fields, and why.
_RESIDENT: dict[str, tuple[str, ...]] = {"step": ("resident",)}
_NEEDS: tuple[tuple[tuple[str, str], dict[str, tuple[str, ...]], str], ...] = (
    (
        ("step", "resident"),
        {
            "attention": ("paged", "split"),
            "mask": ("none",),
            "pool": ("shared",),
            "tables": ("resident",),
            "append": ("identity_pos", "fused"),
            "launch": ("fixed", "dependent"),
        },
        "what the host does in a step must be gone before the device can go on alone",
    ),
    (
        ("attention", "split"),
        {**_RESIDENT, "append": ("fused",)},
        "the resident step chooses its kernels by the longest context, and they append",
    ),
    (("append", "fused"), _RESIDENT, "elsewhere keys and values are written after the model has run"),
    (("prefill", "packed"), _RESIDENT, "its block tables and first tokens are on the device"),
    (("norm", "fused"), _RESIDENT, "only the resident step takes the model apart"),
    (("activation", "epilogue"), {"norm": ("fused",)}, "the plain model has GELU as an operator"),
    (("head", "fused"), _RESIDENT, "the host's sampler takes logits"),
    (("gemm", "small_m"), {"norm": ("fused",), "activation": ("epilogue",)}, "its kernels hold them all"),
    (
        ("gemm", "persistent"),
        {"norm": ("fused",), "activation": ("epilogue",), "append": ("fused",)},
        "its one kernel holds whole layers",
    ),
    (("launch", "dependent"), _RESIDENT, "a chain of kernels overlaps within one captured step"),
    (
        ("numerics", "invariant"),
        {
            "prefill": ("packed",),
            "attention": ("paged",),
            "append": ("fused",),
            "head": ("fused",),
            "gemm": ("small_m",),
        },
        "only these kernels can be held to one order of their sums",
    ),
)


@cache
def recipe_choices() -> dict[str, tuple[str, ...]]:
    """Every field of a recipe with its variants."""
    hints = get_type_hints(Recipe)
    return {field.name: get_args(hints[field.name]) for field in fields(Recipe)}


# Each rung: its name, the rung it changes, the one field it changes.
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
    ("persistent_kernel", "dependent_launch", {"gemm": "persistent"}),
)


def _climb() -> tuple[dict[str, Recipe], dict[str, str]]:
    ladder, before = {"dense": Recipe()}, {}
    for name, base, change in _RUNGS:
        ladder[name], before[name] = replace(ladder[base], **change), base
    return ladder, before


LADDER, BEFORE = _climb()
BEST_RUNG = "dependent_launch"


def _side_branches() -> frozenset[str]:
    on_the_way, rung = {"dense"}, BEST_RUNG
    while rung != "dense":
        on_the_way.add(rung)
        rung = BEFORE[rung]
    return frozenset(LADDER) - on_the_way


SIDE_BRANCHES = _side_branches()  # rungs that are kept off the best one


DEPENDENT_LAUNCH_FROM = 9, 0  # compute capability: programmatic dependent launch came with Hopper
TRITON_FROM = 7, 0  # tensor cores
BEST_WITHOUT_DEPENDENT_LAUNCH = BEFORE[BEST_RUNG]


def best_rung(device: torch.device) -> str:
    """The fastest rung that the device can run: a GPU before Hopper has no dependent launch.

    Raises ``DeviceError`` for a GPU of a compute capability below ``TRITON_FROM``.
    """
    capability = _capability(device)
    if capability is None or capability >= DEPENDENT_LAUNCH_FROM:
        return BEST_RUNG
    if capability < TRITON_FROM:
        raise DeviceError(
            f"{device} has compute capability {_dotted(capability)}; kernels need "
            f"{_dotted(TRITON_FROM)} or more: use device='cpu'"
        )
    return BEST_WITHOUT_DEPENDENT_LAUNCH


def get_rung(name: str | None, device: torch.device | None = None) -> str:
    """``name`` if it is a rung; for None the best one, of ``device`` if that is given."""
    if name is None:
        return BEST_RUNG if device is None else best_rung(device)
    if not isinstance(name, str) or name not in LADDER:
        raise RecipeError(f"rung {name!r} is unknown; use one of {', '.join(LADDER)}")
    return name


def check_launch(recipe: Recipe, device: torch.device) -> None:
    """Raises ``RecipeError`` if the device is a GPU that cannot launch the recipe's kernels."""
    best = best_rung(device)
    if recipe.launch == "dependent" and LADDER[best].launch != "dependent":
        raise RecipeError(
            f"launch='dependent' needs a GPU of compute capability {_dotted(DEPENDENT_LAUNCH_FROM)} or "
            f"more, {device} has {_dotted(_capability(device))}: use rung {best!r}"
        )


def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _dotted(capability: tuple[int, int] | None) -> str:
    return ".".join(map(str, capability or ()))


def build_step(
    recipe: Recipe,
    *,
    model: GPT,
    blocks: KVBlockManager,
    kernels: Kernels,
    max_blocks_per_sequence: int,
    max_batch_size: int,
    gate: AppendGate,
) -> HostStep | ResidentStep:
    """The step that ``recipe`` names: the only place where names are looked up."""
    if recipe.step == "resident":
        return _resident_step(recipe, model, blocks, kernels, max_blocks_per_sequence, max_batch_size)
    sampler = Sampler(kernels.gumbel_noise)
    attention = ATTENTION[recipe.attention](kernels.paged_attention_decode)
    return HostStep(
        blocks=blocks,
        tables=TABLES[recipe.tables](model.device, max_blocks_per_sequence, blocks.max_blocks_per_layer),
        mask=MASKS[recipe.mask],
        runner=RUNNERS[recipe.runner](model, blocks, attention),
        append=build_append(recipe.append, recipe.indices, kernels, model.device, gate),
        prefill=Prefill(model, blocks),
        sampler=sampler,
    )


def _resident_step(
    recipe: Recipe, model: GPT, blocks: KVBlockManager, kernels: Kernels, width: int, n_rows: int
) -> ResidentStep:
    bind: Binder
    capture, pool = recipe.runner == "graph", graph_pool(model.device)
    if recipe.numerics == "invariant":
        kernels = invariant_kernels(kernels, recipe.launch == "dependent" and model.device.type == "cuda")
        layers_for, prefill_layers_for = invariant_layers(model, kernels)
        bind, chooser = InvariantAppendAndAttend(kernels, blocks), invariant_chooser(model, kernels)
    else:
        layers_for = build_layers(recipe.norm, recipe.activation, recipe.gemm, model, kernels)
        bind = BINDERS[recipe.attention, recipe.append](kernels, blocks)
        prefill_layers_for, chooser = layers_for, build_chooser(recipe.head, model, kernels)
    prefill: Prefill | PackedPrefill = Prefill(model, blocks)
    if recipe.prefill == "packed":
        prefill = PackedPrefill(blocks, kernels, prefill_layers_for, width, capture, pool)
    if recipe.gemm == "persistent":
        exhibit = load_exhibit("persistent_layers")
        layers_for = exhibit.persistent_for_few(layers_for, model, kernels)
    return ResidentStep(
        blocks=blocks,
        state=DeviceState(n_rows, width, model.device),
        layers_for=layers_for,
        bind=bind,
        chooser=chooser,
        prefill=prefill,
        kernels=kernels,
        capture=capture,
        pool=pool,
    )
