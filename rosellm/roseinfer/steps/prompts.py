"""The host's plan of a prefill: which tokens of which prompts are cached where, in one array."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Protocol

import numpy as np

from rosellm.models.arch import Arch
from rosellm.roseinfer.kernels.prefill import BLOCK_M
from rosellm.roseinfer.kernels.prefill_tiles import pieces_for, tile_columns
from rosellm.roseinfer.layers.logprobs import PromptTokens
from rosellm.roseinfer.ranks.group import Call
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.steps.captured_prefill import CapturedPrefill, layer_size, places_for
from rosellm.roseinfer.steps.planner import NO_ROWS, Batch, Planner
from rosellm.roseinfer.steps.prompt_inputs import Chunks, PromptInputs, Shape, fill_inputs, inert_words
from rosellm.roseinfer.steps.step import PREFILL_RANGE, profile_range
from rosellm.roseinfer.steps.worker import Worker


class Prompts(Protocol):
    """The part of a step that caches chunks of prompts; complete prompts receive a row and a first token."""

    def run(self, sequences: list[Sequence], counts: list[int]) -> Batch:
        """Reserve slots for ``counts[i]`` more tokens of sequence i, and cache these tokens.

        Returns the rows of the sequences that are fully cached afterwards, in the order of the worker's
        hidden states. The caller updates ``num_cached_tokens``.
        """


class PackedPrompts:
    """A :class:`Prompts` that packs chunks into one array, without padding, for the worker's prefill.

    planner: assigns rows and blocks.
    worker: runs the prefill on this rank.
    call: ``worker.call``, on every rank.
    """

    def __init__(self, config: Arch, planner: Planner, worker: Worker, call: Call) -> None:
        self.planner, self.worker, self._call = planner, worker, call
        self.n_heads, self.window = config.n_heads, config.window
        self.row_words = worker.prompts.row_words
        self._captured = worker.prompts if isinstance(worker.prompts, CapturedPrefill) else None
        self._arrays = lru_cache(32)(partial(_arrays_of, worker.prompts.spare))

    def run(self, sequences: list[Sequence], counts: list[int]) -> Batch:
        """Reserve slots and cache the chunks, by CUDA graphs unless the prefill is too large for them."""
        with profile_range(PREFILL_RANGE):
            chunks = self.reserved(sequences, counts)
            captured = self._captured
            if captured and captured.takes(sum(counts), len(counts)):
                self._replay(captured, chunks)
            else:
                self._run(chunks)
            if _keeps(chunks):
                self._give_logprobs(chunks)
            return self.planner.batch(chunks.whole) if chunks.n_whole else NO_ROWS

    def _give_logprobs(self, chunks: Chunks) -> None:
        """Give sequences the logprobs of their prompts' tokens, if requested; the host waits for them."""
        for asked in PromptTokens.asked(chunks.sequences, chunks.starts, chunks.counts):
            asked.give(self._call("prompt_logprobs", *asked.wishes))

    def reserved(self, sequences: list[Sequence], counts: list[int]) -> Chunks:
        """Reserve slots for the chunks, and for the output of completed prompts; return the chunks."""
        chunks = Chunks.of(sequences, counts)
        blocks = self.planner.blocks
        more = self.planner.tokens_ahead()
        for sequence, count in zip(chunks.sequences, chunks.counts, strict=True):
            ahead = _slots_ahead(sequence, count, blocks.block_size, more)
            blocks.reserve_prompt(sequence.block_ids, count + ahead)
        return chunks

    def pieces(self, chunks: Chunks, room: int) -> list[int] | None:
        """Return the number of pieces into which each chunk's tiles are split, or None if none is split.

        room: number of tiles that the GPU runs at once.
        """
        return pieces_for(chunks.starts, chunks.counts, BLOCK_M, room, self.n_heads, self.window)

    def mode_of(self, chunks: Chunks) -> str | None:
        """Return the chooser's mode for the first tokens, or None if no chunk completes a prompt."""
        params = [s.params for s in chunks.whole]
        return self.worker.next_tokens.chooser.mode(params) if params else None

    def filled(self, chunks: Chunks, columns: np.ndarray, shape: Shape) -> np.ndarray:
        """Assign rows to the completed prompts; return all inputs of the prefill, ``[shape.words]`` int32.

        columns: the result of ``tile_columns``.

        A later call may overwrite the result.
        """
        whole, starts = chunks.whole, chunks.starts[: chunks.n_whole]
        slots, fields = self.planner.assign(whole, [s.prefill_length - 1 for s in whole], starts)
        words, inputs, padding = self._arrays(shape)
        words[:] = padding
        fill_inputs(inputs, chunks, columns, slots, fields)
        return words

    def _run(self, chunks: Chunks) -> None:
        columns = tile_columns(chunks.starts, chunks.counts, None, BLOCK_M)
        shape = Shape(sum(chunks.counts), columns.shape[1], len(chunks.counts), self.row_words)
        self._call(
            "prefill", self.filled(chunks, columns, shape), shape, self.mode_of(chunks), _keeps(chunks)
        )

    def _replay(self, captured: CapturedPrefill, chunks: Chunks) -> None:
        n, layout = len(chunks.counts), captured.layout
        pieces, mode = self.pieces(chunks, layout.room), self.mode_of(chunks)
        tokens, tiling = layer_size(sum(chunks.counts), n, pieces is not None)
        places = places_for(n)
        columns = tile_columns(chunks.starts, chunks.counts, layout.table_rows(places)[:n], BLOCK_M, pieces)
        words = self.filled(chunks, columns, layout.shape(tokens, places))
        self._call("captured_prefill", words, tokens, tiling, places, mode, _keeps(chunks))


def _arrays_of(spare: int, shape: Shape) -> tuple[np.ndarray, PromptInputs[np.ndarray], np.ndarray]:
    """Return a buffer for the inputs of a prefill, its parts, and the padding with which to begin."""
    words = np.zeros(shape.words, np.int32)
    return words, PromptInputs.of(words, shape), inert_words(shape, spare)


def _keeps(chunks: Chunks) -> bool:
    return any(sequence.prompt_logprobs is not None for sequence in chunks.sequences)


def _slots_ahead(sequence: Sequence, count: int, block_size: int, more: int) -> int:
    """Return how many slots to reserve after a prompt: the rest of its last block, and ``more``.

    They are no more than the output can use.
    """
    n_tokens = sequence.num_cached_tokens + count
    if n_tokens < sequence.prefill_length:
        return 0
    return min(-n_tokens % block_size + more, max(sequence.max_length - 1 - n_tokens, 0))
