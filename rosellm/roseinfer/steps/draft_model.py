"""A smaller model that drafts, in the same graph as the model that verifies (Leviathan et al. 2023).

It caches its own keys and values, in blocks with the ids of the other model's. It draws each draft with the
noise that the other model will use at that position (``noise``), so that two models that agree on the
probabilities draw the same token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rosellm.roseinfer.cache.device_state import INERT, DeviceState
from rosellm.roseinfer.kernels.prefill import BLOCK_M
from rosellm.roseinfer.kernels.prefill_tiles import COLUMNS
from rosellm.roseinfer.kernels.speculation import DraftKernels, Texts
from rosellm.roseinfer.layers.attention import Binder
from rosellm.roseinfer.layers.fused import Layers
from rosellm.roseinfer.steps.packed_prefill import PackedPrefill
from rosellm.roseinfer.steps.prompt_inputs import PromptInputs

MOST_CAUGHT_UP = 2048  # tokens per call
USUAL_CONTEXT = 1024  # tokens, for which the attention variant is chosen


class DraftModel:
    """A draft model on the rows of a device state.

    prompts: caches its keys and values of prompts.
    layers_for, bind: as the arguments of ``Worker``, for the draft model.
    drafting: the device functions.
    """

    def __init__(
        self,
        prompts: PackedPrefill,
        layers_for: Callable[[int], Layers],
        bind: Binder,
        drafting: DraftKernels,
    ) -> None:
        self.prompts, self.layers_for, self.bind, self.drafting = prompts, layers_for, bind, drafting
        state, device = prompts.state, prompts.state.rows.device
        self.n_rows, width = len(state.rows) - 1, state.table.shape[1]
        self._rows = DeviceState(self.n_rows, width, device)
        self._rows.stop_tokens = state.stop_tokens
        self._every_row = torch.arange(self.n_rows, device=device)
        self._longest = min(width * prompts.blocks.block_size, USUAL_CONTEXT)
        most = self.n_rows * self.places(1)
        self._ids, self._positions = torch.zeros(2, most, dtype=torch.int32, device=device)
        self._columns = torch.zeros(COLUMNS, self.n_rows, dtype=torch.int32, device=device)

    def places(self, rows: int) -> int:
        """Return how many tokens of each of ``rows`` rows :meth:`catch_up` caches at most."""
        return min(BLOCK_M, MOST_CAUGHT_UP // rows)

    def draft(
        self, state: DeviceState, texts: Texts, n_drafts: int, mode: str, n_layers: int | None = None
    ) -> None:
        """Write ``n_drafts`` drafts of each row of ``state`` to its text, after its last token.

        mode: the chooser's mode for the step; penalties and biases do not change drafts.
        n_layers: as in ``Layers``.

        The last pass only caches the last draft, whose keys the next step needs if all drafts are accepted.
        """
        own, next_tokens = self._rows.first(len(state.rows)), self.prompts.next_tokens
        own.rows.copy_(state.rows)
        own.counts.zero_()  # neither penalties nor biases
        own.positions.masked_fill_(texts.wants_drafts[: len(own.rows)] == 0, INERT)  # no slots are reserved
        mode = "filtered" if mode == "penalised" else mode
        variant = self.bind.variant(len(own.rows), self._longest, self._longest)
        layers, every_row = self.layers_for(len(own.rows)), self._every_row[: len(own.rows)]
        for i in range(n_drafts + 1):
            hidden = layers(own.tokens, own.positions, self.bind(own, variant), n_layers)
            if i < n_drafts:
                next_tokens(hidden, own, mode, own, every_row, texts.tokens)

    def catch_up(self, state: DeviceState, texts: Texts, n_layers: int | None = None) -> None:
        """Cache keys and values of tokens that plain steps added: the next :meth:`places` of each row."""
        rows, places = len(state.rows), self.places(len(state.rows))
        ids, positions = self._ids[: rows * places], self._positions[: rows * places]
        columns = self._columns[:, :rows]
        self.drafting.gather_uncached(state=state, texts=texts, ids=ids, positions=positions, columns=columns)
        nowhere = self._every_row[:0]
        inputs = PromptInputs(nowhere, nowhere, state.rows, ids, positions, columns)
        self.prompts.layers(inputs, n_layers=n_layers)
