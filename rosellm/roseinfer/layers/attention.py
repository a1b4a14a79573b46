"""Attention of a GPU-resident step over the paged cache, including the KV append."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rosellm.models.attention import Attend
from rosellm.models.model import Transformer
from rosellm.models.rope import Rotary
from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.cache.kv_blocks import KVBlockManager
from rosellm.roseinfer.kernels.attention import AttendedRows, append_and_attend_ref
from rosellm.roseinfer.kernels.attention_plan import Plan, Variant, variant_for, whole_rows
from rosellm.roseinfer.kernels.table import Kernels


class Binder(ABC):
    """Builds an attention function over the paged cache, which also appends, for the rows of a state."""

    def __init__(self, kernels: Kernels, blocks: KVBlockManager, model: Transformer) -> None:
        self.kernels, self.blocks, self.model = kernels, blocks, model
        self.config = model.config

    def variant(self, rows: int, longest: int, mean: float) -> str:
        """Return the kernel variant for ``rows`` of at most ``longest`` cached tokens.

        Each variant has its own graphs. mean: average cached tokens per row.
        """
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
    """An ``Attend`` by one kernel, which also rotates and appends; holds all inputs but a layer's q, k, v."""

    kernel: Callable[..., Tensor]
    plan: Plan
    blocks: KVBlockManager
    state: DeviceState
    scale: float
    rotary: Sequence[Rotary | None]

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
            rotary=self.rotary[layer],
            window=self.plan.window,
            plan=self.plan,
        )


class AppendAndAttend(Binder):
    """One kernel per layer rotates, appends and attends; each program reads a row's whole context."""

    choose: Callable[..., Variant] = staticmethod(whole_rows)

    def __init__(self, kernels: Kernels, blocks: KVBlockManager, model: Transformer) -> None:
        super().__init__(kernels, blocks, model)
        self.rotary = [model.rotary(layer) for layer in range(self.config.n_layers)]
        on_gpu = model.device.type == "cuda"
        self.num_sms = torch.cuda.get_device_properties(model.device).multi_processor_count if on_gpu else 1

    def variant(self, rows: int, longest: int, mean: float) -> str:
        c, window = self.config, self.config.window or longest
        seen, mean = min(longest, window), min(mean, window)
        return str(self.choose(rows, c.n_kv_heads, seen, self.num_sms, c.group, c.head_dim, mean))

    def __call__(self, state: DeviceState, variant: str) -> PagedAttention:
        plan = self.kernels.plan_attention(state.positions, Variant.parse(variant), self.config.window)
        attend = self.kernels.append_and_attend
        return PagedAttention(attend, plan, self.blocks, state, self.config.scale, self.rotary)


class TorchAppendAndAttend(Binder):
    """The torch reference; token locations are computed once per step, not once per layer."""

    def __call__(self, state: DeviceState, variant: str) -> Attend:
        blocks, scale = self.blocks, self.config.scale
        rows = AttendedRows(state.table, state.positions, blocks.k_cache[0], self.config.window)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return rows(q, k, v, blocks.k_cache[layer], blocks.v_cache[layer], scale)

        return self.model.positioned(state.positions.clamp_min(0), attend)


class SplitAppendAndAttend(AppendAndAttend):
    """Like :class:`AppendAndAttend`, with contexts split into equal pieces if that pays."""

    choose: Callable[..., Variant] = staticmethod(variant_for)


# Keyed by a recipe's attention and append fields.
BINDERS: dict[tuple[str, str], Callable[[Kernels, KVBlockManager, Transformer], Binder]] = {
    ("paged", "identity_pos"): AppendThenAttend,
    ("paged", "fused"): AppendAndAttend,
    ("split", "fused"): SplitAppendAndAttend,
}


def build_binder(
    attention: str, append: str, kernels: Kernels, blocks: KVBlockManager, model: Transformer
) -> Binder:
    """Return the binder for a recipe's ``attention`` and ``append``."""
    if append == "fused" and kernels.append_and_attend is append_and_attend_ref:
        return TorchAppendAndAttend(kernels, blocks, model)
    return BINDERS[attention, append](kernels, blocks, model)
