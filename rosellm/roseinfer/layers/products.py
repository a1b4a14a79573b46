"""The four GEMMs of each layer: by the vendor's library, packed for oneDNN, or by our kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from rosellm.models.arch import Arch
from rosellm.models.model import Block, Projection, Transformer, activated
from rosellm.models.quantized import AnyRows, AnyWeight, QuantizedRows, QuantizedWeight, RowFormat, full
from rosellm.roseinfer.kernels import ring
from rosellm.roseinfer.kernels.few_rows import NormPrologue
from rosellm.roseinfer.kernels.linear import parts_of
from rosellm.roseinfer.kernels.table import Kernels, is_stock
from rosellm.roseinfer.kernels.tuned import choice_of
from rosellm.triton_or_none import cdiv

Parts = Callable[[int, int, int], int]  # rows, n, k → ranges of K
Activated = Callable[[Projection, Tensor], Tensor]
ALL = "qkv", "out", "up", "down"
QKV_PROGRAMS = 180  # most programs of the projection to q, k and v by the ring, for K below 4,096


class Products(Protocol):
    """The four GEMMs of each layer."""

    @property
    def form(self) -> RowFormat | None:
        """The format in which ``qkv`` and ``up`` take their input; None for a tensor."""

    def qkv(self, layer: int, x: Any) -> Tensor:
        """Project x ``[N, C]`` to q, k and v, ``[N, (H + 2 H_kv) D]``, with bias.

        Alternatively, return P partial sums ``[P, N, (H + 2 H_kv) D]`` in fp32, the first with the bias.
        """

    def out(self, layer: int, x: Tensor) -> Tensor:
        """Project attention outputs ``[N, H D]`` to partial sums ``[P, N, C]``, without bias."""

    def up(self, layer: int, x: Any) -> Tensor:
        """Project x ``[N, C]`` to ``[N, F]``, with bias and activation, which may be left to ``down``."""

    def down(self, layer: int, x: Tensor) -> Tensor:
        """Project x ``[N, F]`` to partial sums ``[P, N, C]``, without bias."""


class LibraryProducts:
    """The four GEMMs by the vendor's library (cuBLAS on a GPU).

    blocks: the model's blocks, or the result of :func:`whole_blocks`.
    activated: applies the projection ``up`` and its activation.
    """

    form = None

    def __init__(self, blocks: Sequence[Block], activated: Activated) -> None:
        self.blocks, self.activated = blocks, activated

    def qkv(self, layer: int, x: Tensor) -> Tensor:
        return self.blocks[layer].qkv(x)

    def out(self, layer: int, x: Tensor) -> Tensor:
        return (x @ self.blocks[layer].out.weight.t())[None]

    def up(self, layer: int, x: Tensor) -> Tensor:
        return self.activated(self.blocks[layer].up, x)

    def down(self, layer: int, x: Tensor) -> Tensor:
        return (x @ self.blocks[layer].down.weight.t())[None]


class DequantizedProjection:
    """A quantised projection whose weight is dequantised whenever it is read.

    dequantize, dtype: the kernel, and the dtype that it is asked for.
    """

    def __init__(self, projection: Projection, dequantize: Callable[..., Tensor], dtype: torch.dtype) -> None:
        self._weight, self.bias = projection.weight, projection.bias
        self._dequantize, self._dtype = dequantize, dtype

    @property
    def weight(self) -> Tensor:
        return self._dequantize(weight=self._weight, dtype=self._dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def whole_blocks(model: Transformer, dequantize: Callable[..., Tensor]) -> Sequence[Block]:
    """Return the blocks of a model; if it is quantised, with projections that dequantise their weights.

    dequantize: ``kernels.dequantize``.
    """
    if model.quantization is None:
        return model.blocks
    whole = partial(DequantizedProjection, dequantize=dequantize, dtype=model.dtype)
    names = model.config.shapes
    blocks = [SimpleNamespace(**{n: whole(getattr(block, n)) for n in names}) for block in model.blocks]
    return cast(Sequence[Block], blocks)


def activation_apart(config: Arch) -> Activated:
    """Return a function that applies a projection, then the model's activation in separate operators."""
    return lambda projection, x: activated(projection(x), config)


def activation_fused(model: Transformer, kernels: Kernels) -> Activated:
    """Return a function that applies a projection and the model's activation.

    SwiGLU is one kernel after the GEMM. GELU (tanh form) is in the epilogue of cuBLASLt's GEMM; on a CPU, or
    without a bias, it runs in separate operators.
    """
    if model.config.mlp == "swiglu":
        return lambda projection, x: kernels.silu_mul(x=projection(x))
    if model.device.type == "cpu" or "up" not in model.config.biases:
        return activation_apart(model.config)
    return _gelu_in_epilogue


def _gelu_in_epilogue(projection: Projection, x: Tensor) -> Tensor:
    """Run cuBLASLt with GELU (tanh form) in its epilogue, for which torch has only a private function."""
    return torch._addmm_activation(cast(Tensor, projection.bias), x, projection.weight.t(), use_gelu=True)  # noqa: SLF001


class PackedLinear:
    """A linear layer in fp32 on a CPU; its weight is packed once into oneDNN's layout, to be read in order.

    Torch has no public way to keep a packed weight: these are the private operators that torch.compile uses.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()), bias  # noqa: SLF001

    def __call__(self, x: Tensor, activation: str = "none") -> Tensor:
        """Apply the layer to x ``[N, K]``, and then the activation: "none", or "gelu" (tanh form)."""
        form = "tanh" if activation == "gelu" else ""
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, activation, [], form)  # noqa: SLF001


class PackedProducts:
    """The four GEMMs in fp32 on a CPU, with copies of the weights in oneDNN's packed layout.

    With 8 or more rows, they are about twice as fast as with unpacked weights. Requires :func:`can_pack`.
    """

    form = None

    def __init__(self, model: Transformer) -> None:
        self.config, blocks = model.config, model.blocks
        self._qkv = [PackedLinear(full(b.qkv.weight), b.qkv.bias) for b in blocks]
        self._out = [PackedLinear(full(b.out.weight)) for b in blocks]
        self._up = [PackedLinear(full(b.up.weight), b.up.bias) for b in blocks]
        self._down = [PackedLinear(full(b.down.weight)) for b in blocks]

    def qkv(self, layer: int, x: Tensor) -> Tensor:
        return self._qkv[layer](x)

    def out(self, layer: int, x: Tensor) -> Tensor:
        return self._out[layer](x)[None]

    def up(self, layer: int, x: Tensor) -> Tensor:
        if self.config.mlp == "gelu":
            return self._up[layer](x, "gelu")
        return activated(self._up[layer](x), self.config)

    def down(self, layer: int, x: Tensor) -> Tensor:
        return self._down[layer](x)[None]


def can_pack(model: Transformer) -> bool:
    """Return whether oneDNN can pack the model's weights: on a CPU, in fp32."""
    fits = model.device.type == "cpu" and model.dtype == torch.float32
    return fits and torch.backends.mkldnn.is_available()


@dataclass(frozen=True)
class NormedWeights:
    """A projection that follows a norm.

    weight: ``[N, K]``, or a ``QuantizedWeight``.
    bias: ``[N]``, including the part that the norm's shift contributes; None if there is neither.
    norm: the norm, without its shift.
    """

    weight: AnyWeight
    bias: Tensor | None
    norm: NormPrologue

    @classmethod
    def of(cls, projection: Projection, norm: torch.nn.LayerNorm | torch.nn.RMSNorm) -> NormedWeights:
        """Fold a norm into the projection that follows it.

        This uses ``LayerNorm(x) @ W.T + b`` = ``((x - mean) / deviation * scale) @ W.T + (b + W @ shift)``.
        """
        weight, bias = projection.weight, projection.bias
        scale, gain = _at_most_one(norm.weight)
        if isinstance(norm, torch.nn.RMSNorm):
            return cls(weight, bias, NormPrologue(scale, norm.eps or 0.0, None, gain))
        whole = full(weight)
        shifted = _times(whole, norm.bias) + (0 if bias is None else bias.float())
        return cls(weight, shifted.to(scale.dtype), NormPrologue(scale, norm.eps, _times(whole, scale), gain))


def _at_most_one(scale: Tensor) -> tuple[Tensor, float]:
    """Split an fp16 scale into a scale of at most 1 and a gain, so that ``x * scale`` is finite.

    The gain is a power of two. Scales of other dtypes are returned unchanged, with gain 1.
    """
    if scale.dtype != torch.float16:
        return scale, 1.0
    gain = 2.0 ** max(0, math.frexp(scale.abs().max().item())[1])
    return (scale, gain) if gain == 1 else (scale / gain, gain)


def _times(weight: Tensor, vector: Tensor) -> Tensor:
    """Return ``weight @ vector`` in fp32, computed a few rows at a time."""
    return torch.cat([rows.float() @ vector.float() for rows in weight.split(1024)])


@dataclass(frozen=True)
class LayerWeights:
    """The two projections of a layer that follow a norm: ``qkv`` and ``up``."""

    qkv: NormedWeights
    up: NormedWeights

    @classmethod
    def of(cls, block: Block) -> LayerWeights:
        return cls(NormedWeights.of(block.qkv, block.norm_1), NormedWeights.of(block.up, block.norm_2))


class PlainProducts:
    """The four GEMMs by one kernel, without norm or residual.

    linear: the kernel, called like ``linear.some_rows_linear``.
    """

    form: RowFormat | None = None

    def __init__(self, model: Transformer, linear: Callable[..., Tensor]) -> None:
        self.blocks, self.linear = model.blocks, linear
        self.activation = model.config.mlp

    def qkv(self, layer: int, x: Any) -> Tensor:
        p = self.blocks[layer].qkv
        return self.linear(x=x, weight=p.weight, bias=p.bias)

    def out(self, layer: int, x: Tensor) -> Tensor:
        return self.linear(x=x, weight=self.blocks[layer].out.weight)[None]

    def up(self, layer: int, x: Any) -> Tensor:
        p = self.blocks[layer].up
        return self.linear(x=x, weight=p.weight, bias=p.bias, activation=self.activation)

    def down(self, layer: int, x: Tensor) -> Tensor:
        return self.linear(x=x, weight=self.blocks[layer].down.weight)[None]


class SomeRowsProducts(PlainProducts):
    """The four GEMMs by ``linear.some_rows_linear``; ``out`` and ``down`` split K into ranges.

    Their partial sums are added up by the next norm.

    parts: maps (rows, n, k) to the number of ranges; None for the fastest.
    qkv_parts: the same for ``qkv``, whose partial sums attention adds up; None to leave K whole.
    """

    def __init__(
        self, model: Transformer, kernels: Kernels, parts: Parts | None = None, qkv_parts: Parts | None = None
    ) -> None:
        super().__init__(model, kernels.some_rows_linear)
        self.parts_of = parts or fastest_parts(model, kernels)
        self.qkv_parts_of = qkv_parts or (lambda rows, n, k: 1)

    def qkv(self, layer: int, x: Any) -> Tensor:
        p = self.blocks[layer].qkv
        weight = p.weight  # read once: it may be dequantised whenever it is read
        parts = self.qkv_parts_of(len(x), *weight.shape)
        return self.linear(x=x, weight=weight, bias=p.bias, parts=parts)

    def out(self, layer: int, x: Tensor) -> Tensor:
        return self._in_parts(x, self.blocks[layer].out.weight)

    def down(self, layer: int, x: Tensor) -> Tensor:
        return self._in_parts(x, self.blocks[layer].down.weight)

    def _in_parts(self, x: AnyRows, weight: AnyWeight) -> Tensor:
        parts = self.parts_of(len(x), *weight.shape)
        return self.linear(x=x, weight=weight, parts=parts).view(parts, len(x), -1)


class QuantizedProducts(SomeRowsProducts):
    """The four GEMMs of codes by codes, on a GPU with a ring.

    form: the format of activations. The norm before ``qkv`` and ``up`` quantises their input; ``out`` and
        ``down`` quantise theirs, by a kernel of its own or, where :func:`ring.holds`, in the GEMM's programs.
    library: the GEMMs that the vendor's library runs (FP8 with one digit); a subset of ``ALL``.
    qkv_parts: as in :class:`SomeRowsProducts`.
    tunable: the GEMMs that a tuner can choose for.
    """

    def __init__(
        self,
        model: Transformer,
        kernels: Kernels,
        form: RowFormat,
        library: Collection[str] = (),
        qkv_parts: Parts | None = None,
    ) -> None:
        super().__init__(model, kernels, quantized_parts(model.quantization), qkv_parts)
        self.form, self.library = form, library
        self.tunable = [name for name in ALL if name not in library and (name != "qkv" or qkv_parts)]
        self.quantize = partial(kernels.quantize, form=form)

    def qkv(self, layer: int, x: Any) -> Tensor:
        return scaled_product(x, self.blocks[layer].qkv) if "qkv" in self.library else super().qkv(layer, x)

    def out(self, layer: int, x: Tensor) -> Tensor:
        out = self.blocks[layer].out
        return scaled_product(self.quantize(x=x), out)[None] if "out" in self.library else self._held(x, out)

    def up(self, layer: int, x: Any) -> Tensor:
        """Project x; the library leaves the activation to ``down``."""
        return scaled_product(x, self.blocks[layer].up) if "up" in self.library else super().up(layer, x)

    def down(self, layer: int, x: Tensor) -> Tensor:
        down = self.blocks[layer].down
        if "up" not in self.library:
            return self._held(x, down)
        rows = self.quantize(x=x, activation=self.activation)
        if "down" in self.library:
            return scaled_product(rows, down)[None]
        return self._in_parts(rows, down.weight)

    def _held(self, x: Tensor, projection: Projection) -> Tensor:
        weight = cast(QuantizedWeight, projection.weight)
        parts = self.parts_of(len(x), *weight.shape)
        if not ring.holds(len(x), weight.shape[1], parts):
            return self._in_parts(self.quantize(x=x), weight)
        return self.linear(x=x, weight=weight, parts=parts, form=self.form).view(parts, len(x), -1)


def can_scale(dtype: torch.dtype) -> bool:
    """Return whether :func:`scaled_product` gives results of a dtype: fp16 needs CUDA 12.9."""
    version = tuple(map(int, (torch.version.cuda or "0").split(".")))
    return dtype == torch.bfloat16 or version >= (12, 9)


def scaled_product(x: QuantizedRows, projection: Projection) -> Tensor:
    """Apply a quantised projection to rows of one digit, by the vendor's library in FP8."""
    weight, dtype = cast(QuantizedWeight, projection.weight), x.dtype
    codes, scales = (x.codes.flatten(0, 1), weight.codes.t()), (x.scales[:, None], weight.scales[None])
    return torch._scaled_mm(*codes, *scales, projection.bias, out_dtype=dtype, use_fast_accum=True)  # noqa: SLF001


def has_ring(model: Transformer, kernels: Kernels) -> bool:
    """Return whether ``kernels.some_rows_linear`` may use :func:`ring.ring_linear` for this model."""
    return is_stock(kernels, "some_rows_linear") and ring.runs_on(model.device, model.dtype)


def fastest_parts(model: Transformer, kernels: Kernels) -> Parts:
    """Return a function that gives the number of ranges of K of ``out`` and ``down``."""
    return tuned_or(ring_parts_of) if has_ring(model, kernels) else parts_of


def ring_parts_of(rows: int, n: int, k: int) -> int:
    """Return the number of ranges of K, as ``linear.parts_of`` does, for models with a ring."""
    return (ring.parts_of if ring.takes(rows, k) else parts_of)(rows, n, k)


def quantized_parts(form: str | None) -> Parts:
    """Return a function that gives the tuned number of ranges of K, or else a fast one, for the ring.

    form: the format of the weights.
    """

    def parts(rows: int, n: int, k: int) -> int:
        programs = 3 if rows <= 32 else 1  # per multiprocessor, at most
        return ring.parts_of(rows, n, k, programs * ring.NUM_SMS // cdiv(rows, ring.MOST_COLUMNS))

    return tuned_or(parts, form)


def tuned_or(parts: Parts, form: str | None = None) -> Parts:
    """Return a function that gives the tuned number of ranges of K, or else that of ``parts``.

    form: the format of the weights; None for 16 bits.
    """

    def tuned_parts(rows: int, n: int, k: int) -> int:
        choice = choice_of(rows, n, k, "none", form)
        return parts(rows, n, k) if choice is None else choice.parts

    return tuned_parts


def ring_qkv_parts_of(rows: int, n: int, k: int) -> int:
    """Return the number of ranges of K of a layer's ``qkv`` in a decode step, for models with a ring."""
    most_programs = QKV_PROGRAMS if k < 4096 else 2 * ring.NUM_SMS
    return ring.parts_of(rows, n, k, most_programs) if ring.takes(rows, k) else 1
