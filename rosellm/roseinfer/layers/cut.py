"""The layers of one tensor-parallel rank: the same as a whole model's, plus all-reduces.

``out`` and ``down`` are sharded along their input dimension, so their GEMMs give partial sums, which are
all-reduced before they are added to the residual (Shoeybi et al. 2019).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast

import torch.nn.functional as F
from torch import Tensor, nn

from rosellm.models.model import Block, Projection, Transformer
from rosellm.roseinfer.kernels.peer_sums import make_sum_add_norm, peer_bytes
from rosellm.roseinfer.kernels.table import TRITON_DEPENDENT, Kernels, is_stock
from rosellm.roseinfer.kernels.tile_tables import best
from rosellm.roseinfer.layers.fused import FusedLayers, Layers, fastest_products, plain_layers
from rosellm.roseinfer.layers.products import (
    LibraryProducts,
    PackedProducts,
    Parts,
    PlainProducts,
    SomeRowsProducts,
    activation_apart,
    activation_fused,
    can_pack,
    fastest_parts,
    has_ring,
    ring_qkv_parts_of,
    tuned_or,
)
from rosellm.roseinfer.ranks.group import Ranks

SUMMED_ROWS = 64  # maximum number of rows of a one-shot sum; 512 KB in 16 bits at a width of 4,096
M = TypeVar("M", bound=nn.Module)


class SummedProjection(nn.Module):
    """A projection sharded along its input dimension: all-reduces the GEMM's result, then adds the bias."""

    def __init__(self, projection: Projection, ranks: Ranks) -> None:
        super().__init__()
        self.weight, self.bias, self._ranks = projection.weight, projection.bias, ranks

    def forward(self, x: Tensor) -> Tensor:
        y = self._ranks.summed(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


def summing(model: Transformer, ranks: Ranks) -> Transformer:
    """Return a model with the same weights, in which ``out`` and ``down`` all-reduce their results."""
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
    """Return a shallow copy of a module, whose submodules can be replaced independently."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)  # noqa: SLF001
    return twin


AddNorm = Callable[..., Tensor]
LayersFor = Callable[[int], Layers]


def library_sums(model: Transformer, kernels: Kernels, ranks: Ranks) -> AddNorm:
    """Return an ``add_norm`` that first all-reduces ``delta [1, M, C]`` by NCCL or gloo."""
    return _after_sums(kernels.add_norm, ranks.summed)


def one_shot_sums(model: Transformer, kernels: Kernels, ranks: Ranks) -> AddNorm:
    """Return an ``add_norm`` that first all-reduces ``delta``: in the same kernel for up to SUMMED_ROWS rows.

    There ``delta`` may be several partial sums ``[P, M, C]``. For more rows, NCCL or gloo all-reduces one.
    """
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
    """Return a function that uses ``without`` if there is no delta, as for a model's first norm."""

    def add(*, x: Tensor, delta: Tensor | None = None, **norm: Any) -> Tensor:
        return without(x=x, **norm) if delta is None else with_sum(x=x, delta=delta, **norm)

    return add


def _by_rows(few: AddNorm, many: AddNorm) -> AddNorm:
    return lambda *, x, **norm: (few if len(x) <= SUMMED_ROWS else many)(x=x, **norm)


SUMS: dict[str, Callable[[Transformer, Kernels, Ranks], AddNorm]] = {
    "library": library_sums,
    "one_shot": one_shot_sums,
}


def fastest_whole_products(rows: int, layer_parameters: int) -> Literal["few", "some", "library"]:
    """Return which GEMMs are fastest if K is not split into ranges: "few", "some" or "library".

    Without split-K, a GEMM has fewer programs. The thresholds were measured on whole models before they used
    split-K. layer_parameters: number of parameters per layer.
    """
    return best("whole_products", rows=rows, parameters=layer_parameters)[0]


def cut_layers(
    norm: str, activation: str, gemm: str, all_reduce: str, model: Transformer, kernels: Kernels, ranks: Ranks
) -> tuple[LayersFor, LayersFor]:
    """Return one rank's layers for decode steps and for prefills, like ``fused.build_layers``.

    norm, activation, gemm and all_reduce are fields of a recipe.
    """
    if norm == "separate":
        plain = plain_layers(summing(model, ranks))
        return (lambda rows: plain,) * 2
    kernels = replace(kernels, add_norm=SUMS[all_reduce](model, kernels, ranks))
    fused = activation_fused(model, kernels)
    activated = fused if activation == "epilogue" else activation_apart(model.config)
    library = FusedLayers(model, LibraryProducts(model.blocks, activated), kernels)
    if gemm == "library":
        return (lambda rows: library,) * 2
    if kernels.name == "torch":
        packed = FusedLayers(model, PackedProducts(model), kernels) if can_pack(model) else library
        return (lambda rows: packed,) * 2
    if all_reduce == "one_shot" and has_ring(model, kernels):
        return split_layers(model, kernels, library)
    whole = _variants(model, kernels, library, _whole)
    return (lambda rows: whole[fastest_whole_products(rows, model.config.n_layer_parameters)],) * 2


def split_layers(model: Transformer, kernels: Kernels, library: Layers) -> tuple[LayersFor, LayersFor]:
    """Return one rank's layers for decode steps and for prefills, on a GPU with a ring, by ``one_shot_sums``.

    Up to SUMMED_ROWS rows, they are those of a whole model, except that no GEMM includes a norm: a single row
    has the GEMMs of two, which leave attention room for keys and values in flight.
    """
    parameters, adds_up = model.config.n_layer_parameters, is_stock(kernels, "append_and_attend")
    fastest = fastest_parts(model, kernels)

    def parts(rows: int, n: int, k: int) -> int:
        return fastest(max(2, rows), n, k) if rows <= SUMMED_ROWS else 1

    def layers(qkv_parts: Parts) -> LayersFor:
        variants = _variants(model, kernels, library, parts, qkv_parts)

        def layers_for(rows: int) -> Layers:
            if rows <= SUMMED_ROWS:
                return variants[fastest_products(max(2, rows), parameters, with_ring=True)]
            return variants[fastest_whole_products(rows, parameters)]

        return layers_for

    qkv_parts = tuned_or(ring_qkv_parts_of)
    return layers(lambda rows, n, k: qkv_parts(max(2, rows), n, k) if adds_up else 1), layers(_whole)


def _whole(rows: int, n: int, k: int) -> int:
    return 1


def _variants(
    model: Transformer, kernels: Kernels, library: Layers, parts: Parts, qkv_parts: Parts = _whole
) -> dict[str, Layers]:
    return {
        "few": FusedLayers(model, PlainProducts(model, kernels.few_rows_linear), kernels),
        "some": FusedLayers(model, SomeRowsProducts(model, kernels, parts, qkv_parts), kernels),
        "library": library,
    }
