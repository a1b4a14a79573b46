"""The four products of each layer: by the vendor's library, packed for oneDNN, or by few-rows kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rosellm.models.model import GPT, Block, Projection
from rosellm.roseinfer.kernels.linear import fold_norm, parts_of
from rosellm.roseinfer.kernels.table import Kernels

Parts = Callable[[int, int, int], int]  # rows, n, k → ranges of K
Norms = list[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]


class Products(Protocol):
    """The four products of each layer. ``norms[layer]``: scale and shift of its two norms."""

    norms: Norms

    def qkv(self, layer: int, x: Tensor) -> Tensor:
        """``[N, C]`` → ``[N, (H + 2 H_kv) D]``, with bias."""

    def out(self, layer: int, x: Tensor) -> Tensor:
        """``[N, C]`` → partial sums without bias, ``[P, N, C]``."""

    def up(self, layer: int, x: Tensor) -> Tensor:
        """``[N, C]`` → ``[N, F]``, with bias and GELU."""

    def down(self, layer: int, x: Tensor) -> Tensor:
        """``[N, F]`` → partial sums without bias, ``[P, N, C]``."""


class LibraryProducts:
    """The vendor library's GEMMs (cuBLAS on a GPU); ``activated`` computes the product with bias and GELU."""

    def __init__(self, model: GPT, activated: Callable[[Projection, Tensor], Tensor]) -> None:
        self.blocks, self.activated = model.blocks, activated
        self.norms: Norms = [
            ((b.ln_1.weight, b.ln_1.bias), (b.ln_2.weight, b.ln_2.bias)) for b in model.blocks
        ]

    def qkv(self, layer: int, x: Tensor) -> Tensor:
        return self.blocks[layer].qkv(x)

    def out(self, layer: int, x: Tensor) -> Tensor:
        return (x @ self.blocks[layer].out.weight)[None]

    def up(self, layer: int, x: Tensor) -> Tensor:
        return self.activated(self.blocks[layer].up, x)

    def down(self, layer: int, x: Tensor) -> Tensor:
        return (x @ self.blocks[layer].down.weight)[None]


def activation_apart(projection: Projection, x: Tensor) -> Tensor:
    """GELU as a separate operator."""
    return F.gelu(projection(x), approximate="tanh")


def activation_in_epilogue(projection: Projection, x: Tensor) -> Tensor:
    """GELU in the GEMM's epilogue (cuBLASLt computes the tanh form); GPU only."""
    return torch._addmm_activation(projection.bias, x, projection.weight, use_gelu=True)


class PackedProducts:
    """On a CPU: weights packed once into oneDNN's layout, which its products read in order."""

    def __init__(self, model: GPT) -> None:
        library = LibraryProducts(model, activation_apart)
        self.norms = library.norms
        self._qkv, self._out, self._up, self._down = (
            [(_packed(p.weight), p.bias) for p in projections]
            for projections in zip(*((b.qkv, b.out, b.up, b.down) for b in model.blocks), strict=True)
        )

    def qkv(self, layer: int, x: Tensor) -> Tensor:
        return _product(x, *self._qkv[layer])

    def out(self, layer: int, x: Tensor) -> Tensor:
        return _product(x, self._out[layer][0])[None]

    def up(self, layer: int, x: Tensor) -> Tensor:
        return _product(x, *self._up[layer], gelu=True)

    def down(self, layer: int, x: Tensor) -> Tensor:
        return _product(x, self._down[layer][0])[None]


def can_pack(model: GPT) -> bool:
    """Whether oneDNN can pack the model's weights."""
    fits = model.device.type == "cpu" and model.dtype == torch.float32
    return fits and torch.backends.mkldnn.is_available()


def packed_head(model: GPT) -> Callable[[Tensor], Tensor]:
    """The LM head with its weights packed once for oneDNN: ``[N, C]`` → ``[N, V]``."""
    packed = _packed(model.lm_head.weight.t())
    return lambda hidden: _product(hidden, packed)


def _packed(weight: Tensor) -> Tensor:
    """A ``[K, N]`` weight in oneDNN's layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.t().contiguous())


def _product(x: Tensor, packed: Tensor, bias: Tensor | None = None, gelu: bool = False) -> Tensor:
    activation, variant = ("gelu", "tanh") if gelu else ("none", "")
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, activation, [], variant)


@dataclass(frozen=True)
class RowWeights:
    """One projection for few rows: weight ``[N, K]``, bias ``[N]``, the weight's sums over K ``[N]`` fp32."""

    weight: Tensor
    bias: Tensor
    sums: Tensor

    @classmethod
    def plain(cls, projection: Projection) -> RowWeights:
        weight = projection.weight.t().contiguous()
        return cls(weight, projection.bias, weight.float().sum(dim=1))

    @classmethod
    def folded(cls, projection: Projection, norm: torch.nn.LayerNorm) -> RowWeights:
        """With the scale and shift of the preceding norm folded in."""
        weight, bias = fold_norm(projection.weight.t(), projection.bias, norm.weight, norm.bias)
        return cls(weight, bias, weight.float().sum(dim=1))


@dataclass(frozen=True)
class LayerWeights:
    """The four projections of one layer."""

    qkv: RowWeights
    out: RowWeights
    up: RowWeights
    down: RowWeights

    @classmethod
    def of(cls, block: Block) -> LayerWeights:
        return cls(
            RowWeights.folded(block.qkv, block.ln_1),
            RowWeights.plain(block.out),
            RowWeights.folded(block.up, block.ln_2),
            RowWeights.plain(block.down),
        )


class SomeRowsProducts:
    """``linear.some_rows_linear`` for all; ``down``, whose inputs are wide, is split along K."""

    def __init__(self, weights: list[LayerWeights], kernels: Kernels, parts_of: Parts = parts_of) -> None:
        self.weights, self.linear, self.parts_of = weights, kernels.some_rows_linear, parts_of
        width = weights[0].qkv.weight.shape[1]
        bare = weights[0].qkv.weight.new_ones(width), weights[0].qkv.weight.new_zeros(width)
        self.norms = [(bare, bare) for _ in weights]

    def qkv(self, layer: int, x: Tensor) -> Tensor:
        w = self.weights[layer].qkv
        return self.linear(x=x, weight=w.weight, bias=w.bias)

    def out(self, layer: int, x: Tensor) -> Tensor:
        return self.linear(x=x, weight=self.weights[layer].out.weight)[None]

    def up(self, layer: int, x: Tensor) -> Tensor:
        w = self.weights[layer].up
        return self.linear(x=x, weight=w.weight, bias=w.bias, gelu=True)

    def down(self, layer: int, x: Tensor) -> Tensor:
        weight = self.weights[layer].down.weight
        parts = self.parts_of(len(x), *weight.shape)
        return self.linear(x=x, weight=weight, parts=parts).view(parts, len(x), -1)
