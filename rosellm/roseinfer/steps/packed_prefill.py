"""Prefill without padding: uncached tokens of many sequences packed together, all inputs sent in one copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rosellm.models.attention import Attend
from rosellm.models.model import Transformer
from rosellm.models.quantized import QuantizedHeads
from rosellm.roseinfer.cache.device_state import FIELDS, DeviceState
from rosellm.roseinfer.cache.kv_blocks import KVBlocks
from rosellm.roseinfer.cache.staging import StagingBuffer
from rosellm.roseinfer.kernels import prefill_ring
from rosellm.roseinfer.kernels.prefill import BLOCK_M
from rosellm.roseinfer.kernels.prefill_tiles import LONG_PREFIX, Tiles
from rosellm.roseinfer.kernels.table import Kernels
from rosellm.roseinfer.kernels.wide_prefixes import MOST_TOKENS, Prefixes, prefix_words
from rosellm.roseinfer.layers.choosers import NextTokens
from rosellm.roseinfer.layers.fused import Layers
from rosellm.roseinfer.steps.prompt_inputs import PromptInputs, Shape, inert_words
from rosellm.triton_or_none import next_power_of_2


class PackedPrefill:
    """A prefill of packed prompts, in which one kernel per layer attends and caches keys and values.

    layers_for: maps a number of tokens to the layers.
    state: the device state; padding places write to its last row, which is spare.
    next_tokens: chooses first tokens and advances their state rows.

    ``draft`` caches the same prompts for a model that drafts, and ``write_prompts`` keeps the tokens of new
    rows for drafts; or they are None.
    """

    draft: PackedPrefill | None = None
    write_prompts: Callable[..., None] | None = None

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
        self._most_copied = self._copied_blocks()

    def run(self, words: np.ndarray, shape: Shape, mode: str | None) -> tuple[Tensor, Tensor | None]:
        """Cache the tokens described by ``words``, choose first tokens, and return final hidden states.

        words: the inputs ``[shape.words]`` int32.
        mode: the chooser's mode for first tokens; None chooses none.

        Returns the states of all tokens ``[N, C]``, and of each sequence's last token ``[places, C]`` unless
        ``mode`` is None.
        """
        inputs = PromptInputs.of(self.send(words), shape)
        inputs = inputs._replace(prefixes=self._prefixes(words, shape))
        hidden = self.layers(inputs)
        return hidden, None if mode is None else self.first_tokens(inputs, hidden, mode)

    def captures(self) -> list[Callable[[], object]]:
        """Return an empty list: this prefill has no graphs."""
        return []

    def warm_ups(self) -> list[Callable[[], object]]:
        """Return an empty list: this prefill has no graphs."""
        return []

    def rehearsals(self, n_tokens: int) -> list[Callable[[], object]]:
        """Return functions that run a prefill of ``n_tokens`` padding tokens in every mode.

        They compile the kernels of such a prefill and take as much memory as a real one: with quantised
        prefixes, the second copies as many blocks as a prefill may, and the third does so for few tokens.
        """
        runs = [(n_tokens, 0)]
        if self._most_copied:
            few = min(n_tokens, prefill_ring.FEW_TOKENS)
            runs += [(n, self._most_copied) for n in dict.fromkeys((n_tokens, few))]
        return [partial(self._rehearse, *run) for run in runs]

    def inert(self, shape: Shape) -> np.ndarray:
        """Return inputs ``[shape.words]`` with which a prefill writes nothing but the spare state row."""
        return inert_words(shape, self.spare)

    def send(self, words: np.ndarray, out: Tensor | None = None) -> Tensor:
        """Copy the inputs to the device in one copy, into ``out`` if given; return the device tensor."""
        return self._staging.put(words).send(out)

    def layers(
        self, inputs: PromptInputs[Tensor], in_pieces: bool = False, n_layers: int | None = None
    ) -> Tensor:
        """Run the layers and return final hidden states ``[N, C]``.

        in_pieces: whether the keys of tiles may be split into pieces.
        n_layers: as in ``Layers``.
        """
        if self.draft is not None:
            self.draft.layers(inputs, in_pieces, n_layers)
        layers, attend = self.layers_for(len(inputs.ids)), self.bind(inputs, in_pieces)
        return layers(inputs.ids, inputs.positions, attend, n_layers)

    def bind(self, inputs: PromptInputs[Tensor], in_pieces: bool = False) -> Attend:
        """Return the attention of the packed tokens, which also caches their keys and values.

        in_pieces: whether the keys of tiles may be split into pieces.
        """
        tiles, config = Tiles(inputs.columns, BLOCK_M, in_pieces, prefixes=inputs.prefixes), self.model.config
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
        """Write the new state rows, choose their first tokens, and advance the rows.

        hidden: final hidden states ``[N, C]`` of all tokens.
        mode: the chooser's mode.

        Returns the hidden states ``[B, C]`` of each place's last token.
        """
        chosen = hidden[inputs.last]
        new = self.state.of(inputs.rows)
        self.state.rows.index_copy_(0, inputs.slots, inputs.rows)
        if self.write_prompts is not None:
            self.write_prompts(state=new, slots=inputs.slots, last=inputs.last, ids=inputs.ids)
        self.next_tokens(chosen, new, mode, self.state, inputs.slots)
        return chosen

    @torch.inference_mode()
    def _rehearse(self, n_tokens: int, n_copied: int) -> None:
        shape = Shape(n_tokens, 1, min(n_tokens, self.spare), self.row_words)
        inputs = PromptInputs.of(self.send(self.inert(shape)), shape)
        if n_copied:
            zeros = inputs.ids.new_zeros(shape.places + n_copied)
            inputs = inputs._replace(prefixes=Prefixes.of(zeros, shape.places))
        hidden = self.layers(inputs)
        for mode in self.next_tokens.chooser.modes(shape.places):
            self.first_tokens(inputs, hidden, mode)

    def _copied_blocks(self) -> int:
        """Return how many blocks of quantised prefixes a prefill may copy in the model's dtype.

        It is 0 unless prefixes can be long and TMA can load their copies, and 0 for a model with a window,
        whose tokens attend to few blocks of a long prefix.
        """
        config, (places, width), size = self.model.config, self.state.table.shape, self.blocks.block_size
        loadable = self.model.dtype.itemsize == 2 and config.head_dim == next_power_of_2(config.head_dim)
        is_long = config.window is None and width * size > LONG_PREFIX
        if not (isinstance(self.blocks.k_cache, QuantizedHeads) and loadable and is_long):
            return 0
        return min(MOST_TOKENS // size, places * width)

    def _prefixes(self, words: np.ndarray, shape: Shape) -> Prefixes | None:
        """Return the cached prefixes to copy, on the device: those of no block if all tokens are new.

        Return None if there are few tokens and no long prefix, or too many prefixes.

        words: the inputs ``[shape.words]``.
        """
        inputs = PromptInputs.of(words, shape)
        is_short = shape.tokens <= prefill_ring.FEW_TOKENS and inputs.columns[4].max() < LONG_PREFIX
        if not self._most_copied or is_short:
            return None
        starts = np.zeros(len(inputs.rows), np.int32)
        starts[inputs.columns[5]] = inputs.columns[4]
        copied = prefix_words(starts, inputs.rows[:, FIELDS:], self.blocks.block_size)
        if len(copied) > len(starts) + self._most_copied:
            return None
        return Prefixes.of(self.send(copied), len(starts))
