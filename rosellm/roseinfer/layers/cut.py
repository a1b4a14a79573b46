"""Layers and head of one rank's part of a model: as for a whole one, with sums and gathers over the ranks.

``out`` and ``down`` are cut by columns, so their products are partial sums: each is summed over the ranks
before the residual takes it (Shoeybi et al. 2019). Of the head each rank has some words: it finds its best of
them, and the ranks' best are gathered.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rosellm.errors import RecipeError
from rosellm.models.model import Block, Projection, Transformer
from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.cache.token_counts import TokenCounts
from rosellm.roseinfer.kernels.few_rows import FEW_ROWS
from rosellm.roseinfer.kernels.linear import some_rows
from rosellm.roseinfer.kernels.peer_sums import SymmetricSums, make_sum_add_norm, peer_bytes
from rosellm.roseinfer.kernels.table import TRITON_DEPENDENT, Kernels
from rosellm.roseinfer.layers.choosers import Chooser, LogitsChooser, fp32_product
from rosellm.roseinfer.layers.fused import FusedLayers, Layers, plain_layers
from rosellm.roseinfer.layers.products import (
    FewRowsProducts,
    LibraryProducts,
    PackedProducts,
    SomeRowsProducts,
    activation_apart,
    activation_fused,
    can_pack,
    packed_head,
)
from rosellm.roseinfer.ranks.group import Ranks

SUMMED_ROWS = 64  # up to which every rank reads all of a sum's rows, 512 KB at most for a width of 4,096
Logits = Callable[[Tensor], Tensor]
M = TypeVar("M", bound=nn.Module)


class SummedProjection(nn.Module):
    """A projection cut by columns: its product is summed over the ranks, and then gets its bias."""

    def __init__(self, projection: Projection, ranks: Ranks) -> None:
        super().__init__()
        self.weight, self.bias, self._ranks = projection.weight, projection.bias, ranks

    def forward(self, x: Tensor) -> Tensor:
        y = self._ranks.summed(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


def summing(model: Transformer, ranks: Ranks) -> Transformer:
    """The same model and weights, with ``out`` and ``down`` summed over the ranks."""
    whole = _twin(model)
    blocks = nn.ModuleList(_summing_block(block, ranks) for block in model.blocks)
    whole.blocks = cast(Sequence[Block], blocks)
    return whole


def _summing_block(block: Block, ranks: Ranks) -> Block:
    twin = _twin(block)
    for name in ("out", "down"):
        setattr(twin, name, SummedProjection(getattr(block, name), ranks))
    return twin


def _twin(module: M) -> M:
    """A module with the same parts, which may be replaced."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


AddNorm = Callable[..., Tensor]


def library_sums(model: Transformer, kernels: Kernels, ranks: Ranks) -> AddNorm:
    """``norm.add_norm`` after a sum of ``delta [1, M, C]`` over the ranks by NCCL, or gloo."""
    return _after_sums(kernels.add_norm, ranks.summed)


def symmetric_sums(model: Transformer, kernels: Kernels, ranks: Ranks) -> AddNorm:
    """The same with torch's one-shot sum over symmetric memory for few rows; more are the library's."""
    if model.device.type != "cuda":
        raise RecipeError("all_reduce='symmetric' needs GPUs; use 'library' or 'one_shot'")
    n_bytes = SUMMED_ROWS * model.config.d_model * model.dtype.itemsize
    few = _after_sums(kernels.add_norm, SymmetricSums(ranks.peers(n_bytes), n_bytes))
    return _by_rows(few, library_sums(model, kernels, ranks))


def one_shot_sums(model: Transformer, kernels: Kernels, ranks: Ranks) -> AddNorm:
    """Sum, residual and norm in one kernel for few rows; more are the library's."""
    if kernels.name != "triton":
        raise RecipeError("all_reduce='one_shot' is a Triton kernel; kernels='torch' have 'library'")
    width, itemsize = model.config.d_model, model.dtype.itemsize
    peers = ranks.peers(peer_bytes(SUMMED_ROWS, width, itemsize, ranks.part.size))
    dependent = kernels is TRITON_DEPENDENT
    few = make_sum_add_norm(peers, SUMMED_ROWS, dependent)
    return _by_rows(_or_without_sum(few, kernels.add_norm), library_sums(model, kernels, ranks))


def _after_sums(add_norm: AddNorm, summed: Callable[[Tensor], Tensor]) -> AddNorm:
    def add_summed(*, x: Tensor, delta: Tensor | None = None, **norm: Any) -> Tensor:
        return add_norm(x=x, delta=None if delta is None else summed(delta), **norm)

    return add_summed


def _or_without_sum(with_sum: AddNorm, without: AddNorm) -> AddNorm:
    """The first norm of a model has nothing to add."""

    def add(*, x: Tensor, delta: Tensor | None = None, **norm: Any) -> Tensor:
        return without(x=x, **norm) if delta is None else with_sum(x=x, delta=delta, **norm)

    return add


def _by_rows(few: AddNorm, many: AddNorm) -> AddNorm:
    return lambda *, x, **norm: (few if len(x) <= SUMMED_ROWS else many)(x=x, **norm)


SUMS: dict[str, Callable[[Transformer, Kernels, Ranks], AddNorm]] = {
    "library": library_sums,
    "symmetric": symmetric_sums,
    "one_shot": one_shot_sums,
}


def cut_layers(
    norm: str, activation: str, gemm: str, all_reduce: str, model: Transformer, kernels: Kernels, ranks: Ranks
) -> Callable[[int], Layers]:
    """What ``fused.build_layers`` is for a whole model; ``all_reduce`` is a field of a recipe, too."""
    if norm == "separate":
        plain = plain_layers(summing(model, ranks))
        return lambda rows: plain
    kernels = replace(kernels, add_norm=SUMS[all_reduce](model, kernels, ranks))
    fused = activation_fused(model, kernels)
    activated = fused if activation == "epilogue" else activation_apart(model.config)
    library = FusedLayers(model, LibraryProducts(model, activated), kernels)
    if gemm == "library":
        return lambda rows: library
    if kernels.name == "torch":
        packed = FusedLayers(model, PackedProducts(model), kernels) if can_pack(model) else library
        return lambda rows: packed
    few, most = FewRowsProducts(model, kernels), some_rows(model.config.n_layer_parameters)
    some = SomeRowsProducts(model, kernels, lambda *_: 1)  # one sum, not one for each range of K
    few_layers, some_layers = FusedLayers(model, few, kernels), FusedLayers(model, some, kernels)
    return lambda rows: few_layers if rows <= FEW_ROWS else some_layers if rows <= most else library


class GatheredLogits:
    """All logits ``[n, V]`` of hidden states ``[n, C]``; own: those of this rank's words."""

    def __init__(self, own: Logits, model: Transformer, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks
        self._vocabulary = model.config.vocab_size
        self._missing = ranks.part.share(model.whole) - len(model.words)

    def __call__(self, hidden: Tensor) -> Tensor:
        own = F.pad(self._own(hidden), (0, self._missing))  # [n, share]
        gathered = self._ranks.gathered(own.contiguous())  # [ranks, n, share]
        return gathered.transpose(0, 1).flatten(1)[:, : self._vocabulary]


class CutChooser(LogitsChooser):
    """Greedy tokens from each rank's best token and one small gather; others from all logits."""

    def __init__(
        self, model: Transformer, kernels: Kernels, counts: TokenCounts, own: Logits, ranks: Ranks
    ) -> None:
        super().__init__(GatheredLogits(own, model, ranks), kernels, counts)
        self._best, self._ranks = kernels.best_tokens, ranks
        self._weight, self._first = model.lm_head.weight, model.words.start

    def __call__(self, hidden: Tensor, state: DeviceState, mode: str) -> tuple[Tensor | None, Tensor]:
        """See ``choosers.Chooser``."""
        if mode != "greedy":
            return super().__call__(hidden, state, mode)
        values, indices = self._best(
            hidden=hidden,
            weight=self._weight,
            temperature=state.temperatures,
            seeds=state.seeds,
            positions=state.positions,
            sampled=False,
        )
        return self._gathered(values, indices)

    def _gathered(self, values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Tiles ``[n, TILES]`` of this rank → the best of each rank, ``[n, ranks]``."""
        best, tile = values.max(dim=1)
        token = indices.gather(1, tile[:, None])[:, 0] + self._first
        gathered = self._ranks.gathered(torch.stack((best.view(torch.int32), token)))  # [ranks, 2, n]
        values, indices = gathered.permute(1, 2, 0).contiguous()
        return values.view(torch.float32), indices


def cut_chooser(
    head: str, model: Transformer, kernels: Kernels, counts: TokenCounts, ranks: Ranks
) -> Chooser:
    """What ``choosers.build_chooser`` is for a whole model."""
    if head == "logits":
        return LogitsChooser(GatheredLogits(model.logits, model, ranks), kernels, counts)
    if kernels.name == "torch" and can_pack(model):
        return CutChooser(model, kernels, counts, packed_head(model), ranks)
    weight, n_words = model.padded_head, len(model.words)
    return CutChooser(model, kernels, counts, lambda hidden: fp32_product(hidden, weight)[:, :n_words], ranks)
