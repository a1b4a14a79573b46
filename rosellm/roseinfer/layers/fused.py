"""The model from token ids to final hidden states, as a decode step runs it: plain or with fused kernels.

Each variant is called like the model, with ids and positions ``[N]`` int32 (a negative position marks an
inert row) and an ``Attend``, and returns the normalised hidden states ``[N, C]``. Variants transform copies
of the weights; the model is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rosellm.models.attention import Attend
from rosellm.models.model import GPT, split_heads
from rosellm.roseinfer.kernels.linear import FEW_ROWS, SOME_ROWS
from rosellm.roseinfer.kernels.table import Kernels
from rosellm.roseinfer.layers.products import (
    LayerWeights,
    LibraryProducts,
    PackedProducts,
    Products,
    RowWeights,
    SomeRowsProducts,
    activation_apart,
    activation_in_epilogue,
    can_pack,
)

Layers = Callable[[Tensor, Tensor, Attend], Tensor]


def plain_layers(model: GPT) -> Layers:
    """The model itself."""

    def layers(ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return model(ids, positions.clamp_min(0), attend)

    return layers


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
            attended = attend(layer, *split_heads(products.qkv(layer, h), model.config))  # [N, H, D]
            y = products.out(layer, attended.reshape(len(x), -1))
            scale, shift = norms[2 * layer + 1]
            h = self.add_norm(x=x, delta=y, bias=block.out.bias, scale=scale, shift=shift, eps=eps)
            y = products.down(layer, products.up(layer, h))
            scale, shift = norms[2 * layer + 2]
            h = self.add_norm(x=x, delta=y, bias=block.down.bias, scale=scale, shift=shift, eps=eps)
        return h


class FewRowsLayers:
    """Five kernels per layer: the norms, GELU and residual sums are fused into the products."""

    def __init__(self, model: GPT, weights: list[LayerWeights], kernels: Kernels) -> None:
        self.model, self.weights = model, weights
        self.embed, self.add_norm, self.linear = kernels.embed, kernels.add_norm, kernels.few_rows_linear

    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        model, eps = self.model, self.model.config.norm_eps
        x = embedded(self.embed, model, ids, positions)  # [N, C]
        for layer, w in enumerate(self.weights):
            qkv = self._normed(x, w.qkv, eps)
            attended = attend(layer, *split_heads(qkv, model.config))  # [N, H, D]
            self._added(attended.reshape(len(x), -1), w.out, x)
            hidden = self._normed(x, w.up, eps, gelu=True)  # [N, F]
            self._added(hidden, w.down, x)
        return self.add_norm(x=x, scale=model.ln_f.weight, shift=model.ln_f.bias, eps=eps)

    def _normed(self, x: Tensor, w: RowWeights, eps: float, gelu: bool = False) -> Tensor:
        return self.linear(x=x, weight=w.weight, bias=w.bias, column_sums=w.sums, eps=eps, gelu=gelu)

    def _added(self, x: Tensor, w: RowWeights, residual: Tensor) -> None:
        self.linear(x=x, weight=w.weight, bias=w.bias, residual=residual)


def embedded(embed: Callable[..., Tensor], model: GPT, ids: Tensor, positions: Tensor) -> Tensor:
    tokens, places = model.token_embedding.weight, model.position_embedding.weight
    return embed(ids=ids, positions=positions, tokens=tokens, places=places)


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
