"""The earlier rungs by name: what each changes, what it supports, and how its step is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from rosellm.errors import RecipeError
from rosellm.ladder import resident, rungs
from rosellm.ladder.dense import Dense
from rosellm.ladder.pools import PooledBlocks
from rosellm.models.model import Transformer
from rosellm.roseinfer.cache.kv_blocks import KVBlocks
from rosellm.roseinfer.kernels.table import Kernels
from rosellm.roseinfer.rung import Rung
from rosellm.roseinfer.steps.step import Step

FIRST = "dense"
# The first rung's variant on each axis, in the order in which the ladder changes them.
AXES = {
    "attention": "dense",
    "mask": "dense",
    "tables": "per_layer",
    "launch": "fixed",
    "runner": "eager",
    "append": "index_put",
    "block_info": "tuple",
    "indices": "fresh",
    "pool": "per_layer",
    "step": "host",
    "prefill": "padded",
    "norm": "separate",
    "activation": "separate",
    "head": "logits",
    "gemm": "library",
    "numerics": "fast",
    "all_reduce": "library",
    "exhibit": "none",
}
# The rungs above the first: name, base rung, and the axis that changes.
CHANGES = (
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
)
STEPS: dict[str, type[Dense]] = {
    "dense": Dense,
    "paged": rungs.Paged,
    "no_mask": rungs.NoMask,
    "pinned_h2d": rungs.PinnedH2D,
    "autotune": rungs.Autotune,
    "cuda_graph": rungs.CudaGraph,
    "triton_append": rungs.TritonAppend,
    "full_batch": rungs.FullBatch,
    "identity_pos": rungs.IdentityPos,
    "mutable_block_info": rungs.MutableBlockInfo,
    "reused_index_buffers": rungs.ReusedIndexBuffers,
    "resident_tables": rungs.ResidentTables,
    "one_table": rungs.OneTable,
}


@dataclass(frozen=True)
class MuseumRung(Rung):
    """An earlier rung of the ladder.

    axes: the name of each axis and this rung's variant, for tables and records; they have no effect.
    """

    name: str
    axes: tuple[tuple[str, str], ...]

    @property
    def launch(self) -> str:  # type: ignore[override]
        return self.as_dict()["launch"]

    @property
    def has_prefix_cache(self) -> bool:  # type: ignore[override]
        return self.name not in STEPS

    def as_dict(self) -> dict[str, str]:
        """Return every axis of the ladder with this rung's variant."""
        return dict(self.axes)

    def check_ranks(self, n_ranks: int) -> None:
        """Raise ``RecipeError`` for more than one rank, which needs a later rung."""
        if n_ranks > 1:
            raise RecipeError(
                f"tensor_parallel_size {n_ranks} needs rung 'fused_append' or a later one, not {self.name!r}"
            )

    def invariant(self) -> Rung:
        """Raise ``RecipeError``: no earlier rung has a fixed summation order."""
        raise RecipeError(f"deterministic=True needs rung 'small_gemm' or a later one, not {self.name!r}")

    def build_cache(
        self, sizes: tuple[int, ...], device: torch.device, dtype: torch.dtype
    ) -> PooledBlocks | None:
        """Return the cache of a host-driven rung, or None to use the cache of later rungs.

        sizes: (L, N_BLOCKS, H_kv, BLOCK_SIZE, D).
        """
        if self.name not in STEPS:
            return None
        step = STEPS[self.name]
        return PooledBlocks(sizes, device, dtype, step.pool_kind, step.pool_of(sizes[0]))

    def build_step(
        self,
        model: Transformer,
        blocks: KVBlocks,
        kernels: Kernels,
        n_rows: int,
        max_model_len: int,
        parts: Callable[[], dict[str, Any]],
    ) -> Step:
        """Build the rung's step.

        n_rows: maximum number of sequences in a step.
        max_model_len: maximum number of tokens of a sequence.
        parts: returns the arguments of a ``Worker``; called only for GPU-resident steps.
        """
        if self.name in STEPS:
            return STEPS[self.name](model, cast(PooledBlocks, blocks), kernels, n_rows, max_model_len)
        return getattr(resident, self.name)(model, kernels, parts())


def _museum() -> dict[str, MuseumRung]:
    axes: dict[str, dict[str, str]] = {FIRST: AXES}
    for name, base, change in CHANGES:
        axes[name] = axes[base] | change
    return {name: MuseumRung(name, tuple(own.items())) for name, own in axes.items()}


MUSEUM = _museum()
