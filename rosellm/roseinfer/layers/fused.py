"""From token ids to final hidden states, in a decode step or prefill: the plain model, or fused kernels.

Each variant is called like the model, with ids and positions ``[N]`` int32 (a negative position marks an
inert row) and an ``Attend`` that rotates q and k itself, and returns the normalised hidden states ``[N, C]``.
All but packed GEMMs read the model's own weights. Each variant launches the same kernels for every layer, so
running the first layers alone loads them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal, Protocol, cast

from torch import Tensor, nn

from rosellm.models.attention import Attend
from rosellm.models.model import Projection, Transformer, split_heads
from rosellm.models.quantized import ROW_FORMS, RowFormat
from rosellm.roseinfer.kernels import ring
from rosellm.roseinfer.kernels.few_rows import FEW_ROWS
from rosellm.roseinfer.kernels.table import Kernels, is_stock
from rosellm.roseinfer.kernels.tile_tables import best
from rosellm.roseinfer.kernels.tuned import kind_of
from rosellm.roseinfer.layers.products import (
    ALL,
    LayerWeights,
    LibraryProducts,
    NormedWeights,
    PackedProducts,
    Parts,
    Products,
    QuantizedProducts,
    SomeRowsProducts,
    activation_apart,
    activation_fused,
    can_pack,
    can_scale,
    has_ring,
    quantized_parts,
    ring_qkv_parts_of,
    tuned_or,
    whole_blocks,
)

LARGE_LAYER = 100_000_000  # parameters


class Layers(Protocol):
    """A variant of the layers. n_layers: number of layers that must run, from the first; None for all."""

    def __call__(
        self, ids: Tensor, positions: Tensor, attend: Attend, n_layers: int | None = None
    ) -> Tensor: ...


def plain_layers(model: Transformer) -> Layers:
    """Return the model's own layers, which always run all.

    Inert rows, whose position is negative, are computed at position 0.
    """

    def layers(ids: Tensor, positions: Tensor, attend: Attend, n_layers: int | None = None) -> Tensor:
        return model.layers(ids, positions.clamp_min(0), attend)

    return layers


class FusedLayers:
    """Layers with one kernel for residual sum, bias and norm between GEMMs.

    That kernel also quantises the input of ``qkv`` and ``up``, if products require it.
    """

    def __init__(self, model: Transformer, products: Products, kernels: Kernels) -> None:
        self.model, self.products = model, products
        self.embed, self.add_norm = kernels.embed, kernels.add_norm
        form = products.form
        self.inner_norm = self.add_norm if form is None else partial(self.add_norm, form=form)
        norms = [norm for block in model.blocks for norm in (block.norm_1, block.norm_2)]
        self.norms = [norm_arguments(norm) for norm in (*norms, model.norm)]

    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend, n_layers: int | None = None) -> Tensor:
        model, products, norms = self.model, self.products, self.norms
        x, y, bias = embedded(self.embed, model, ids, positions), None, None  # [N, C]
        least = None if n_layers is None else n_layers + 1  # the norm between layers may be another kernel
        for layer, block in enumerate(islice(model.blocks, least)):
            h = self.inner_norm(x=x, delta=y, bias=bias, **norms[2 * layer])
            attended = attend(layer, *split_heads(products.qkv(layer, h), model.config))  # [N, H, D]
            y = products.out(layer, attended.flatten(1))
            h = self.inner_norm(x=x, delta=y, bias=block.out.bias, **norms[2 * layer + 1])
            y, bias = products.down(layer, products.up(layer, h)), block.down.bias
        return self.add_norm(x=x, delta=y, bias=bias, **norms[-1])


class FewRowsLayers:
    """Layers with norms, activation and residual sums fused into their four GEMMs."""

    def __init__(self, model: Transformer, kernels: Kernels) -> None:
        self.model, self.weights = model, [LayerWeights.of(block) for block in model.blocks]
        self.embed, self.add_norm, self.linear = kernels.embed, kernels.add_norm, kernels.few_rows_linear
        self.norm = norm_arguments(model.norm)

    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend, n_layers: int | None = None) -> Tensor:
        model, activation = self.model, self.model.config.mlp
        x = embedded(self.embed, model, ids, positions)  # [N, C]
        for layer, block in enumerate(islice(model.blocks, n_layers)):
            w = self.weights[layer]
            qkv = self._normed(x, w.qkv, "none")
            attended = attend(layer, *split_heads(qkv, model.config))  # [N, H, D]
            self._added(attended.flatten(1), block.out, x)
            self._added(self._normed(x, w.up, activation), block.down, x)
        return self.add_norm(x=x, **self.norm)

    def _normed(self, x: Tensor, w: NormedWeights, activation: str) -> Tensor:
        return self.linear(x=x, weight=w.weight, bias=w.bias, norm=w.norm, activation=activation)

    def _added(self, x: Tensor, projection: Projection, residual: Tensor) -> None:
        self.linear(x=x, weight=projection.weight, bias=projection.bias, residual=residual)


def norm_arguments(norm: nn.LayerNorm | nn.RMSNorm) -> dict[str, Any]:
    """Return the arguments of ``norm.add_norm`` for this norm."""
    shift = norm.bias if isinstance(norm, nn.LayerNorm) else None
    return {"scale": norm.weight, "shift": shift, "eps": norm.eps}


def embedded(embed: Callable[..., Tensor], model: Transformer, ids: Tensor, positions: Tensor) -> Tensor:
    places = model.position_embedding
    table, tokens = None if places is None else places.weight, model.token_embedding.weight
    dtype = {} if isinstance(tokens, Tensor) else {"dtype": model.dtype}
    return embed(ids=ids, positions=positions, tokens=tokens, places=table, **dtype)


def fastest_products(
    rows: int, layer_parameters: int, with_ring: bool = False
) -> Literal["few", "some", "library"]:
    """Return which GEMMs make whole steps fastest on an H200: "few", "some" or "library".

    The larger a layer, the smaller the number of rows up to which fusing norms is worthwhile, and up to which
    our kernels are faster than cuBLAS.

    layer_parameters: number of parameters per layer.
    with_ring: whether "some" includes :func:`ring.ring_linear`.
    """
    if with_ring and (tuned := kind_of(rows, layer_parameters)):
        return tuned
    if with_ring and 2 <= rows <= ring.MOST_ROWS:
        return "some"
    return best("products", rows=rows, parameters=layer_parameters)[0]


@dataclass(frozen=True)
class FastestLayers:
    """A function from the number of rows to the fastest layers.

    variants: the layers by the names of :func:`fastest_products`.
    layer_parameters, with_ring: as in :func:`fastest_products`.
    """

    variants: dict[str, Layers]
    layer_parameters: int
    with_ring: bool

    def __call__(self, rows: int) -> Layers:
        return self.variants[fastest_products(rows, self.layer_parameters, self.with_ring)]


@dataclass(frozen=True)
class QuantizedLayers:
    """A function from the number of rows to the layers of a quantised model, on a GPU with a ring.

    up_to: pairs of a limit of rows, in ascending order, and the layers up to it.
    """

    up_to: tuple[tuple[float, FusedLayers], ...]

    def __call__(self, rows: int) -> FusedLayers:
        return next(layers for limit, layers in self.up_to if rows <= limit)

    def tunable(self, rows: int) -> Collection[str]:
        """Return the names of the GEMMs that a tuner can choose for."""
        products = self(rows).products
        return products.tunable if isinstance(products, QuantizedProducts) else ()


def quantized_layers(
    model: Transformer, kernels: Kernels, qkv_parts: Parts | None, dequantized: FusedLayers
) -> QuantizedLayers:
    """Return the layers of a quantised model for any number of rows.

    Up to ``FEW_ROWS`` rows, activations have two digits: there, reading the weights takes longer than the
    second GEMM. With more rows, they have one. For FP8 and more than 128 rows, the vendor's library is
    faster for one GEMM or all.

    dequantized: layers with weights of 16 bits, which are faster for many rows if codes have 4 bits.
    """
    form = cast(str, model.quantization)

    def layers(digits: int, library: Collection[str] = ()) -> FusedLayers:
        products = QuantizedProducts(model, kernels, RowFormat(ROW_FORMS[form], digits), library, qkv_parts)
        return FusedLayers(model, products, kernels)

    fine, coarse = layers(2), layers(1)
    has_library = form == "fp8" and can_scale(model.dtype)
    wide, widest = (layers(1, ("up",)), layers(1, ALL)) if has_library else (coarse, coarse)
    if form == "int4":
        widest = dequantized
    is_large = has_library and model.config.n_layer_parameters >= LARGE_LAYER
    half_filled = widest if is_large else wide  # the second tile of 128 rows
    limits = (FEW_ROWS, fine), (128, coarse), (192, half_filled), (256, wide), (math.inf, widest)
    return QuantizedLayers(limits)


def build_layers(
    norm: str, activation: str, gemm: str, model: Transformer, kernels: Kernels
) -> tuple[Callable[[int], Layers], Callable[[int], Layers]]:
    """Return two functions, each from a number of rows to the layers: for decode steps, and for prefills.

    norm, activation and gemm are fields of a recipe.
    """
    if norm == "separate":
        plain = plain_layers(model)
        return (lambda rows: plain,) * 2
    fused = activation_fused(model, kernels)
    activated = fused if activation == "epilogue" else activation_apart(model.config)
    blocks = whole_blocks(model, kernels.dequantize)
    library = FusedLayers(model, LibraryProducts(blocks, activated), kernels)
    if gemm == "library":
        return (lambda rows: library,) * 2
    if kernels.name == "torch":
        packed = FusedLayers(model, PackedProducts(model), kernels) if can_pack(model) else library
        return (lambda rows: packed,) * 2
    with_ring = has_ring(model, kernels)
    adds_up = with_ring and is_stock(kernels, "append_and_attend")
    if model.quantization is not None and with_ring:
        parts = quantized_parts(model.quantization) if adds_up else None
        layers = partial(quantized_layers, model, kernels, dequantized=library)
        return layers(qkv_parts=parts), layers(qkv_parts=None)
    if model.quantization == "int4":
        return (lambda rows: library,) * 2
    few = FewRowsLayers(model, kernels)
    if model.quantization is not None:
        return (lambda rows: few if rows <= FEW_ROWS else library,) * 2

    def fastest(qkv_parts: Parts | None) -> FastestLayers:
        some = FusedLayers(model, SomeRowsProducts(model, kernels, qkv_parts=qkv_parts), kernels)
        variants: dict[str, Layers] = {"few": few, "some": some, "library": library}
        return FastestLayers(variants, model.config.n_layer_parameters, with_ring)

    return fastest(tuned_or(ring_qkv_parts_of) if adds_up else None), fastest(None)
