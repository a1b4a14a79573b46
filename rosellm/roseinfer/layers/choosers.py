"""Token selection on the device: final hidden states → next tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rosellm.models.model import Transformer
from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.kernels.draw import draw, likeliest
from rosellm.roseinfer.kernels.filtered_head import penalised_rows_ref
from rosellm.roseinfer.kernels.table import Kernels
from rosellm.roseinfer.layers.products import can_pack, packed_head
from rosellm.roseinfer.sampling import SamplingParams


class Chooser(Protocol):
    """Maps final hidden states ``[n, C]`` to the next tokens, with all randomness on the device."""

    @property
    def modes(self) -> tuple[str, ...]:
        """All that :meth:`mode` may return."""

    def mode(self, params: list[SamplingParams]) -> str:
        """Return the mode that serves these requests; a step is captured per mode."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the full logits ``[n, V]``."""

    def __call__(self, hidden: Tensor, state: DeviceState, mode: str) -> tuple[Tensor | None, Tensor]:
        """Return values and indices as ``advance.advance`` takes them; state has the same rows as hidden."""


MODES = "greedy", "drawn", "filtered", "penalised"  # each also serves requests of the modes before it


def mode_of(params: list[SamplingParams]) -> str:
    """Return the first of ``MODES`` that serves all these requests."""
    if any(p.is_penalised for p in params):
        return "penalised"
    drawn = [p for p in params if not p.is_greedy]
    if not drawn:
        return "greedy"
    return "filtered" if any(p.is_filtered for p in drawn) else "drawn"


class LogitsChooser:
    """Computes all logits, then an argmax, or a draw if any request is not greedy.

    counts ``[S, V]``: of the tokens that penalised requests have seen (``token_counts``).
    """

    modes: tuple[str, ...] = ("greedy", "drawn", "penalised")

    def __init__(self, logits: Callable[[Tensor], Tensor], kernels: Kernels, counts: Tensor) -> None:
        self.logits, self.counts = logits, counts
        self.noise, self.count_tokens = kernels.gumbel_noise, kernels.count_tokens

    def mode(self, params: list[SamplingParams]) -> str:
        mode = mode_of(params)
        return "drawn" if mode == "filtered" else mode

    def __call__(self, hidden: Tensor, state: DeviceState, mode: str) -> tuple[Tensor | None, Tensor]:
        logits = self.logits(hidden)
        if mode == "penalised":
            self.count_tokens(state=state, table=self.counts)
            logits = penalised_rows_ref(logits, state, self.counts)
        tokens = likeliest(logits) if mode == "greedy" else draw_for(state, logits, self.noise)
        return None, tokens[:, None]


class FusedChooser:
    """Keeps only the best token in the head's GEMM, plus the logits of rows with top-k, top-p or min-p.

    How a row's token is chosen depends on its own request, not on its batch. Full logits, for callers that
    request them, are fp32 sums like those that tokens are chosen by, and include the head's padding rows:
    with the odd row length of GPT-2's logits the GEMM could not use aligned stores.
    """

    modes: tuple[str, ...] = MODES

    def __init__(self, model: Transformer, kernels: Kernels, counts: Tensor) -> None:
        self.kernels, self.counts = kernels, counts
        self.weight = model.lm_head.weight
        self.padded = model.padded_head

    def mode(self, params: list[SamplingParams]) -> str:
        return mode_of(params)

    def logits(self, hidden: Tensor) -> Tensor:
        return fp32_product(hidden, self.padded)[:, : len(self.weight)]

    def __call__(self, hidden: Tensor, state: DeviceState, mode: str) -> tuple[Tensor | None, Tensor]:
        if mode in ("filtered", "penalised"):
            return self._filtered(hidden, state, self._counted(state) if mode == "penalised" else None)
        return self.kernels.best_tokens(
            hidden=hidden,
            weight=self.weight,
            temperature=state.temperatures,
            seeds=state.seeds,
            positions=state.positions,
            sampled=mode != "greedy",
        )

    def _filtered(self, hidden: Tensor, state: DeviceState, counts: Tensor | None) -> tuple[Tensor, Tensor]:
        tiles = self.kernels.filtered_tiles(hidden=hidden, weight=self.weight, state=state, counts=counts)
        self.kernels.choose_filtered(tiles=tiles, state=state)
        return tiles.values, tiles.indices

    def _counted(self, state: DeviceState) -> Tensor:
        self.kernels.count_tokens(state=state, table=self.counts)
        return self.counts


@dataclass
class NextTokens:
    """Chooses tokens, and advances the rows that get them (``kernels.advance.advance_ref``)."""

    chooser: Chooser
    advance: Callable[..., None]

    def __call__(
        self, hidden: Tensor, settings: DeviceState, mode: str, state: DeviceState, slots: Tensor
    ) -> None:
        """Advance rows ``slots [n]`` int64 of ``state``. hidden ``[n, C]``; settings: n rows of a state."""
        values, indices = self.chooser(hidden, settings, mode)
        self.advance(state=state, slots=slots, values=values, indices=indices)


def fp32_product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x ``[n, K]`` by weight ``[N, K]`` → ``[n, N]`` fp32, without rounding to a 16-bit dtype."""
    if x.dtype == torch.float32 or not x.is_cuda:
        return F.linear(x.float(), weight.float())
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def draw_for(state: DeviceState, logits: Tensor, noise: Callable[..., Tensor]) -> Tensor:
    """Run ``draw.draw`` with the requests' settings from the device state; returns ``[n]`` int32."""
    filters = state.temperatures, state.top_k, state.top_p, state.min_p
    return draw(logits, *filters, state.seeds, state.positions + 1, noise)  # positions of the tokens drawn


def build_chooser(head: str, model: Transformer, kernels: Kernels, counts: Tensor) -> Chooser:
    """Return the chooser for a recipe's ``head``; on a CPU, "fused" packs the head's weights for oneDNN."""
    if head == "logits":
        return LogitsChooser(model.logits, kernels, counts)
    if kernels.name == "torch" and can_pack(model):
        return LogitsChooser(packed_head(model), kernels, counts)
    return FusedChooser(model, kernels, counts)
