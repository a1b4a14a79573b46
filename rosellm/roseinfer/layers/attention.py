"""Attention of a GPU-resident step over the paged cache, including the append."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rosellm.models.attention import Attend
from rosellm.models.model import Transformer
from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.cache.kv_blocks import KVBlockManager
from rosellm.roseinfer.kernels.attention import AttendedRows, append_and_attend_ref, tile_for
from rosellm.roseinfer.kernels.split import SPLIT_TILE, is_worth_splitting
from rosellm.roseinfer.kernels.table import Kernels

SPLIT = "split"


class Binder(ABC):
    """Binds attention over the cache, which also appends, to the rows of a state."""

    def __init__(self, kernels: Kernels, blocks: KVBlockManager, model: Transformer) -> None:
        self.kernels, self.blocks, self.model = kernels, blocks, model
        self.config = model.config

    def variant(self, rows: int, longest: int) -> str:
        """The kernel variant for ``rows`` of at most ``longest`` cached tokens; each has its own graphs."""
        return ""  # a single variant

    @abstractmethod
    def __call__(self, state: DeviceState, variant: str) -> Attend: ...


class AppendThenAttend(Binder):
    """Two kernels per layer: one stores the new keys and values, the other is paged attention."""

    def __call__(self, state: DeviceState, variant: str) -> Attend:
        kernels, blocks = self.kernels, self.blocks
        positions = state.positions.clamp_min(0)  # [B]
        block = state.table.gather(1, (positions // blocks.block_size).long()[:, None])[:, 0]
        block = torch.where(state.positions >= 0, block, -1)  # inert rows are not written
        slot = positions % blocks.block_size

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            caches = {"k_cache_layer": blocks.k_cache[layer], "v_cache_layer": blocks.v_cache[layer]}
            kernels.kv_append_identity_pos(**caches, key_new=k, value_new=v, block_idx=block, pos=slot)
            return kernels.paged_attention_decode(
                **caches,
                q=q,
                k_new=k,
                v_new=v,
                block_table=state.table,
                context_lens=positions,
                scale=self.config.scale,
                window=self.config.window,
            )

        return self.model.positioned(positions, attend)


@dataclass(frozen=True)
class PagedAttention:
    """An ``Attend`` by a kernel that also appends, with all its inputs besides a layer's q, k and v."""

    kernel: Callable[..., Tensor]
    tile: int
    blocks: KVBlockManager
    state: DeviceState
    scale: float

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.kernel(
            q=q,
            k_new=k,
            v_new=v,
            k_cache_layer=self.blocks.k_cache[layer],
            v_cache_layer=self.blocks.v_cache[layer],
            block_table=self.state.table,
            positions=self.state.positions,
            scale=self.scale,
            tile=self.tile,
        )


class AppendAndAttend(Binder):
    """One kernel per layer does both; its tile fits the longest context."""

    def variant(self, rows: int, longest: int) -> str:
        """The tile, in tokens."""
        return str(tile_for(rows, longest))

    def __call__(self, state: DeviceState, variant: str) -> Attend:
        return self.bound(self.kernels.append_and_attend, int(variant), state)

    def bound(self, kernel: Callable[..., Tensor], tile: int, state: DeviceState) -> Attend:
        attend = PagedAttention(kernel, tile, self.blocks, state, self.config.scale)
        return self.model.positioned(state.positions.clamp_min(0), attend)


class TorchAppendAndAttend(Binder):
    """The torch version; token locations are computed once per step, not once per layer."""

    def __call__(self, state: DeviceState, variant: str) -> Attend:
        blocks = self.blocks
        rows = AttendedRows(state.table, state.positions, blocks.k_cache[0], self.config.window)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return rows(q, k, v, blocks.k_cache[layer], blocks.v_cache[layer], self.config.scale)

        return self.model.positioned(state.positions.clamp_min(0), attend)


class SplitAppendAndAttend(AppendAndAttend):
    """The same, but few sequences with long contexts are split into ranges (``kernels.split``)."""

    def variant(self, rows: int, longest: int) -> str:
        """SPLIT, or the tile, in tokens."""
        return SPLIT if is_worth_splitting(rows, longest) else super().variant(rows, longest)

    def __call__(self, state: DeviceState, variant: str) -> Attend:
        if variant != SPLIT:
            return super().__call__(state, variant)
        return self.bound(self.kernels.split_append_and_attend, SPLIT_TILE, state)


# By a recipe's attention and append fields.
BINDERS: dict[tuple[str, str], Callable[[Kernels, KVBlockManager, Transformer], Binder]] = {
    ("paged", "identity_pos"): AppendThenAttend,
    ("paged", "fused"): AppendAndAttend,
    ("split", "fused"): SplitAppendAndAttend,
}


def build_binder(
    attention: str, append: str, kernels: Kernels, blocks: KVBlockManager, model: Transformer
) -> Binder:
    """The binder of a recipe's ``attention`` and ``append``."""
    theirs = kernels.append_and_attend, kernels.split_append_and_attend
    if append == "fused" and all(kernel is append_and_attend_ref for kernel in theirs):
        return TorchAppendAndAttend(kernels, blocks, model)
    return BINDERS[attention, append](kernels, blocks, model)
