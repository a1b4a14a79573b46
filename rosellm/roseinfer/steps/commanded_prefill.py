"""A packed prefill that several ranks run: its inputs, once filled in, are all that they need."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rosellm.roseinfer.kernels.prefill import BLOCK_M
from rosellm.roseinfer.kernels.prefill_tiles import tile_columns
from rosellm.roseinfer.profile_range import profile_range
from rosellm.roseinfer.ranks.group import Group
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.steps.packed_prefill import PackedPrefill
from rosellm.roseinfer.steps.prefill import PREFILL_RANGE
from rosellm.roseinfer.steps.prompt_inputs import PromptInputs, Shape
from rosellm.roseinfer.steps.rows import NO_ROWS, Batch


class CommandedPrefill(PackedPrefill):
    """Its work on the device is a command of ``group``."""

    def __init__(self, *parts: Any) -> None:
        *own, group = parts
        super().__init__(*own)
        self._compute = self._command(group)

    def _command(self, group: Group) -> Any:
        return group.broadcast("prefill", self._run_prefill)

    @torch.inference_mode()
    def run(self, sequences: list[Sequence], counts: list[int]) -> tuple[Tensor, Batch]:
        """See :class:`prompts.Prompts`."""
        with profile_range(PREFILL_RANGE):
            chunks = self.reserved(sequences, counts)
            columns = tile_columns(chunks.starts, chunks.counts, None, BLOCK_M)
            shape = Shape(sum(chunks.counts), columns.shape[1], len(chunks.counts), self.row_words)
            mode = self.mode_of(chunks) if chunks.n_whole else None
            hidden = self._compute(self.filled(chunks, columns, shape), shape, mode)
            return hidden, self.rows.batch(chunks.whole) if chunks.n_whole else NO_ROWS

    def _run_prefill(self, host: np.ndarray, shape: Shape, mode: str | None) -> Tensor:
        """The part on the device; mode: of choosing first tokens, None if there are none."""
        inputs = PromptInputs.of(self.send_filled(host), shape)
        hidden = self.layers(inputs)
        return hidden if mode is None else self.first_tokens(inputs, hidden, mode)
