"""Determine which rungs of the ladder can run a model on a device."""

from __future__ import annotations

import torch

from rosellm.errors import RecipeError
from rosellm.models.arch import Arch
from rosellm.roseinfer.recipe import LADDER, check_launch


def check_rung(rung: str, device: torch.device, arch: Arch) -> None:
    """Raise ``RecipeError``, naming the rung, if the device or the model's shape rules it out."""
    recipe = LADDER[rung]
    if recipe.launch == "autotuned" and device.type == "cpu":
        raise RecipeError(f"rung {rung!r} needs a GPU: a CPU has no launch to tune")
    try:
        check_launch(recipe, device)
        recipe.check_serves(arch)
    except RecipeError as error:
        raise RecipeError(f"rung {rung!r}: {error}") from None


def runnable(device: torch.device, arch: Arch) -> list[str]:
    """Return the rungs that can run such a model on the device, in the ladder's order."""

    def can_run(rung: str) -> bool:
        try:
            check_rung(rung, device, arch)
        except RecipeError:
            return False
        return True

    return [rung for rung in LADDER if can_run(rung)]
