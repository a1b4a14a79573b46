"""Prefill without the host: one copy, and the prompts are cached and their first tokens chosen.

There are two kinds of graph, replayed one after the other: the layers, for a bucket of tokens, and the choice
of first tokens, for a number of places and a mode. In one graph every combination would be needed, three
times as many as all decode steps have; a second replay is submitted while the first still runs. Few prompts
have graphs of the layers with fewer programs, and few tokens after a long prefix have some in which attention
takes its keys in pieces (``prefill_tiles``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rosellm.models.model import Transformer
from rosellm.roseinfer.kernels.prefill import BLOCK_M, room_for
from rosellm.roseinfer.kernels.prefill_tiles import LONG_PREFIX
from rosellm.roseinfer.profile_range import profile_range
from rosellm.roseinfer.ranks.group import ALONE, Group
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.steps.cuda_graph import Graphs
from rosellm.roseinfer.steps.packed_prefill import PackedPrefill
from rosellm.roseinfer.steps.prefill import PREFILL_RANGE
from rosellm.roseinfer.steps.prompt_buffer import FEW, PromptBuffer, Tiling
from rosellm.roseinfer.steps.rows import NO_ROWS, Batch

CAPTURED_TOKENS = 4096
FEW_TOKENS = 1024  # of more, a program without a tile is little beside what there is to compute
# Sequences whose first tokens one graph chooses. The head reads all its weights for one row as for many, in
# tiles of 16 and of 64 rows.
PLACES = 1, 16, 64, 256


def bucket_of(n_tokens: int) -> int:
    """The captured run that serves ``n_tokens``: powers of two to 256, multiples of 128 to 1,024, then fewer.

    Of many tokens those that pad take as long as others.
    """
    for limit, step in ((256, None), (1024, 128), (2048, 256)):
        if n_tokens <= limit:
            return 1 << (n_tokens - 1).bit_length() if step is None else -(-n_tokens // step) * step
    return -(-n_tokens // 512) * 512


def places_for(n_sequences: int) -> int:
    """The captured choice of first tokens that serves ``n_sequences``, at most ``PLACES[-1]``."""
    return next(places for places in PLACES if n_sequences <= places)


LayerSize = tuple[int, Tiling]  # tokens, and whose tiles


def layer_size(n_tokens: int, n_prompts: int, in_pieces: bool) -> LayerSize:
    """The captured run of the layers that serves so many; in pieces, of at least a tile."""
    tokens = bucket_of(n_tokens)
    if in_pieces:
        return max(tokens, BLOCK_M), "pieces"
    return tokens, "few" if n_prompts <= FEW < tokens <= FEW_TOKENS else "many"


def room_of(model: Transformer, most_positions: int) -> int:
    """Tiles and pieces of tiles that the model's GPU runs at once; 0 where no prefix is worth cutting."""
    if model.device.type != "cuda" or most_positions <= LONG_PREFIX:
        return 0
    num_sms, c = torch.cuda.get_device_properties(model.device).multi_processor_count, model.config
    return room_for(model.dtype, c.head_dim, c.n_heads, c.group, num_sms)


class CapturedPrefill:
    """What ``packed`` does, padded with inert tokens and places, and replayed.

    Launching its kernels takes the host longer than running them takes the GPU. More than ``CAPTURED_TOKENS``
    tokens, or ``PLACES[-1]`` sequences, are left to ``packed``. All graphs read one buffer. most_tokens: no
    prefill has more; larger graphs are not captured. room: see :func:`room_of`; 0: keys are never cut.
    """

    def __init__(
        self, packed: PackedPrefill, graphs: Graphs, most_tokens: int, room: int = 0, group: Group = ALONE
    ) -> None:
        self.packed, self._graphs = packed, graphs
        self._most_tokens = min(bucket_of(most_tokens), CAPTURED_TOKENS)
        self._buffer = PromptBuffer(packed, self._most_tokens, PLACES[-1], room)
        model, width = packed.model, packed.model.config.d_model
        self._hidden = torch.zeros(self._most_tokens, width, dtype=model.dtype, device=model.device)
        self._layer_runs: dict[LayerSize, Callable[[], object]] = {}
        self._token_runs: dict[tuple[int, str], Callable[[], Tensor]] = {}
        self._prepare = group.broadcast("capture_prefill", self._prepared)
        self._replay = group.broadcast("captured_prefill", self._run_replay)

    @torch.inference_mode()
    def run(self, sequences: list[Sequence], counts: list[int]) -> tuple[Tensor, Batch]:
        """See :class:`prompts.Prompts`; what is not captured yet is captured first."""
        if sum(counts) > self._most_tokens or len(counts) > PLACES[-1]:
            return self.packed.run(sequences, counts)
        with profile_range(PREFILL_RANGE):
            chunks = self.packed.reserved(sequences, counts)
            pieces = self.packed.pieces(chunks, self._buffer.room)
            size = layer_size(sum(counts), len(counts), pieces is not None)
            places, mode = places_for(len(counts)), self.packed.mode_of(chunks) if chunks.n_whole else None
            if not self._has(size, places, mode):
                self._prepare(*size, places, mode)
            host = self._buffer.fill(chunks, size[0], places, pieces)
            hidden = self._replay(host, *size, places, mode)
            return hidden, self.packed.rows.batch(chunks.whole) if chunks.n_whole else NO_ROWS

    def captures(self) -> list[Callable[[], object]]:
        """Calls that capture what is not captured yet, the largest first."""
        sizes = [size for size in self._layer_sizes() if size not in self._layer_runs]
        layer_runs = [partial(self._layer_run, *size) for size in sizes]
        missing = [kind for kind in self._token_kinds() if kind not in self._token_runs]
        return layer_runs + [partial(self._token_run, *kind) for kind in missing]

    def warm_ups(self) -> list[Callable[[], object]]:
        """See ``step.Step.warm_ups``."""
        runs: list[Callable[[], object]] = []
        for size in self._layer_sizes():
            run = partial(self._run_layers, *size)
            runs.append(partial(self._buffer.inertly, size[0], PLACES[-1], run))
        for places, mode in self._token_kinds():
            runs.append(partial(self._buffer.inertly, 1, places, partial(self._choose, places, mode)))
        return runs

    def rehearsals(self, n_tokens: int) -> list[Callable[[], object]]:
        """See ``step.Step.rehearsals``."""
        return self.packed.rehearsals(n_tokens)

    def _layer_sizes(self) -> list[LayerSize]:
        """Of the captured runs of the layers, those of the most tokens first.

        Tiles are in pieces if there may be fewer of them than there is room for.
        """
        most_in_pieces = min(self._most_tokens, (self._buffer.room - 1) * BLOCK_M)
        tokens, most_prompts = range(1, self._most_tokens + 1), len(self.packed.rows)
        whole = {layer_size(n, m, False) for n in tokens for m in (1, min(n, most_prompts))}
        in_pieces = {layer_size(n, 1, True) for n in range(1, most_in_pieces + 1)}
        return sorted(whole | in_pieces, reverse=True)

    def _token_kinds(self) -> list[tuple[int, str]]:
        """Places and mode of the captured choices of first tokens, the most places first."""
        most = places_for(min(len(self.packed.rows), PLACES[-1]))
        modes = self.packed.next_tokens.chooser.modes
        return [(n, mode) for n in reversed(PLACES) if n <= most for mode in modes]

    def _run_replay(
        self, host: np.ndarray, tokens: int, tiling: Tiling, places: int, mode: str | None
    ) -> Tensor:
        """The part of :meth:`run` on the device; mode: of choosing first tokens, None if there are none."""
        self._buffer.send(host, tokens, places)
        self._layer_run(tokens, tiling)()
        return self._hidden if mode is None else self._token_run(places, mode)()

    def _has(self, size: LayerSize, places: int, mode: str | None) -> bool:
        return size in self._layer_runs and (mode is None or (places, mode) in self._token_runs)

    def _prepared(self, tokens: int, tiling: Tiling, places: int, mode: str | None) -> None:
        """Capture what :meth:`_run_replay` would; inert inputs are staged for it, so nothing else may be."""
        self._layer_run(tokens, tiling)
        if mode is not None:
            self._token_run(places, mode)

    def _layer_run(self, tokens: int, tiling: Tiling) -> Callable[[], object]:
        size = tokens, tiling
        if size not in self._layer_runs:
            run = partial(self._run_layers, *size)
            self._layer_runs[size] = self._captured(run, tokens, PLACES[-1])
        return self._layer_runs[size]

    def _token_run(self, places: int, mode: str) -> Callable[[], Tensor]:
        if (places, mode) not in self._token_runs:
            run = partial(self._choose, places, mode)
            self._token_runs[places, mode] = self._captured(run, 1, places)
        return self._token_runs[places, mode]

    def _captured(self, run: Callable[[], Tensor], tokens: int, places: int) -> Callable[[], Tensor]:
        """Warmed up with inert inputs, which write nothing but the spare row."""
        self._buffer.send_inert(tokens, places)
        return self._graphs.capture(run, run)

    def _run_layers(self, tokens: int, tiling: Tiling) -> Tensor:
        inputs = self._buffer.layer_inputs(tokens, tiling)
        return self._hidden[:tokens].copy_(self.packed.layers(inputs, tiling == "pieces"))

    def _choose(self, places: int, mode: str) -> Tensor:
        return self.packed.first_tokens(self._buffer.place_inputs(places), self._hidden, mode)
