"""GPT-2 (Radford et al. 2019), pre-norm decoder, over a flat list of tokens.

The model knows nothing about batches, caches or masks: attention is passed in (see ``attention.Attend``), and
every other operation works per token. N tokens, C model width, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rosellm.models.attention import Attend
from rosellm.models.config import ModelConfig


class Projection(nn.Module):
    """``x @ weight + bias`` with weight ``[in, out]``, the layout of GPT-2 checkpoints."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_in, n_out))
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class Block(nn.Module):
    """One transformer layer: attention and MLP, each behind a LayerNorm and a residual."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.config = layer, config
        self.ln_1 = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.qkv = Projection(config.d_model, config.qkv_width)
        self.out = Projection(config.d_model, config.d_model)
        self.ln_2 = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.up = Projection(config.d_model, config.d_ff)
        self.down = Projection(config.d_ff, config.d_model)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        x = x + self._attention(self.ln_1(x), attend)  # [N, C]
        hidden = F.gelu(self.up(self.ln_2(x)), approximate="tanh")  # [N, F]
        return x + self.down(hidden)  # [N, C]

    def _attention(self, x: Tensor, attend: Attend) -> Tensor:
        mixed = attend(self.layer, *split_heads(self.qkv(x), self.config))  # [N, H, D]
        return self.out(mixed.reshape(-1, self.config.d_model))  # [N, C]


def split_heads(qkv: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """``[N, (H + 2 H_kv) D]`` → q ``[N, H, D]``, k and v ``[N, H_kv, D]``, views."""
    n_kv = config.n_kv_heads
    return qkv.view(len(qkv), -1, config.head_dim).split((config.n_heads, n_kv, n_kv), dim=1)


def _embedding(n: int, width: int) -> nn.Embedding:
    """Uninitialised: sampling on the meta device makes PyTorch import its compiler, which takes a second."""
    return nn.Embedding.from_pretrained(torch.empty(n, width), freeze=False)


class GPT(nn.Module):
    """Token ids and positions ``[N]`` → hidden states ``[N, C]``; :meth:`logits` maps those to ``[N, V]``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = _embedding(config.vocab_size, config.d_model)
        self.position_embedding = _embedding(config.n_positions, config.d_model)
        blocks = nn.ModuleList(Block(config, i) for i in range(config.n_layers))
        self.blocks = cast(Sequence[Block], blocks)
        self.ln_f = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self._tie()

    def _tie(self) -> None:
        if self.config.tie_embeddings:
            self.lm_head.weight = self.token_embedding.weight

    @classmethod
    def allocate(cls, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> GPT:
        """An inference model with uninitialised weights."""
        with torch.device("meta"):
            gpt = cls(config)
        for module in gpt.modules():
            for name, parameter in module.named_parameters(recurse=False):
                empty = torch.empty(parameter.shape, device=device, dtype=dtype)
                setattr(module, name, nn.Parameter(empty, requires_grad=False))
        gpt._tie()
        return gpt.eval()

    @property
    def device(self) -> torch.device:
        return self.token_embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.token_embedding.weight.dtype

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.token_embedding(ids) + self.position_embedding(positions)  # [N, C]
        for block in self.blocks:
            x = block(x, attend)
        return self.ln_f(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)  # [N, V]

    def initialise(self, seed: int, std: float = 0.02) -> GPT:
        """GPT-2's seeded initialisation: normal, deviation ``std``, residual outputs times 1/sqrt(2 L)."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        residual = std / (2 * self.config.n_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif ".ln_" in f".{name}":
                nn.init.ones_(parameter)
            else:
                scale = residual if name.endswith(("out.weight", "down.weight")) else std
                with torch.no_grad():
                    parameter.normal_(0.0, scale, generator=generator)
        return self
