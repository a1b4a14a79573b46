"""Recipes: all choices among variants of the decode step, made once, when an engine is built.

``LADDER`` maps names to rungs: first those of the museum (:mod:`rosellm.ladder`), then recipes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import permutations
from typing import Any, Literal, NamedTuple, cast, get_args, get_type_hints

import torch

from rosellm.errors import DeviceError, RecipeError, describe
from rosellm.ladder.museum import CHANGES, MUSEUM
from rosellm.models.arch import Arch
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.rung import Rung

# The product's rungs: name, base rung, and the field that changes. The first is ``Recipe()``.
_CHANGES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("fused_append", "packed_prefill", {}),
    ("fused_norm", "fused_append", {"norm": "fused"}),
    ("fused_gelu", "fused_norm", {"activation": "epilogue"}),
    ("fused_head", "fused_gelu", {"head": "fused"}),
    ("small_gemm", "fused_head", {"gemm": "small_m"}),
    ("dependent_launch", "small_gemm", {"launch": "dependent"}),
    ("split_kv", "dependent_launch", {"attention": "split"}),
    ("persistent_kernel", "dependent_launch", {"exhibit": "persistent_layers"}),
    ("one_pass", "split_kv", {"exhibit": "one_pass"}),
    ("speculative", "split_kv", {"speculation": "ngram"}),
)


@dataclass(frozen=True)
class Recipe(Rung):
    """A choice of one variant per field, for a resident step with packed prefill.

    speculation: how a step drafts further tokens, which it verifies: "ngram", from the row's own text, or
        "draft", with a smaller model.
    exhibit: the name of a file in ``notebooks/exhibits`` that implements the step, or "none".
    all_reduce: the implementation of all-reduce; has an effect only with several ranks. A rung chosen by its
        name takes the fastest one (:meth:`on_ranks`).

    Raises ``RecipeError`` for an unknown variant, or for variants that do not work together.
    """

    attention: Literal["paged", "split"] = "paged"
    launch: Literal["fixed", "dependent"] = "fixed"
    runner: Literal["eager", "graph"] = "graph"
    norm: Literal["separate", "fused"] = "separate"
    activation: Literal["separate", "epilogue"] = "separate"
    head: Literal["logits", "fused"] = "logits"
    gemm: Literal["library", "small_m"] = "library"
    numerics: Literal["fast", "invariant"] = "fast"
    all_reduce: Literal["library", "one_shot"] = "library"
    speculation: Literal["none", "ngram", "draft"] = "none"
    exhibit: Literal["none", "persistent_layers", "one_pass"] = "none"

    def __post_init__(self) -> None:
        for name, allowed in recipe_choices().items():
            if getattr(self, name) not in allowed:
                raise RecipeError(
                    f"{name}={describe(getattr(self, name))} is unknown; use one of {', '.join(allowed)}"
                )
        for rule in _RULES:
            broken = [(name, value) for name, value in rule.needs.items() if getattr(self, name) != value]
            if getattr(self, rule.field) == rule.value and broken:
                name, needed = broken[0]
                raise RecipeError(f"{rule.field}={rule.value!r} needs {name}={needed!r}: {rule.reason}")

    def as_dict(self) -> dict[str, str]:
        """Return the variant on every axis of the ladder, by axis name."""
        return _SETTLED | asdict(self)

    def check_serves(self, config: Arch) -> None:
        """Raise ``RecipeError`` if there is an exhibit and it cannot run this architecture."""
        if self.exhibit != "none":
            load_exhibit(self.exhibit).check_serves(config)

    def check_ranks(self, n_ranks: int) -> None:
        """Raise ``RecipeError`` if a chosen variant cannot run on ``n_ranks`` ranks."""
        for name, allowed, reason in _OF_RANKS:
            if n_ranks > 1 and getattr(self, name) != allowed:
                raise RecipeError(
                    f"tensor_parallel_size {n_ranks} needs {name}={allowed!r}, "
                    f"not {getattr(self, name)!r}: {reason}"
                )

    def check_sums(self, device: torch.device, kernels: str) -> None:
        """Raise ``RecipeError`` if the chosen all-reduce does not work with these kernels.

        kernels: the name of the kernels, "triton" or "torch".
        """
        if self.all_reduce == "one_shot" and kernels != "triton":
            raise RecipeError("all_reduce='one_shot' is a Triton kernel; use 'library' with kernels='torch'")

    def on_ranks(self, n_ranks: int, device: torch.device, kernels: str) -> Recipe:
        """Return this recipe with the fastest all-reduce that ``n_ranks`` ranks can run.

        kernels: as in :meth:`check_sums`.
        """
        can_share = device.type == "cuda" and all(
            torch.cuda.can_device_access_peer(*pair) for pair in permutations(range(n_ranks), 2)
        )
        one_shot = n_ranks > 1 and self.norm == "fused" and kernels == "triton" and can_share
        return replace(self, all_reduce="one_shot") if one_shot else self

    def invariant(self) -> Recipe:
        """Return the batch-invariant form of this recipe.

        It splits no contexts, since where they are split depends on the other sequences of the batch.
        """
        return replace(self, numerics="invariant", attention="paged")


_OF_RANKS = (
    ("exhibit", "none", "exhibits run on one GPU"),
    ("numerics", "fast", "an all-reduce sums in a different order"),
    ("speculation", "none", "drafts are verified on one GPU"),
)


class _Rule(NamedTuple):
    """A requirement: if ``field`` has ``value``, the fields in ``needs`` must have the given variants."""

    field: str
    value: str
    needs: dict[str, str]
    reason: str


_RULES = (
    _Rule("activation", "epilogue", {"norm": "fused"}, "the unfused model runs GELU as a separate operator"),
    _Rule("gemm", "small_m", {"norm": "fused", "activation": "epilogue"}, "its kernels fuse both"),
    _Rule("exhibit", "persistent_layers", {"activation": "epilogue"}, "its one kernel holds whole layers"),
    _Rule("speculation", "ngram", {"exhibit": "none"}, "an exhibit has a step of its own"),
    _Rule("speculation", "draft", {"exhibit": "none"}, "an exhibit has a step of its own"),
    _Rule("all_reduce", "one_shot", {"norm": "fused"}, "its kernel includes the norm"),
    _Rule(
        "numerics",
        "invariant",
        {"attention": "paged", "head": "fused", "gemm": "small_m", "exhibit": "none"},
        "only these kernels have a fixed summation order",
    ),
)


@cache
def recipe_choices() -> dict[str, tuple[str, ...]]:
    """Return the variants of every field of a recipe, by field name."""
    hints = get_type_hints(Recipe)
    return {field.name: get_args(hints[field.name]) for field in fields(Recipe)}


def _climb() -> dict[str, Recipe]:
    first, *later = _CHANGES
    recipes = {first[0]: Recipe()}
    for name, base, change in later:
        recipes[name] = replace(recipes[base], **change)
    return recipes


_SETTLED = MUSEUM["packed_prefill"].as_dict() | {"append": "fused"}  # axes that a recipe does not choose
RECIPES = _climb()
LADDER: dict[str, Rung] = {**MUSEUM, **RECIPES}
BEFORE = {name: base for name, base, _ in (*CHANGES, *_CHANGES)}
BEST_RUNG = "split_kv"


def _side_branches() -> frozenset[str]:
    on_the_way, rung = {"dense"}, BEST_RUNG
    while rung != "dense":
        on_the_way.add(rung)
        rung = BEFORE[rung]
    return frozenset(LADDER) - on_the_way


SIDE_BRANCHES = _side_branches()  # rungs not on the path to the best one


SPECULATION = "draft tokens from the text so far (ngram) or by a smaller model (draft), and verify them"
PROPOSERS = tuple(name for name in recipe_choices()["speculation"] if name != "none")

DEPENDENT_LAUNCH_FROM = 9, 0  # compute capability: programmatic dependent launch came with Hopper
TRITON_FROM = 7, 0  # tensor cores


def best_rung(device: torch.device) -> str:
    """Return the fastest rung that the device can run; GPUs before Hopper lack dependent launch.

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
    """Return ``name`` if it is the name of a rung; raise ``RecipeError`` otherwise.

    name: None means the best rung for ``device``.
    device: None means any device, so that the best rung is ``BEST_RUNG``.
    """
    if name is None:
        return BEST_RUNG if device is None else best_rung(device)
    if not isinstance(name, str) or name not in LADDER:
        raise RecipeError(f"rung {describe(name)} is unknown; use one of {', '.join(LADDER)}")
    return name


def speculating(recipe: str | Rung | None, proposer: str, device: torch.device) -> str | Rung:
    """Return the recipe with this ``speculation``, by name if it is a rung.

    recipe: a rung's name or a recipe; None means the best rung for ``device``.

    Raises ``RecipeError`` if the recipe cannot speculate.
    """
    rung = recipe if isinstance(recipe, Rung) else LADDER[get_rung(recipe, device)]
    if not isinstance(rung, Recipe):
        raise RecipeError(f"rung {describe(recipe)} cannot speculate; {_CHANGES[0][0]} and later rungs can")
    found = replace(rung, speculation=cast(Any, proposer))
    return next((name for name, known in LADDER.items() if known == found), found)


def check_launch(recipe: Rung, device: torch.device) -> None:
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
