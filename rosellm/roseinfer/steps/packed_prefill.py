"""Prefill without padding: uncached tokens of many sequences in one run, all inputs in one copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rosellm.models.attention import Attend
from rosellm.models.model import Transformer
from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.cache.kv_blocks import KVBlocks
from rosellm.roseinfer.cache.staging import StagingBuffer
from rosellm.roseinfer.kernels.prefill import BLOCK_M
from rosellm.roseinfer.kernels.prefill_tiles import Tiles, tile_columns
from rosellm.roseinfer.kernels.table import Kernels
from rosellm.roseinfer.layers.choosers import NextTokens
from rosellm.roseinfer.layers.fused import Layers
from rosellm.roseinfer.steps.prompt_inputs import (
    NO_CHUNKS,
    NO_FIELDS,
    NO_SLOTS,
    PromptInputs,
    Shape,
    fill_inputs,
)


class PackedPrefill:
    """A prefill of packed prompts, with one kernel per layer that attends and writes keys and values.

    state: its last row is a spare one, written by unused places. layers_for: returns the layers for n tokens.
    """

    def __init__(
        self,
        model: Transformer,
        kernels: Kernels,
        layers_for: Callable[[int], Layers],
        state: DeviceState,
        blocks: KVBlocks,
        next_tokens: NextTokens,
    ) -> None:
        self.model, self.blocks, self.layers_for = model, blocks, layers_for
        self.state, self.next_tokens = state, next_tokens
        self.attention, self.position = kernels.prefill_attention, kernels.position_heads
        self.rotary = [model.rotary(layer) for layer in range(model.config.n_layers)]
        self._staging = StagingBuffer(state.rows.device, torch.int32)
        self.spare, self.row_words = len(state.rows) - 1, state.rows.shape[1]

    def run(self, words: np.ndarray, shape: Shape, mode: str | None) -> Tensor:
        """Cache the tokens of inputs ``words [shape.words]``; choose first tokens unless ``mode`` is None.

        Returns final hidden states: those of each place's last token, ``[places, C]``, if first tokens are
        chosen, else those of all tokens, ``[N, C]``.
        """
        inputs = PromptInputs.of(self.send(words), shape)
        hidden = self.layers(inputs)
        return hidden if mode is None else self.first_tokens(inputs, hidden, mode)

    def captures(self) -> list[Callable[[], object]]:
        """Return an empty list: nothing is captured."""
        return []

    def warm_ups(self) -> list[Callable[[], object]]:
        """Return an empty list: nothing is captured."""
        return []

    def rehearsals(self, n_tokens: int) -> list[Callable[[], object]]:
        """Return a function that runs a prefill of ``n_tokens`` in every mode, with inert inputs."""
        return [partial(self._rehearse, n_tokens)]

    def inert(self, shape: Shape) -> np.ndarray:
        """Return inputs ``[shape.words]`` with which a run writes nothing but the spare row."""
        words, columns = np.zeros(shape.words, np.int32), tile_columns([], [], None, BLOCK_M)
        fill_inputs(PromptInputs.of(words, shape), NO_CHUNKS, columns, NO_SLOTS, NO_FIELDS, self.spare)
        return words

    def send(self, words: np.ndarray, out: Tensor | None = None) -> Tensor:
        """Copy the inputs to the device at once, into ``out`` if given; return the device tensor."""
        return self._staging.put(words).send(out)

    def layers(self, inputs: PromptInputs[Tensor], in_pieces: bool = False) -> Tensor:
        """Run the layers; return final hidden states ``[N, C]``. in_pieces: whether tiles may be split."""
        return self.layers_for(len(inputs.ids))(inputs.ids, inputs.positions, self.bind(inputs, in_pieces))

    def bind(self, inputs: PromptInputs[Tensor], in_pieces: bool = False) -> Attend:
        """Return the attention of these tokens, which also writes their keys and values to the cache."""
        tiles, config = Tiles(inputs.columns, BLOCK_M, in_pieces), self.model.config
        table = self.state.of(inputs.rows).table

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if rotary := self.rotary[layer]:
                self.position(q=q, k=k, positions=inputs.positions, rotary=rotary)
            return self.attention(
                q=q,
                k_new=k,
                v_new=v,
                k_cache_layer=self.blocks.k_cache[layer],
                v_cache_layer=self.blocks.v_cache[layer],
                block_table=table,
                tiles=tiles,
                scale=config.scale,
                window=config.window,
            )

        return attend

    def first_tokens(self, inputs: PromptInputs[Tensor], hidden: Tensor, mode: str) -> Tensor:
        """Write the state rows, choose their first tokens, advance them; return hidden states ``[B, C]``."""
        chosen = hidden[inputs.last]
        self.state.rows.index_copy_(0, inputs.slots, inputs.rows)
        self.next_tokens(chosen, self.state.of(inputs.rows), mode, self.state, inputs.slots)
        return chosen

    @torch.inference_mode()
    def _rehearse(self, n_tokens: int) -> None:
        shape = Shape(n_tokens, 1, min(n_tokens, self.spare), self.row_words)
        inputs = PromptInputs.of(self.send(self.inert(shape)), shape)
        hidden = self.layers(inputs)
        for mode in self.next_tokens.chooser.modes:
            self.first_tokens(inputs, hidden, mode)
