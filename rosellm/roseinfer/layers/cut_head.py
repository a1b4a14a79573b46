"""The LM head under tensor parallelism: each rank holds a slice of the vocabulary.

A step gathers either each rank's best token or all logits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rosellm.models.model import Transformer
from rosellm.models.quantized import full
from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.kernels.head import MAX_TEMPERATURE
from rosellm.roseinfer.kernels.table import Kernels
from rosellm.roseinfer.layers.choosers import Chooser, Logits, LogitsChooser, full_logits
from rosellm.roseinfer.layers.products import PackedLinear, can_pack
from rosellm.roseinfer.ranks.group import Ranks


class GatheredLogits:
    """A function from hidden states ``[n, C]`` to all logits ``[n, V]``, gathered from all ranks.

    own: a function from hidden states to the logits of this rank's slice of the vocabulary.
    """

    def __init__(self, own: Logits, model: Transformer, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks
        self._vocabulary = model.config.vocab_size
        self._missing = ranks.part.share(model.whole) - len(model.words)

    def __call__(self, hidden: Tensor) -> Tensor:
        own = F.pad(self._own(hidden), (0, self._missing))  # [n, share]
        gathered = self._ranks.gathered(own.contiguous())  # [ranks, n, share]
        return gathered.transpose(0, 1).flatten(1)[:, : self._vocabulary]


class CutChooser(LogitsChooser):
    """A chooser that gathers only each rank's best token, or all logits for filtered or penalised rows.

    own: a function from hidden states to the logits of this rank's slice of the vocabulary.
    """

    def __init__(
        self, model: Transformer, kernels: Kernels, counts: Tensor, own: Logits, ranks: Ranks
    ) -> None:
        super().__init__(GatheredLogits(own, model, ranks), kernels, counts)
        self._best, self._own, self._ranks = kernels.best_tokens, own, ranks
        self._weight, self._words = model.lm_head.weight, model.words
        self._vocabulary = model.config.vocab_size

    def __call__(self, hidden: Tensor, state: DeviceState, mode: str) -> tuple[Tensor | None, Tensor]:
        """Return the arguments ``values`` and ``indices`` for ``advance.advance``, the same on every rank."""
        if mode == "greedy":
            return self._gathered(*self._likeliest(hidden, state))
        if mode == "drawn":
            return self._gathered(*self._drawn(hidden, state))
        return super().__call__(hidden, state, mode)

    def _likeliest(self, hidden: Tensor, state: DeviceState) -> tuple[Tensor, Tensor]:
        """Return the best values and tokens of this rank's vocabulary slice, as ``head.best_tokens`` does."""
        drawing = {"seeds": state.seeds, "positions": state.positions, "temperature": state.temperatures}
        return self._best(hidden=hidden, weight=self._weight, sampled=False, **drawing)

    def _drawn(self, hidden: Tensor, state: DeviceState) -> tuple[Tensor, Tensor]:
        """Return the best values, with noise, and tokens of this rank's vocabulary slice, ``[n, 1]`` each.

        The noise of a token depends on its index in the whole vocabulary.
        """
        logits = self._own(hidden).float()
        logits = torch.where(logits.isnan(), float("inf"), logits)
        noise = self.noise(state.seeds, state.positions + 1, self._vocabulary)
        noise = noise[:, self._words.start : self._words.stop]
        amounts = state.temperatures.clamp_max(MAX_TEMPERATURE)[:, None]
        values, indices = torch.where(amounts > 0, logits + amounts * noise, logits).max(dim=1, keepdim=True)
        return values, indices.int()

    def _gathered(self, values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the best values and tokens of all ranks: ``[n, TILES]`` of this rank → ``[n, ranks]``."""
        best, tile = values.max(dim=1)
        token = indices.gather(1, tile[:, None])[:, 0] + self._words.start
        gathered = self._ranks.gathered(torch.stack((best.view(torch.int32), token)))  # [ranks, 2, n]
        values, indices = gathered.permute(1, 2, 0).contiguous()
        return values.view(torch.float32), indices


def cut_chooser(head: str, model: Transformer, kernels: Kernels, counts: Tensor, ranks: Ranks) -> Chooser:
    """Return one rank's chooser, as ``choosers.build_chooser`` does for a whole model."""
    if head == "logits":
        return LogitsChooser(GatheredLogits(model.logits, model, ranks), kernels, counts)
    if kernels.name == "torch" and can_pack(model):
        return CutChooser(model, kernels, counts, PackedLinear(full(model.lm_head.weight)), ranks)
    return CutChooser(model, kernels, counts, full_logits(model, kernels), ranks)
