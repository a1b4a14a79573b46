"""Prefill without padding: uncached tokens of many sequences in one run, all inputs in one copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence as SequenceOf
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rosellm.models.attention import Attend
from rosellm.models.model import Transformer
from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.cache.staging import StagingBuffer
from rosellm.roseinfer.kernels.prefill import BLOCK_M
from rosellm.roseinfer.kernels.prefill_tiles import Tiles, pieces_for, tile_columns
from rosellm.roseinfer.kernels.table import Kernels
from rosellm.roseinfer.layers.fused import Layers
from rosellm.roseinfer.profile_range import profile_range
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.steps.next_tokens import NextTokens
from rosellm.roseinfer.steps.prefill import PREFILL_RANGE
from rosellm.roseinfer.steps.prompt_inputs import NO_CHUNKS, Chunks, PromptInputs, Shape, fill_inputs
from rosellm.roseinfer.steps.rows import NO_ROWS, Batch, Rows


class PackedPrefill:
    """Caches tokens with a kernel that attends and writes keys and values at once; needs a shared pool.

    state: the rows of ``rows`` and, as its last, a spare one, which unused places write. layers_for: number
    of tokens → layers.
    """

    def __init__(
        self,
        model: Transformer,
        kernels: Kernels,
        layers_for: Callable[[int], Layers],
        state: DeviceState,
        rows: Rows,
        next_tokens: NextTokens,
    ) -> None:
        self.model, self.blocks, self.layers_for = model, rows.blocks, layers_for
        self.state, self.rows, self.next_tokens = state, rows, next_tokens
        self.attention, self.position = kernels.prefill_attention, kernels.position_heads
        self.rotary = [model.rotary(layer) for layer in range(model.config.n_layers)]
        self._staging = StagingBuffer(state.rows.device, torch.int32)
        self._spare, self.row_words = len(state.rows) - 1, state.rows.shape[1]

    @torch.inference_mode()
    def run(self, sequences: list[Sequence], counts: list[int]) -> tuple[Tensor, Batch]:
        """See :class:`prompts.Prompts`; every kernel is launched from Python."""
        with profile_range(PREFILL_RANGE):
            chunks = self.reserved(sequences, counts)
            columns = tile_columns(chunks.starts, chunks.counts, None, BLOCK_M)
            shape = Shape(sum(chunks.counts), columns.shape[1], len(chunks.counts), self.row_words)
            inputs = PromptInputs.of(self.send(chunks, columns, shape), shape)
            hidden = self.layers(inputs)
            if not chunks.n_whole:
                return hidden, NO_ROWS
            return self.first_tokens(inputs, hidden, self.mode_of(chunks)), self.rows.batch(chunks.whole)

    def captures(self) -> list[Callable[[], object]]:
        """Nothing is captured."""
        return []

    def warm_ups(self) -> list[Callable[[], object]]:
        """Nothing is captured."""
        return []

    def rehearsals(self, n_tokens: int) -> list[Callable[[], object]]:
        """See ``step.Step.rehearsals``."""
        return [partial(self._rehearse, n_tokens, self.next_tokens.chooser.modes)]

    def reserved(self, sequences: list[Sequence], counts: list[int]) -> Chunks:
        """The chunks, with slots for their tokens; a prompt's last one also gets the rest of its block."""
        chunks = Chunks.of(sequences, counts)
        for sequence, count in zip(chunks.sequences, chunks.counts, strict=True):
            self.blocks.reserve_prompt(0, sequence.block_ids[0], count + self._ahead(sequence, count))
        return chunks

    def pieces(self, chunks: Chunks, room: int) -> list[int] | None:
        """Of each chunk's tiles, as many as there is room for; None: all are whole."""
        c = self.model.config
        return pieces_for(chunks.starts, chunks.counts, BLOCK_M, room, c.n_heads, c.window)

    def mode_of(self, chunks: Chunks) -> str:
        """The chooser's mode for the first tokens."""
        return self.next_tokens.chooser.mode([s.params for s in chunks.whole])

    def send(self, chunks: Chunks, columns: np.ndarray, shape: Shape) -> Tensor:
        """Give whole prompts their rows and send all inputs in one copy."""
        return self.send_filled(self.filled(chunks, columns, shape))

    def filled(self, chunks: Chunks, columns: np.ndarray, shape: Shape) -> np.ndarray:
        """Give whole prompts their rows; all inputs ``[shape.words]``, to be sent."""
        whole = chunks.whole
        slots, fields = self.rows.assign(whole, [s.prefill_length - 1 for s in whole])
        host = self._staging.host(shape.words)
        fill_inputs(PromptInputs.of(host, shape), chunks, columns, slots, fields, self._spare)
        return host

    def send_filled(self, host: np.ndarray, out: Tensor | None = None) -> Tensor:
        """Send what :meth:`filled` gave, into ``out`` if given."""
        return self._staging.put(host).send(out)

    def layers(self, inputs: PromptInputs[Tensor], in_pieces: bool = False) -> Tensor:
        """Run the model: final hidden states ``[N, C]``. in_pieces: see ``Tiles``."""
        return self.layers_for(len(inputs.ids))(inputs.ids, inputs.positions, self.bind(inputs, in_pieces))

    def bind(self, inputs: PromptInputs[Tensor], in_pieces: bool = False) -> Attend:
        """Attention of these tokens, which also stores them; a tile's table row is one of the places."""
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
        """Write the rows, choose their tokens and advance them; hidden states ``[B, C]`` of last tokens."""
        chosen = hidden[inputs.last]
        self.state.rows.index_copy_(0, inputs.slots, inputs.rows)
        self.next_tokens(chosen, self.state.of(inputs.rows), mode, self.state, inputs.slots)
        return chosen

    @torch.inference_mode()
    def _rehearse(self, n_tokens: int, modes: SequenceOf[str]) -> None:
        shape = Shape(n_tokens, 1, min(n_tokens, len(self.rows)), self.row_words)
        inputs = PromptInputs.of(self.send(NO_CHUNKS, tile_columns([], [], None, BLOCK_M), shape), shape)
        hidden = self.layers(inputs)
        for mode in modes:
            self.first_tokens(inputs, hidden, mode)

    def _ahead(self, sequence: Sequence, count: int) -> int:
        """Slots to reserve beyond the last chunk: the rest of its block, if the sequence will need it."""
        n_tokens = sequence.n_cached + count
        if n_tokens < sequence.prefill_length:
            return 0
        return min(-n_tokens % self.blocks.block_size, max(sequence.max_length - 1 - n_tokens, 0))
