"""Where captured prefills read their inputs: one device buffer, which each sends a part of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rosellm.roseinfer.kernels.prefill import BLOCK_M
from rosellm.roseinfer.kernels.prefill_tiles import tile_columns
from rosellm.roseinfer.steps.packed_prefill import PackedPrefill
from rosellm.roseinfer.steps.prompt_inputs import NO_CHUNKS, Chunks, PromptInputs, Shape

# For whose tiles a run of the layers has programs: of as many prompts as there may be, or of FEW at most; or
# for pieces of tiles. A program without a tile does nothing, but takes its turn on the GPU.
Tiling = Literal["many", "few", "pieces"]
FEW = 16


class PromptBuffer:
    """Inputs of up to ``most_tokens`` tokens and ``most_places`` prompts, at fixed addresses.

    A run's places end where its tokens begin, always at the same address, and only what it uses is sent.
    room: for so many tiles and pieces of tiles in runs that cut them; 0: none does.
    """

    def __init__(self, packed: PackedPrefill, most_tokens: int, most_places: int, room: int = 0) -> None:
        self.packed, self.most_places, self.room = packed, most_places, room
        largest = self.shape(most_tokens, most_places)
        self._tokens_at = largest.place_words
        self.words = torch.zeros(largest.words, dtype=torch.int32, device=packed.state.rows.device)

    def shape(self, tokens: int, places: int) -> Shape:
        """With room for the tiles of as many sequences as there may be, one for each token."""
        tiles = _most_tiles(tokens, self.most_places)
        return Shape(tokens, max(tiles, self.room), places, self.packed.row_words)

    def layer_inputs(self, tokens: int, tiling: Tiling = "many") -> PromptInputs[Tensor]:
        """What a run of the layers reads, however many of the places are sent."""
        inputs = self._inputs(self.shape(tokens, self.most_places))
        prompts = FEW if tiling == "few" else self.most_places
        n_tiles = self.room if tiling == "pieces" else _most_tiles(tokens, prompts)
        return replace(inputs, columns=inputs.columns[:, :n_tiles])

    def place_inputs(self, places: int) -> PromptInputs[Tensor]:
        """What a choice of first tokens reads, whatever the number of tokens."""
        return self._inputs(self.shape(1, places))

    def fill(self, chunks: Chunks, tokens: int, places: int, pieces: list[int] | None = None) -> np.ndarray:
        """Give whole prompts their rows; all inputs ``[words]`` of a run of this size, to be sent.

        pieces: of each chunk's tiles, None: 1.
        """
        table_rows = range(self.most_places - places, self.most_places)[: len(chunks.counts)]
        columns = tile_columns(chunks.starts, chunks.counts, table_rows, BLOCK_M, pieces)
        return self.packed.filled(chunks, columns, self.shape(tokens, places))

    def send(self, host: np.ndarray, tokens: int, places: int) -> None:
        """Send what :meth:`fill` gave for the same size."""
        self.packed.send_filled(host, self._part(self.shape(tokens, places)))

    def send_inert(self, tokens: int, places: int) -> None:
        """Inputs of a run that writes nothing but the spare row."""
        self.send(self.fill(NO_CHUNKS, tokens, places), tokens, places)

    def inertly(self, tokens: int, places: int, run: Callable[[], object]) -> None:
        """``run`` such a run, which then writes nothing but the spare row."""
        self.send_inert(tokens, places)
        run()

    def _inputs(self, shape: Shape) -> PromptInputs[Tensor]:
        return PromptInputs.of(self._part(shape), shape)

    def _part(self, shape: Shape) -> Tensor:
        start = self._tokens_at - shape.place_words
        return self.words[start : start + shape.words]


def _most_tiles(tokens: int, prompts: int) -> int:
    """Of so many tokens, at most, of so many prompts, at most."""
    return min(tokens, prompts + tokens // BLOCK_M)
