"""The interface of recipes and museum rungs, from which engines are built."""

from __future__ import annotations

import torch

from rosellm.models.arch import Arch


class Rung:
    """A way to decode, with one variant on every axis of the ladder; checks pass unless overridden.

    launch: "fixed", or "dependent" for programmatic dependent launch.
    numerics: "fast" or "invariant" (batch-invariant).
    exhibit: the name of a file in ``notebooks/exhibits``, or "none".
    speculation: how a step drafts further tokens, or "none".
    has_prefix_cache: whether its engine may have a prefix cache.
    """

    launch: str
    numerics: str = "fast"
    exhibit: str = "none"
    speculation: str = "none"
    has_prefix_cache: bool = True

    def as_dict(self) -> dict[str, str]:
        """Return the variant on every axis of the ladder, by axis name."""
        raise NotImplementedError

    def difference(self, other: Rung) -> dict[str, tuple[str, str]]:
        """Return the axes on which ``other`` differs: name → (variant here, variant of ``other``)."""
        mine, theirs = self.as_dict(), other.as_dict()
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}

    def check_serves(self, config: Arch) -> None:
        """Raise ``RecipeError`` if this rung cannot run models of this architecture."""

    def check_ranks(self, n_ranks: int) -> None:
        """Raise ``RecipeError`` if this rung cannot run on ``n_ranks`` ranks."""

    def check_sums(self, device: torch.device, kernels: str) -> None:
        """Raise ``RecipeError`` if this rung's all-reduce does not work with these kernels.

        kernels: the name of the kernels, "triton" or "torch".
        """

    def invariant(self) -> Rung:
        """Return the batch-invariant form of this rung; raise ``RecipeError`` if there is none."""
        raise NotImplementedError
