"""Pre-norm decoder-only transformers of every family, in plain torch: the specification of the kernels.

The input is a flat list of tokens. Batches, caches and masks are handled by attention, a callable that is
passed in (``attention.Attend``); every other operation works on each token alone. Weights are ``[outputs,
inputs]``. The projections of q, k and v share one weight, and so do gate and up.

N: number of tokens.
C: model width.
F: MLP width.
V: vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rosellm.errors import OptionError
from rosellm.models.arch import Arch
from rosellm.models.attention import Attend
from rosellm.models.part import ALIGNMENT, WHOLE, Part
from rosellm.models.quantized import (
    HEAD_FORM,
    AnyWeight,
    QuantizedEmbedding,
    QuantizedProjection,
    QuantizedWeight,
    empty_weight,
)
from rosellm.models.rope import Rotary, rotate


class Projection(nn.Module):
    """A linear layer, ``x @ weight.T + bias``.

    weight: ``[n, k]``: n outputs, k inputs; uninitialised.
    bias: ``[n]`` of zeros, or None.
    """

    def __init__(self, n: int, k: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, k))
        self.bias = nn.Parameter(torch.zeros(n)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def _norm(arch: Arch, width: int) -> nn.LayerNorm | nn.RMSNorm:
    kind = nn.LayerNorm if arch.norm.kind == "layer" else nn.RMSNorm
    return kind(width, eps=arch.norm.eps)


class Block(nn.Module):
    """One transformer layer: attention and MLP, each after a norm and with a residual connection."""

    def __init__(self, config: Arch, layer: int) -> None:
        super().__init__()
        self.layer, self.config = layer, config
        self.norm_1, self.norm_2 = _norm(config, config.d_model), _norm(config, config.d_model)
        self.qkv, self.out, self.up, self.down = (
            Projection(n, k, name in config.biases) for name, (n, k) in config.shapes.items()
        )
        self.q_norm, self.k_norm = (
            nn.RMSNorm(config.head_dim, eps=config.norm.eps) if config.qk_norm else None for _ in range(2)
        )

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        mixed = attend(self.layer, *split_heads(self.qkv(self.norm_1(x)), self.config))  # [N, H, D]
        x = x + self.out(mixed.flatten(1))  # [N, C]
        return x + self.down(activated(self.up(self.norm_2(x)), self.config))  # [N, C]

    def position(self, q: Tensor, k: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise each head of q and k if the model has such norms, then rotate q and k.

        q, k: ``[N, H, D]`` and ``[N, H_kv, D]``.
        cos_sin: ``[N, D]`` fp32, the cosines and sines of each token's position.
        """
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, cos_sin), rotate(k, cos_sin)


def split_heads(qkv: Tensor, config: Arch) -> tuple[Tensor, Tensor, Tensor]:
    """Split ``[..., (H + 2 H_kv) D]`` into views: q ``[..., H, D]``, k and v ``[..., H_kv, D]``."""
    n_kv = config.n_kv_heads
    return qkv.view(*qkv.shape[:-1], -1, config.head_dim).split((config.n_heads, n_kv, n_kv), dim=-2)


def activated(up: Tensor, config: Arch) -> Tensor:
    """Apply GELU (tanh form) to ``[N, F]``, or SwiGLU to ``[N, 2 F]``, gate first; return ``[N, F]``."""
    if config.mlp == "gelu":
        return F.gelu(up, approximate="tanh")
    gate, up = up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _embedding(n: int, width: int) -> nn.Embedding:
    """Return an uninitialised embedding: to initialise one, PyTorch imports its compiler, for a second."""
    return nn.Embedding.from_pretrained(torch.empty(n, width), freeze=False)


class Transformer(nn.Module):
    """A model, or a rank's part of it, that maps token ids and positions ``[N]`` to hidden states ``[N, C]``.

    whole: the ``Arch`` of the whole model.
    part: the part of the weights that the model holds.
    config: the ``Arch`` of this part.
    words: the range of token ids whose logits :meth:`logits` computes; all of them in a whole model.
    cos_sin: cosines, then sines, of every position: ``[P, D]`` fp32; None with learned positions.
    quantization: the format of the layers' weights, one of ``quantized.WEIGHT_FORMS``, or None. The head is
        then quantised, too (``quantized.HEAD_FORM``), and with it a tied embedding; but not if the checkpoint
        itself is quantised.
    """

    cos_sin: Tensor | None
    token_embedding: nn.Embedding | QuantizedEmbedding
    lm_head: Projection | QuantizedProjection
    quantization: str | None = None

    def __init__(self, whole: Arch, part: Part = WHOLE) -> None:
        super().__init__()
        self.whole, self.part = whole, part
        self.config = config = part.arch(whole)
        self.token_embedding = _embedding(config.vocab_size, config.d_model)
        self.position_embedding = None if config.rope else _embedding(config.n_positions, config.d_model)
        blocks = nn.ModuleList(Block(config, i) for i in range(config.n_layers))
        self.blocks = cast(Sequence[Block], blocks)
        self.norm = _norm(config, config.d_model)
        self.words = part.words(whole)
        self.lm_head = Projection(len(self.words), config.d_model, bias=False)
        self.register_buffer("cos_sin", None, persistent=False)
        if self.lm_head.weight.device.type != "meta":
            self._tabulate(self.lm_head.weight.device)
        self._tie()

    def _tie(self) -> None:
        if self.config.tie_embeddings:
            shared: Any = self.token_embedding.weight
            if len(self.words) < len(shared):
                own = shared[self.words.start : self.words.stop]
                shared = nn.Parameter(own.detach(), False) if isinstance(own, Tensor) else own
            self.lm_head.weight = shared

    def _tabulate(self, device: torch.device) -> None:
        if self.config.rope is not None:
            self.cos_sin = self.config.rope.table(self.config.n_positions, self.config.head_dim, device)

    @classmethod
    def allocate(
        cls,
        whole: Arch,
        device: torch.device,
        dtype: torch.dtype,
        part: Part = WHOLE,
        quantization: str | None = None,
    ) -> Transformer:
        """Return an uninitialised model for inference; padding rows of zeros follow the embedding and head.

        whole: the ``Arch`` of the whole model.
        part: the part of the weights to allocate.
        quantization: the format of the weights, as in :class:`Transformer`; None for ``dtype``.
        """
        with torch.device("meta"):
            model = cls(whole, part)
        if quantization is not None:
            model._quantize(quantization, device, dtype)
        vocabulary = (model.token_embedding, model.lm_head)
        for module in model.modules():
            make: Callable[..., Tensor] = _padded if module in vocabulary else torch.empty
            for name, parameter in module.named_parameters(recurse=False):
                weight = nn.Parameter(make(parameter.shape, device=device, dtype=dtype), requires_grad=False)
                setattr(module, name, weight)
        model._tie()
        model._tabulate(device)
        return model.eval()

    def _quantize(self, form: str, device: torch.device, dtype: torch.dtype) -> None:
        """Replace the projections of all layers, and the head, by quantised ones, whose weights are zeros.

        The head of a checkpoint that is quantised itself stays as it is.
        """
        self.quantization = form
        for block in self.blocks:
            for name, (n, k) in self.config.shapes.items():
                weight = empty_weight(n, k, form, device, dtype)
                setattr(block, name, QuantizedProjection(weight, getattr(block, name).bias))
        if self.whole.quantization is None:
            n = self.config.vocab_size if self.config.tie_embeddings else len(self.words)
            weight = empty_weight(n, self.config.d_model, HEAD_FORM, device, dtype)
            self.lm_head = QuantizedProjection(weight, None)
            if self.config.tie_embeddings:
                self.token_embedding = QuantizedEmbedding(weight, dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Transformer:
        """Move or cast the model; restore the padding rows after embedding and head, and rebuild ``cos_sin``.

        ``cos_sin`` is always fp32. Raises ``OptionError`` if the model is quantised.
        """
        if self.quantization is not None:
            raise OptionError("a quantised model cannot be moved or cast; load it again")
        super()._apply(fn, recurse)
        for module in (self.token_embedding, self.lm_head):
            own = cast(nn.Parameter, module.weight)
            own.data = _padded(own.shape, own.device, own.dtype).copy_(own.data)
        self._tabulate(self.device)
        return self

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return self.layers(ids, positions, self.positioned(positions, attend))

    def layers(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return hidden states ``[N, C]``, given an ``attend`` that normalises and rotates q and k itself."""
        x = self.embedded(ids, positions)
        for block in self.blocks:
            x = block(x, attend)
        return self.norm(x)

    def embedded(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the inputs ``[N, C]`` of the first layer."""
        x = self.token_embedding(ids)
        return x if self.position_embedding is None else x + self.position_embedding(positions)

    def positioned(self, positions: Tensor, attend: Attend) -> Attend:
        """Return a function that normalises and rotates q and k as the model requires, then calls ``attend``.

        positions: ``[N]``.
        """
        if self.cos_sin is None:
            return attend
        cos_sin = self.cos_sin[positions]  # [N, D]

        def position_and_attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = self.blocks[layer].position(q, k, cos_sin)
            return attend(layer, q, k, v.contiguous())  # kernels want k and v laid out alike

        return position_and_attend

    def rotary(self, layer: int) -> Rotary | None:
        """Return the inputs with which kernels normalise and rotate q and k of a layer.

        Returns None with learned positions.
        """
        if self.cos_sin is None:
            return None
        block = self.blocks[layer]
        q_norm, k_norm = (None if n is None else n.weight for n in (block.q_norm, block.k_norm))
        return Rotary(self.cos_sin, q_norm, k_norm, self.config.norm.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)  # [N, V]

    @property
    def padded_head(self) -> Tensor:
        """The head's weight with the padding rows of :meth:`allocate`, as a view ``[V', C]``."""
        weight = cast(Tensor, self.lm_head.weight)
        rows, width = weight.shape
        return weight.as_strided((_aligned(rows), width), (width, 1))

    @property
    def own_parameters(self) -> dict[str, AnyWeight]:
        """All parameters and quantised weights by name, without the head if it is tied."""
        named: dict[str, AnyWeight] = dict(self.named_parameters())
        weights = ((name, getattr(module, "weight", None)) for name, module in self.named_modules())
        named |= {f"{name}.weight": it for name, it in weights if isinstance(it, QuantizedWeight)}
        if self.config.tie_embeddings:
            named.pop("lm_head.weight", None)
        return named

    @torch.no_grad()
    def initialise(self, seed: int, std: float = 0.02) -> Transformer:
        """Initialise the weights as GPT-2 does, and return the model.

        seed: determines all values; a part is given the values that it would have in the whole model.
        std: standard deviation of the normal distribution; for ``out`` and ``down``, std / sqrt(2 L) with L
            layers.

        Biases become 0, norm weights 1. At most one unsharded parameter is in memory at a time.
        """
        generator = torch.Generator(device=self.device).manual_seed(seed)
        with torch.device("meta"):
            shapes = Transformer(self.whole).own_parameters
        own = self.own_parameters
        for name, parameter in ((name, own[name]) for name in shapes):
            if name.endswith("bias"):
                nn.init.zeros_(cast(Tensor, parameter))
            elif "norm" in name:
                nn.init.ones_(cast(Tensor, parameter))
            else:
                residual = name.endswith(("out.weight", "down.weight"))
                scale = std / (2 * self.config.n_layers) ** 0.5 if residual else std
                shape = shapes[name].shape
                if isinstance(parameter, QuantizedWeight) or parameter.shape != shape:
                    drawn = self.norm.weight.new_empty(shape)
                else:
                    drawn = parameter
                drawn.normal_(0.0, scale, generator=generator)
                if drawn is not parameter:
                    pieces = self.part.pieces(name, self.whole, len(drawn))
                    parameter.copy_(self.part.cut(name, drawn, pieces))
        return self


def _aligned(rows: int) -> int:
    return -(-rows // ALIGNMENT) * ALIGNMENT


def _padded(shape: torch.Size, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor, followed in memory by zero rows up to a multiple of ``ALIGNMENT``."""
    rows, width = shape
    padded = torch.empty(_aligned(rows), width, device=device, dtype=dtype)
    padded[rows:].zero_()
    return padded[:rows]
