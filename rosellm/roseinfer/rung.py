"""What an engine is built by: the interface of recipes, and of the rungs of the museum."""

from __future__ import annotations

import torch

from rosellm.models.arch import Arch
from rosellm.roseinfer.sampling import SamplingParams


class Rung:
    """A way to decode: its variant on every axis, and what it supports. Checks pass unless overridden."""

    launch: str
    numerics: str = "fast"
    exhibit: str = "none"
    has_prefix_cache: bool = True

    def as_dict(self) -> dict[str, str]:
        """Return every axis of the ladder with its variant."""
        raise NotImplementedError

    def difference(self, other: Rung) -> dict[str, tuple[str, str]]:
        """Return the axes in which ``other`` differs: name → (this variant, the other variant)."""
        mine, theirs = self.as_dict(), other.as_dict()
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}

    def check_serves(self, config: Arch) -> None:
        """Raise ``RecipeError``, with the reason, if it cannot run models of this architecture."""

    def check_ranks(self, n_ranks: int) -> None:
        """Raise ``RecipeError``, with the reason, if it cannot run on ``n_ranks`` ranks."""

    def check_sums(self, device: torch.device, kernels: str) -> None:
        """Raise ``RecipeError``, with the reason, if its all-reduce does not work with these kernels."""

    def check_request(self, params: SamplingParams) -> None:
        """Raise ``SamplingError`` if it does not support these parameters."""

    def invariant(self) -> Rung:
        """Return the variant with a fixed summation order; raise ``RecipeError`` if there is none."""
        raise NotImplementedError
