"""Prefill without the host: one copy, and the prompts are cached and their first tokens chosen.

There are two kinds of graph, replayed one after the other: the layers, for a bucket of tokens, and the choice
of first tokens, for a number of places and a mode. In one graph every combination would be needed, three
times as many as all decode steps have; a second replay is submitted while the first still runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from rosellm.roseinfer.kernels.prefill import BLOCK_M
from rosellm.roseinfer.kernels.prefill_tiles import tile_columns
from rosellm.roseinfer.ranks.group import ALONE, Group
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.steps.cuda_graph import Graphs
from rosellm.roseinfer.steps.packed_prefill import PackedPrefill
from rosellm.roseinfer.steps.prefill import PREFILL_RANGE
from rosellm.roseinfer.steps.prompt_inputs import NO_CHUNKS, Chunks, PromptInputs, Shape
from rosellm.roseinfer.steps.rows import NOBODY, Batch

CAPTURED_TOKENS = 4096
# Sequences whose first tokens one graph chooses. The head reads all its weights for one row as for many, in
# tiles of 16 and of 64 rows.
PLACES = 1, 16, 64, 256


def bucket_of(n_tokens: int) -> int:
    """The captured run that serves ``n_tokens``: powers of two to 512, then multiples of 512."""
    return 1 << (n_tokens - 1).bit_length() if n_tokens <= 512 else -(-n_tokens // 512) * 512


def places_for(n_sequences: int) -> int:
    """The captured choice of first tokens that serves ``n_sequences``, at most ``PLACES[-1]``."""
    return next(places for places in PLACES if n_sequences <= places)


class CapturedPrefill:
    """What ``packed`` does, padded with inert tokens and places, and replayed.

    Launching its kernels takes the host longer than running them takes the GPU. More than ``CAPTURED_TOKENS``
    tokens, or ``PLACES[-1]`` sequences, are left to ``packed``. All graphs read one buffer: a run's places
    end where its tokens begin, always at the same address, and only what it uses is sent. most_tokens: no
    prefill has more; larger graphs are not captured.
    """

    def __init__(self, packed: PackedPrefill, graphs: Graphs, most_tokens: int, group: Group = ALONE) -> None:
        self.packed, self._graphs = packed, graphs
        self._most_tokens = min(bucket_of(most_tokens), CAPTURED_TOKENS)
        largest = self._shape(self._most_tokens, PLACES[-1])
        device, model = packed.state.rows.device, packed.model
        self._tokens_at = largest.place_words
        self._buffer = torch.zeros(largest.words, dtype=torch.int32, device=device)
        width = model.config.d_model
        self._hidden = torch.zeros(self._most_tokens, width, dtype=model.dtype, device=device)
        self._layer_runs: dict[int, Callable[[], object]] = {}
        self._token_runs: dict[tuple[int, str], Callable[[], Tensor]] = {}
        self._prepare = group.command("capture_prefill", self._prepared)
        self._replay = group.command("captured_prefill", self._replayed)

    @torch.inference_mode()
    def run(self, sequences: list[Sequence], counts: list[int]) -> tuple[Tensor, Batch]:
        """See :class:`prompts.Prompts`; what is not captured yet is captured first."""
        if sum(counts) > self._most_tokens or len(counts) > PLACES[-1]:
            return self.packed.run(sequences, counts)
        with record_function(PREFILL_RANGE):
            chunks = self.packed.reserved(sequences, counts)
            tokens, places = bucket_of(sum(counts)), places_for(len(counts))
            mode = self.packed.mode_of(chunks) if chunks.n_whole else None
            if not self._has(tokens, places, mode):
                self._prepare(tokens, places, mode)
            hidden = self._replay(self._filled(chunks, tokens, places), tokens, places, mode)
            return hidden, self.packed.rows.batch(chunks.whole) if chunks.n_whole else NOBODY

    def captures(self) -> list[Callable[[], object]]:
        """Calls that capture what is not captured yet, the largest first."""
        buckets = {bucket_of(n) for n in range(1, self._most_tokens + 1)} - set(self._layer_runs)
        most = places_for(min(len(self.packed.rows), PLACES[-1]))
        modes = self.packed.next_tokens.chooser.modes
        kinds = [(n, mode) for n in reversed(PLACES) if n <= most for mode in modes]
        missing = [kind for kind in kinds if kind not in self._token_runs]
        layer_runs = [partial(self._layer_run, n) for n in sorted(buckets, reverse=True)]
        return layer_runs + [partial(self._token_run, *kind) for kind in missing]

    def rehearsals(self, n_tokens: int) -> list[Callable[[], object]]:
        """See ``step.Step.rehearsals``."""
        return self.packed.rehearsals(n_tokens)

    def _replayed(self, host: np.ndarray, tokens: int, places: int, mode: str | None) -> Tensor:
        """The part of :meth:`run` on the device; mode: of choosing first tokens, None if there are none."""
        self.packed.send_filled(host, self._part(self._shape(tokens, places)))
        self._layer_run(tokens)()
        return self._hidden if mode is None else self._token_run(places, mode)()

    def _has(self, tokens: int, places: int, mode: str | None) -> bool:
        return tokens in self._layer_runs and (mode is None or (places, mode) in self._token_runs)

    def _prepared(self, tokens: int, places: int, mode: str | None) -> None:
        """Capture what :meth:`_replayed` would; inert inputs are staged for it, so nothing else may be."""
        self._layer_run(tokens)
        if mode is not None:
            self._token_run(places, mode)

    def _filled(self, chunks: Chunks, tokens: int, places: int) -> np.ndarray:
        shape = self._shape(tokens, places)
        table_rows = range(PLACES[-1] - places, PLACES[-1])[: len(chunks.counts)]
        columns = tile_columns(chunks.starts, chunks.counts, table_rows, BLOCK_M)
        return self.packed.filled(chunks, columns, shape)

    def _shape(self, tokens: int, places: int) -> Shape:
        """With room for the tiles of as many sequences as there may be, one for each token."""
        tiles = min(tokens, min(tokens, PLACES[-1]) + tokens // BLOCK_M)
        return Shape(tokens, tiles, places, self.packed.row_words)

    def _part(self, shape: Shape) -> Tensor:
        """The part of the buffer that a run of this shape uses."""
        start = self._tokens_at - shape.place_words
        return self._buffer[start : start + shape.words]

    def _layer_run(self, tokens: int) -> Callable[[], object]:
        if tokens not in self._layer_runs:
            shape = self._shape(tokens, PLACES[-1])
            self._layer_runs[tokens] = self._captured(shape, partial(self._run_layers, shape))
        return self._layer_runs[tokens]

    def _token_run(self, places: int, mode: str) -> Callable[[], Tensor]:
        if (places, mode) not in self._token_runs:
            shape = self._shape(1, places)
            self._token_runs[places, mode] = self._captured(shape, partial(self._choose, shape, mode))
        return self._token_runs[places, mode]

    def _captured(self, shape: Shape, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Warmed up with inert inputs, which write nothing but the spare row."""
        self.packed.send_filled(self._filled(NO_CHUNKS, shape.tokens, shape.places), self._part(shape))
        return self._graphs.capture(run, run)

    def _run_layers(self, shape: Shape) -> Tensor:
        inputs = PromptInputs.of(self._part(shape), shape)
        return self._hidden[: shape.tokens].copy_(self.packed.layers(inputs))

    def _choose(self, shape: Shape, mode: str) -> Tensor:
        inputs = PromptInputs.of(self._part(shape), shape)
        return self.packed.first_tokens(inputs, self._hidden, mode)
