"""The model between token ids and the final hidden states, as a decode step runs it: plain, or with fused
kernels.

Each variant is called as the model is, with ids and positions ``[N]`` int32 (a negative position marks an
inert row) and an ``Attend``, and gives the normalised hidden states ``[N, C]``. Weights are transformed from
outside; the model stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rosellm.roseinfer.fused_linear import FEW_ROWS, SOME_ROWS, fold_norm, parts_of
from rosellm.roseinfer.kernels import Kernels
from rosellm.rosetrainer.attention import Attend
from rosellm.rosetrainer.config import ModelConfig
from rosellm.rosetrainer.model import GPT, Projection

Layers = Callable[[Tensor, Tensor, Attend], Tensor]


def plain_layers(model: GPT) -> Layers:
    """The model itself."""

    def layers(ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return model(ids, positions.clamp_min(0), attend)

    return layers


class Products(Protocol):
    """The four products of each layer. ``norms[layer]`` are scale and shift of its two norms."""

    norms: list[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]

    def qkv(self, layer: int, x: Tensor) -> Tensor:
        """``[N, C]`` → ``[N, (H + 2 H_kv) D]``, with bias."""
        ...

    def out(self, layer: int, x: Tensor) -> Tensor:
        """``[N, C]`` → parts of a sum without bias, ``[P, N, C]``."""
        ...

    def up(self, layer: int, x: Tensor) -> Tensor:
        """``[N, C]`` → ``[N, F]``, with bias and GELU."""
        ...

    def down(self, layer: int, x: Tensor) -> Tensor:
        """``[N, F]`` → parts of a sum without bias, ``[P, N, C]``."""
        ...


class LibraryProducts:
    """The vendor library's GEMMs (cuBLAS on a GPU); ``activated`` computes the product with bias and GELU."""

    def __init__(self, model: GPT, activated: Callable[[Projection, Tensor], Tensor]) -> None:
        self.blocks, self.activated = model.blocks, activated
        self.norms = [((b.ln_1.weight, b.ln_1.bias), (b.ln_2.weight, b.ln_2.bias)) for b in model.blocks]

    def qkv(self, layer: int, x: Tensor) -> Tensor:
        return self.blocks[layer].qkv(x)

    def out(self, layer: int, x: Tensor) -> Tensor:
        return (x @ self.blocks[layer].out.weight)[None]

    def up(self, layer: int, x: Tensor) -> Tensor:
        return self.activated(self.blocks[layer].up, x)

    def down(self, layer: int, x: Tensor) -> Tensor:
        return (x @ self.blocks[layer].down.weight)[None]


def activation_apart(projection: Projection, x: Tensor) -> Tensor:
    """GELU as an operator of its own."""
    return F.gelu(projection(x), approximate="tanh")


def activation_in_epilogue(projection: Projection, x: Tensor) -> Tensor:
    """GELU in the GEMM's epilogue (cuBLASLt computes the tanh form). On a GPU only."""
    return torch._addmm_activation(projection.bias, x, projection.weight, use_gelu=True)


class PackedProducts:
    """On a CPU: weights packed once for oneDNN, whose products read them in the order they lie in."""

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
    """Whether oneDNN can take packed copies of the model's weights."""
    fits = model.device.type == "cpu" and model.dtype == torch.float32
    return fits and torch.backends.mkldnn.is_available()


def packed_head(model: GPT) -> Callable[[Tensor], Tensor]:
    """The LM head with its weights packed once for oneDNN: ``[N, C]`` → ``[N, V]``."""
    packed = _packed(model.lm_head.weight.t())
    return lambda hidden: _product(hidden, packed)


def _packed(weight: Tensor) -> Tensor:
    """A ``[K, N]`` weight in oneDNN's own order."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.t().contiguous())


def _product(x: Tensor, packed: Tensor, bias: Tensor | None = None, gelu: bool = False) -> Tensor:
    activation = ("gelu", [], "tanh") if gelu else ("none", [], "")
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, *activation)


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
        """With the scale and shift of the norm before it folded in."""
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
    def of(cls, block) -> LayerWeights:
        return cls(
            RowWeights.folded(block.qkv, block.ln_1),
            RowWeights.plain(block.out),
            RowWeights.folded(block.up, block.ln_2),
            RowWeights.plain(block.down),
        )


class SomeRowsProducts:
    """Tiles of ``fused_linear.some_rows_linear``; the wide inputs of ``down`` in parts."""

    def __init__(
        self,
        weights: list[LayerWeights],
        kernels: Kernels,
        parts_of: Callable[[int, int, int], int] = parts_of,
    ) -> None:
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


class FusedLayers:
    """Residual sum, bias and LayerNorm are one kernel between the products."""

    def __init__(self, model: GPT, products: Products, kernels: Kernels) -> None:
        self.model, self.products = model, products
        self.embed, self.add_norm = kernels.embed, kernels.add_norm
        self.norms = [norm for pair in products.norms for norm in pair]
        self.norms.append((model.ln_f.weight, model.ln_f.bias))

    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        model, products, norms = self.model, self.products, self.norms
        eps = model.config.norm_eps
        x = embedded(self.embed, model, ids, positions)  # [N, C]
        h = self.add_norm(x=x, scale=norms[0][0], shift=norms[0][1], eps=eps)
        for layer, block in enumerate(model.blocks):
            mixed = attend(layer, *split_heads(products.qkv(layer, h), model.config))  # [N, H, D]
            y = products.out(layer, mixed.reshape(len(x), -1))
            scale, shift = norms[2 * layer + 1]
            h = self.add_norm(x=x, delta=y, bias=block.out.bias, scale=scale, shift=shift, eps=eps)
            y = products.down(layer, products.up(layer, h))
            scale, shift = norms[2 * layer + 2]
            h = self.add_norm(x=x, delta=y, bias=block.down.bias, scale=scale, shift=shift, eps=eps)
        return h


class FewRowsLayers:
    """Five kernels a layer: the norms, GELU and residual sums are parts of the products."""

    def __init__(self, model: GPT, weights: list[LayerWeights], kernels: Kernels) -> None:
        self.model, self.weights = model, weights
        self.embed, self.add_norm, self.linear = kernels.embed, kernels.add_norm, kernels.few_rows_linear

    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        model, eps = self.model, self.model.config.norm_eps
        x = embedded(self.embed, model, ids, positions)  # [N, C]
        for layer, w in enumerate(self.weights):
            qkv = self._normed(x, w.qkv, eps)
            mixed = attend(layer, *split_heads(qkv, model.config))  # [N, H, D]
            self._added(mixed.reshape(len(x), -1), w.out, x)
            hidden = self._normed(x, w.up, eps, gelu=True)  # [N, F]
            self._added(hidden, w.down, x)
        return self.add_norm(x=x, scale=model.ln_f.weight, shift=model.ln_f.bias, eps=eps)

    def _normed(self, x: Tensor, w: RowWeights, eps: float, gelu: bool = False) -> Tensor:
        return self.linear(x=x, weight=w.weight, bias=w.bias, column_sums=w.sums, eps=eps, gelu=gelu)

    def _added(self, x: Tensor, w: RowWeights, residual: Tensor) -> None:
        self.linear(x=x, weight=w.weight, bias=w.bias, residual=residual)


def embedded(embed, model: GPT, ids: Tensor, positions: Tensor) -> Tensor:
    return embed(
        ids=ids,
        positions=positions,
        tokens=model.token_embedding.weight,
        places=model.position_embedding.weight,
    )


def split_heads(qkv: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """``[N, (H + 2 H_kv) D]`` → q ``[N, H, D]``, k and v ``[N, H_kv, D]``, views."""
    n_kv = config.n_kv_heads
    return qkv.view(len(qkv), -1, config.head_dim).split((config.n_heads, n_kv, n_kv), dim=1)


def build_layers(
    norm: str, activation: str, gemm: str, model: GPT, kernels: Kernels
) -> Callable[[int], Layers]:
    """Number of rows → the layers that run them; the arguments are fields of a recipe."""
    if norm == "separate":
        plain = plain_layers(model)
        return lambda rows: plain
    activated = activation_apart
    if activation == "epilogue" and model.device.type == "cuda":
        activated = activation_in_epilogue
    library = FusedLayers(model, LibraryProducts(model, activated), kernels)
    if gemm == "library":
        return lambda rows: library
    if kernels.name == "torch":
        packed = FusedLayers(model, PackedProducts(model), kernels) if can_pack(model) else library
        return lambda rows: packed
    weights = [LayerWeights.of(block) for block in model.blocks]
    few = FewRowsLayers(model, weights, kernels)
    some = FusedLayers(model, SomeRowsProducts(weights, kernels), kernels)
    return lambda rows: few if rows <= FEW_ROWS else some if rows <= SOME_ROWS else library
