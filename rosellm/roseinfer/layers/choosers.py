"""Token selection on the device: final hidden states → next tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rosellm.models.model import Transformer
from rosellm.models.quantized import AnyRows, QuantizedWeight, RowFormat, full
from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.kernels.draw import draw, likeliest
from rosellm.roseinfer.kernels.filtered_head import penalised_rows_ref
from rosellm.roseinfer.kernels.table import Kernels
from rosellm.roseinfer.layers.products import PackedLinear, can_pack, has_ring
from rosellm.roseinfer.sampling import SamplingParams

MODES = "greedy", "drawn", "filtered", "penalised"  # each also serves requests of the modes before it
FEW_ROWS, SOME_ROWS = 16, 64
HEAD_DIGITS = 2  # codes of each hidden state
Logits = Callable[[Tensor], Tensor]  # of final hidden states


def mode_of(params: list[SamplingParams]) -> str:
    """Return the first of ``MODES`` that can choose tokens for all requests with these parameters."""
    if any(p.is_penalised for p in params):
        return "penalised"
    drawn = [p for p in params if not p.is_greedy]
    if not drawn:
        return "greedy"
    return "filtered" if any(p.is_filtered for p in drawn) else "drawn"


class Chooser(ABC):
    """A map from final hidden states ``[n, C]`` to the next tokens, with all randomness on the device.

    logits: a function from hidden states to the full logits ``[n, V]``.
    """

    logits: Logits

    def mode(self, params: list[SamplingParams]) -> str:
        """Return the mode that can choose tokens for all requests with these parameters."""
        return mode_of(params)

    def modes(self, rows: int) -> tuple[str, ...]:
        """Return the modes in which steps of ``rows`` rows run; a graph is captured for each."""
        return MODES

    def serving(self, mode: str, rows: int) -> str:
        """Return the first of ``modes(rows)`` that serves requests of ``mode``."""
        return next(one for one in self.modes(rows) if MODES.index(one) >= MODES.index(mode))

    @abstractmethod
    def __call__(self, hidden: Tensor, state: DeviceState, mode: str) -> tuple[Tensor | None, Tensor]:
        """Return the arguments ``values`` and ``indices`` for ``advance.advance``.

        state: a device state of n rows, one per row of hidden. mode: a result of :meth:`mode`.
        """


class LogitsChooser(Chooser):
    """A chooser that computes all logits, then an argmax, or a draw if any request is not greedy.

    logits: a function from hidden states to the full logits.
    counts: the table of ``TokenCounts``, with the tokens that penalised requests have seen.
    """

    def __init__(self, logits: Logits, kernels: Kernels, counts: Tensor) -> None:
        self.logits, self.counts = logits, counts
        self.noise, self.count_tokens = kernels.gumbel_noise, kernels.count_tokens

    def __call__(self, hidden: Tensor, state: DeviceState, mode: str) -> tuple[Tensor | None, Tensor]:
        logits = self.logits(hidden)
        if mode == "greedy":
            return None, likeliest(logits)[:, None]
        if mode == "penalised":
            self.count_tokens(state=state, table=self.counts)
            logits = penalised_rows_ref(logits, state, self.counts)
        drawing = state.temperatures, state.top_k, state.top_p, state.min_p, state.seeds, state.positions + 1
        return None, draw(logits, *drawing, self.noise, filtered=mode != "drawn")[:, None]


class FusedChooser(Chooser):
    """A chooser whose head stores only the best token of each tile, and the logits of filtered rows.

    How a row's token is chosen depends on its own request, not on its batch. Full logits, for callers that
    request them, are fp32 sums, like the logits by which tokens are chosen.

    logits: a function from hidden states to the full logits.
    """

    def __init__(self, model: Transformer, kernels: Kernels, counts: Tensor, logits: Logits) -> None:
        self.kernels, self.counts, self.logits = kernels, counts, logits
        self.weight, self.rows = model.lm_head.weight, head_rows(model, kernels)

    def modes(self, rows: int) -> tuple[str, ...]:
        """Return only the modes whose kernels would take longer for requests of an earlier mode.

        The kernels find out whether any row is drawn, or penalised; what that costs grows with the rows.
        """
        if rows <= FEW_ROWS:
            return "drawn", "penalised"
        return ("drawn", "filtered", "penalised") if rows <= SOME_ROWS else MODES

    def __call__(self, hidden: Tensor, state: DeviceState, mode: str) -> tuple[Tensor | None, Tensor]:
        kernels, head = self.kernels, {"hidden": self.rows(hidden), "weight": self.weight}
        if mode in ("greedy", "drawn"):
            drawing = {"temperature": state.temperatures, "seeds": state.seeds, "positions": state.positions}
            return kernels.best_tokens(**head, **drawing, sampled=mode == "drawn")
        counts = self.counts if mode == "penalised" else None
        if counts is not None:
            kernels.count_tokens(state=state, table=counts)
        tiles = kernels.filtered_tiles(**head, state=state, counts=counts)
        kernels.choose_filtered(tiles=tiles, state=state)
        return tiles.values, tiles.indices


@dataclass
class NextTokens:
    """A function that chooses next tokens and advances rows of a device state by them.

    chooser: chooses the tokens. advance: ``kernels.advance``.
    """

    chooser: Chooser
    advance: Callable[..., None]

    def __call__(
        self,
        hidden: Tensor,
        settings: DeviceState,
        mode: str,
        state: DeviceState,
        slots: Tensor,
        texts: Tensor | None = None,
    ) -> None:
        """Choose tokens for hidden states, and advance state rows by them.

        hidden: ``[n, C]``, the final hidden states.
        settings: a device state of n rows, with the sampling parameters of each token.
        mode: the chooser's mode.
        state: the device state to advance.
        slots: ``[n]`` int64, the rows of ``state`` that receive the tokens.
        texts: as in ``advance.advance_ref``.
        """
        values, indices = self.chooser(hidden, settings, self.chooser.serving(mode, len(hidden)))
        self.advance(state=state, slots=slots, values=values, indices=indices, texts=texts)


def fp32_product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x ``[n, K]`` by weight ``[N, K]`` → ``[n, N]`` fp32, without rounding to a 16-bit dtype."""
    if x.dtype == torch.float32 or not x.is_cuda:
        return F.linear(x.float(), weight.float())
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def head_rows(model: Transformer, kernels: Kernels) -> Callable[[Tensor], AnyRows]:
    """Return a function that prepares hidden states for the head: as for the layers, a ring needs codes."""
    weight = model.lm_head.weight
    if isinstance(weight, QuantizedWeight) and has_ring(model, kernels):
        form = RowFormat(weight.form, HEAD_DIGITS)
        return lambda hidden: kernels.quantize(x=hidden, form=form)
    return lambda hidden: hidden


def full_logits(model: Transformer, kernels: Kernels) -> Logits:
    """Return a function from final hidden states to the logits of the model's head, as fp32 sums.

    The GEMM of a head that is not quantised includes the padding rows, whose logits are cut off: with GPT-2's
    odd vocabulary size alone, it could not use aligned stores.
    """
    weight, rows, linear = model.lm_head.weight, head_rows(model, kernels), kernels.some_rows_linear
    if isinstance(weight, QuantizedWeight):
        return lambda hidden: linear(x=rows(hidden), weight=weight, parts=2).sum(dim=0)
    padded = model.padded_head
    return lambda hidden: fp32_product(hidden, padded)[:, : len(weight)]


def build_chooser(head: str, model: Transformer, kernels: Kernels, counts: Tensor) -> Chooser:
    """Return the chooser for a recipe's ``head``, "logits" or "fused".

    On a CPU, "fused" packs the head's weights for oneDNN.
    """
    if head == "logits":
        return LogitsChooser(model.logits, kernels, counts)
    if kernels.name == "torch" and can_pack(model):
        return LogitsChooser(PackedLinear(full(model.lm_head.weight)), kernels, counts)
    return FusedChooser(model, kernels, counts, full_logits(model, kernels))
