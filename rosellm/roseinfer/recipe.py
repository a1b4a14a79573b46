"""Recipes: every choice between variants of the decode step, made once, when an engine is built."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Literal, get_args, get_type_hints

from rosellm.errors import RecipeError
from rosellm.roseinfer.block_tables import TABLES
from rosellm.roseinfer.kernels import Kernels
from rosellm.roseinfer.kv_append import AppendGate, build_append
from rosellm.roseinfer.kv_blocks import KVBlockManager
from rosellm.roseinfer.runner import ATTENTION, RUNNERS
from rosellm.roseinfer.sampling import Sampler
from rosellm.roseinfer.step import MASKS, HostStep
from rosellm.rosetrainer.model import GPT


@dataclass(frozen=True)
class Recipe:
    """One variant an axis; see the README for what each rung of the ladder changes."""

    attention: Literal["dense", "paged"] = "dense"
    mask: Literal["dense", "none"] = "dense"
    tables: Literal["per_layer", "pinned", "resident"] = "per_layer"
    launch: Literal["fixed", "autotuned"] = "fixed"
    runner: Literal["eager", "graph"] = "eager"
    append: Literal["index_put", "generic", "full_batch", "identity_pos"] = "index_put"
    block_info: Literal["tuple", "slots"] = "tuple"
    indices: Literal["fresh", "reused"] = "fresh"
    pool: Literal["per_layer", "shared"] = "per_layer"

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
        paged_in_one_tensor = (self.attention, self.mask) == ("paged", "none") and self.tables != "per_layer"
        if self.runner == "graph" and not paged_in_one_tensor:
            raise RecipeError(
                "runner='graph' needs attention='paged', mask='none' and tables='pinned' or 'resident': "
                "a captured graph has fixed shapes and reads its inputs from fixed addresses"
            )

    def as_dict(self) -> dict[str, str]:
        return asdict(self)

    def difference(self, other: Recipe) -> dict[str, tuple[str, str]]:
        """The fields in which ``other`` differs: name → (here, there)."""
        mine, theirs = self.as_dict(), other.as_dict()
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}


def recipe_choices() -> dict[str, tuple[str, ...]]:
    """Every field of a recipe with its variants."""
    hints = get_type_hints(Recipe)
    return {field.name: get_args(hints[field.name]) for field in fields(Recipe)}


# Each rung: its name, the rung it changes, the one field it changes.
_RUNGS: tuple[tuple[str, str, dict[str, str]], ...] = (
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
)


def _climb() -> tuple[dict[str, Recipe], dict[str, str]]:
    ladder, before = {"dense": Recipe()}, {}
    for name, base, change in _RUNGS:
        ladder[name], before[name] = replace(ladder[base], **change), base
    return ladder, before


LADDER, BEFORE = _climb()
BEST_RUNG = "reused_index_buffers"


def get_rung(name: str | None) -> str:
    """``name`` if it is a rung, the best one for None."""
    if name is None:
        return BEST_RUNG
    if name not in LADDER:
        raise RecipeError(f"rung {name!r} is unknown; use one of {', '.join(LADDER)}")
    return name


def build_step(
    recipe: Recipe,
    *,
    model: GPT,
    blocks: KVBlockManager,
    kernels: Kernels,
    max_blocks_per_sequence: int,
    gate: AppendGate,
    sampler: Sampler,
) -> HostStep:
    """The decode step that ``recipe`` names: the only place where names are looked up."""
    attention = ATTENTION[recipe.attention](kernels.paged_attention_decode)
    return HostStep(
        blocks=blocks,
        tables=TABLES[recipe.tables](model.device, max_blocks_per_sequence, blocks.max_blocks_per_layer),
        mask=MASKS[recipe.mask],
        runner=RUNNERS[recipe.runner](model, blocks, attention),
        append=build_append(recipe.append, recipe.indices, kernels, model.device, gate),
        sampler=sampler,
    )
