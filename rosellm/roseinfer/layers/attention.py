"""Attention of a GPU-resident step over the paged cache, including the KV append."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rosellm.models.attention import Attend
from rosellm.models.model import Transformer
from rosellm.models.quantized import QuantizedHeads
from rosellm.models.rope import Rotary
from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.cache.kv_blocks import KVBlocks
from rosellm.roseinfer.kernels import ring, ring_attention
from rosellm.roseinfer.kernels.attention import AttendedRows, append_and_attend_ref
from rosellm.roseinfer.kernels.attention_plan import SHORT, Plan, Variant, ring_rows, variant_for, whole_rows
from rosellm.roseinfer.kernels.table import Kernels, is_stock

NARROW, FEW_HEADS = 1536, 12  # features, and KV heads, at most
SORTED_FROM = 3  # programs per SM


class Binder(ABC):
    """A builder of attention functions, each for the rows of a device state.

    The functions also write new keys and values to the paged cache ``blocks``.
    """

    def __init__(self, kernels: Kernels, blocks: KVBlocks, model: Transformer) -> None:
        self.kernels, self.blocks, self.model = kernels, blocks, model
        self.config = model.config

    def variant(self, rows: int, longest: int, mean: float) -> str:
        """Return the name of the kernel variant to use; each variant has its own graphs.

        rows: number of rows in the step.
        longest: maximum number of cached tokens of a row.
        mean: average number of cached tokens per row.
        """
        return ""  # a single variant

    @abstractmethod
    def __call__(self, state: DeviceState, variant: str) -> Attend: ...


@dataclass(frozen=True)
class PagedAttention:
    """An ``Attend`` by one kernel, which also rotates q and k and appends k and v to the cache.

    kernel: called like ``attention.append_and_attend``.
    plan: the plan of the step.
    blocks: the paged cache.
    state: the rows of the step.
    scale: factor on the scores.
    rotary: each layer's rotation and norms of q and k; None for a layer that has neither.
    """

    kernel: Callable[..., Tensor]
    plan: Plan
    blocks: KVBlocks
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
    """A binder whose kernel rotates, appends and attends; each program reads a row's whole context."""

    def __init__(self, kernels: Kernels, blocks: KVBlocks, model: Transformer) -> None:
        super().__init__(kernels, blocks, model)
        self.rotary = [model.rotary(layer) for layer in range(self.config.n_layers)]
        self.group, on_gpu = self.config.group, model.device.type == "cuda"
        self.num_sms = torch.cuda.get_device_properties(model.device).multi_processor_count if on_gpu else 1

    def choose(self, rows: int, *sizes: Any) -> Variant:
        """Return the launch variant; arguments as in ``attention_plan.variant_for``."""
        return whole_rows(rows, *sizes)

    def variant(self, rows: int, longest: int, mean: float) -> str:
        c, window = self.config, self.config.window or longest
        seen, mean = min(longest, window), min(mean, window)
        return str(self.choose(rows, c.n_kv_heads, seen, self.num_sms, self.group, c.head_dim, mean))

    def __call__(self, state: DeviceState, variant: str) -> PagedAttention:
        plan = self.kernels.plan_attention(state.positions, Variant.parse(variant), self.config.window)
        attend = self.kernels.append_and_attend
        return PagedAttention(attend, plan, self.blocks, state, self.config.scale, self.rotary)


class TorchAppendAndAttend(Binder):
    """A binder that uses the torch reference; cache slots are computed once per step, not once per layer."""

    def __call__(self, state: DeviceState, variant: str) -> Attend:
        blocks, scale = self.blocks, self.config.scale
        rows = AttendedRows(state.table, state.positions, blocks.k_cache[0], self.config.window)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return rows(q, k, v, blocks.k_cache[layer], blocks.v_cache[layer], scale)

        return self.model.positioned(state.positions.clamp_min(0), attend)


class SplitAppendAndAttend(AppendAndAttend):
    """An :class:`AppendAndAttend` that splits contexts into equal pieces where that is faster.

    On Hopper GPUs, keys and values are copied before the queries are ready, where that is faster. For a
    single row, wide models and models with many KV heads do not use it: their GEMMs would slow down by more
    than attention gains, probably because shared memory is taken from the L1 cache that they load through.
    GEMMs of quantised weights, and the ring's, bypass the L1 cache, so that a single row uses it, too, with
    quantised weights if it has more than ``SHORT`` cached tokens.
    """

    def __init__(self, kernels: Kernels, blocks: KVBlocks, model: Transformer) -> None:
        super().__init__(kernels, blocks, model)
        c = model.config
        can_run = is_stock(kernels, "append_and_attend") and ring.runs_on(model.device, model.dtype)
        self.is_quantized = isinstance(blocks.k_cache, QuantizedHeads)
        can_run = can_run and not self.is_quantized
        self.has_ring = can_run and ring_attention.takes(c.group, c.head_dim, blocks.block_size)
        is_narrow = c.d_model <= NARROW and c.n_kv_heads <= FEW_HEADS
        wide_from = SHORT + 1 if model.quantization else math.inf
        self.alone_from = 0 if is_narrow else wide_from  # cached tokens of a single row

    def choose(self, rows: int, kv_heads: int, longest: int, *sizes: Any) -> Variant:
        in_flight = self.has_ring and (rows > 1 or longest >= self.alone_from)
        sizes = rows, kv_heads, longest, *sizes
        chosen = (ring_rows(*sizes) if in_flight else None) or variant_for(*sizes)
        return for_codes(chosen, rows * kv_heads / self.num_sms) if self.is_quantized else chosen


def for_codes(variant: Variant, share: float) -> Variant:
    """Return the variant of a quantised cache, of which one for 16 bits is given.

    share: programs per SM if rows are whole.

    Codes pass through registers: fewer warps, which wait for one another, and more programs are faster. Half
    a tile then has the bytes of a tile of 16 bits. Programs that do not all run at once start with the
    longest row.
    """
    if variant.warps > 4 or variant.stages == 1:
        return variant
    if variant.pieces:
        return variant._replace(tile=32, pieces=2 * variant.pieces, warps=2, stages=3)
    return variant._replace(tile=64, warps=2, stages=3, sort=int(share >= SORTED_FROM))


BINDERS: dict[str, Callable[[Kernels, KVBlocks, Transformer], Binder]] = {
    "paged": AppendAndAttend,
    "split": SplitAppendAndAttend,
}


def build_binder(
    attention: str, kernels: Kernels, blocks: KVBlocks, model: Transformer, one_in_ring: bool = False
) -> Binder:
    """Return the binder for a recipe's ``attention``, "paged" or "split".

    one_in_ring: whether the GEMMs of a single row are those of :mod:`ring`, if the GPU can run them.

    If the kernels are the torch references, the binder is a :class:`TorchAppendAndAttend`.
    """
    if kernels.append_and_attend is append_and_attend_ref:
        return TorchAppendAndAttend(kernels, blocks, model)
    binder = BINDERS[attention](kernels, blocks, model)
    if one_in_ring and isinstance(binder, SplitAppendAndAttend):
        binder.alone_from = 0
    return binder
