"""Choosing the next tokens on the device: final hidden states → tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rosellm.models.model import Transformer
from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.kernels.table import Kernels
from rosellm.roseinfer.layers.products import can_pack, packed_head
from rosellm.roseinfer.layers.sampler import draw, likeliest
from rosellm.roseinfer.sampling import SamplingParams


class Chooser(Protocol):
    """Final hidden states ``[n, C]`` → the next tokens, with all randomness on the device."""

    @property
    def modes(self) -> tuple[str, ...]:
        """All that :meth:`mode` may return."""

    def mode(self, params: list[SamplingParams]) -> str:
        """The mode that serves these requests; a step is captured for each."""

    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, V]``."""

    def __call__(self, hidden: Tensor, state: DeviceState, mode: str) -> tuple[Tensor | None, Tensor]:
        """Values and indices as ``advance.advance`` takes them; the state's rows match those of hidden."""


class LogitsChooser:
    """All logits, then an argmax, or a draw if any request is not greedy."""

    modes: tuple[str, ...] = ("greedy", "drawn")

    def __init__(self, logits: Callable[[Tensor], Tensor], noise: Callable[..., Tensor]) -> None:
        self.logits, self.noise = logits, noise

    def mode(self, params: list[SamplingParams]) -> str:
        return "greedy" if all(p.is_greedy for p in params) else "drawn"

    def __call__(self, hidden: Tensor, state: DeviceState, mode: str) -> tuple[Tensor | None, Tensor]:
        logits = self.logits(hidden)
        tokens = likeliest(logits) if mode == "greedy" else draw_for(state, logits, self.noise)
        return None, tokens[:, None]


class FusedChooser:
    """The head's product keeps only the best token; rows with top-k or top-p get full logits.

    How a row's token is chosen depends on its own request, not on its batch. Full logits come from the head
    with its padding rows: with the odd row length of GPT-2's logits the GEMM could not use aligned stores.
    """

    modes: tuple[str, ...] = ("greedy", "drawn", "filtered")

    def __init__(self, model: Transformer, kernels: Kernels) -> None:
        self.best_tokens, self.noise = kernels.best_tokens, kernels.gumbel_noise
        self.weight = model.lm_head.weight
        self.padded = model.padded_head

    def mode(self, params: list[SamplingParams]) -> str:
        drawn = [p for p in params if not p.is_greedy]
        if not drawn:
            return "greedy"
        return "filtered" if any(p.top_k or p.top_p < 1 for p in drawn) else "drawn"

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.padded)[:, : len(self.weight)]

    def __call__(self, hidden: Tensor, state: DeviceState, mode: str) -> tuple[Tensor | None, Tensor]:
        values, indices = self.best_tokens(
            hidden=hidden,
            weight=self.weight,
            temperature=state.temperatures,
            seeds=state.seeds,
            positions=state.positions,
            sampled=mode != "greedy",
        )
        if mode != "filtered":
            return values, indices
        filtered = (state.temperatures > 0) & ((state.top_k > 0) | (state.top_p < 1))  # [n]
        tokens = draw_for(state, self.logits(hidden), self.noise)[:, None]
        only = torch.where(filtered[:, None], 0.0, -math.inf)  # makes those rows take the extra column
        values = torch.where(filtered[:, None], -math.inf, values)
        return torch.cat((values, only), dim=1), torch.cat((indices, tokens), dim=1)


def draw_for(state: DeviceState, logits: Tensor, noise: Callable[..., Tensor]) -> Tensor:
    """``sampler.draw`` with the requests' settings from the device state; ``[n]`` int32."""
    positions = state.positions + 1  # of the tokens drawn
    return draw(logits, state.temperatures, state.top_k, state.top_p, state.seeds, positions, noise)


def build_chooser(head: str, model: Transformer, kernels: Kernels) -> Chooser:
    """The chooser of a recipe's ``head``. On a CPU "fused" packs the head's weights for oneDNN instead."""
    if head == "logits":
        return LogitsChooser(model.logits, kernels.gumbel_noise)
    if kernels.name == "torch" and can_pack(model):
        return LogitsChooser(packed_head(model), kernels.gumbel_noise)
    return FusedChooser(model, kernels)
