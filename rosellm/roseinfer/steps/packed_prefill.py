"""Prefill without padding: uncached tokens of many sequences in one run, all inputs in one copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from rosellm.models.model import Transformer
from rosellm.roseinfer.cache.kv_blocks import KVBlockManager
from rosellm.roseinfer.cache.staging import StagingBuffer
from rosellm.roseinfer.kernels.prefill import BLOCK_M
from rosellm.roseinfer.kernels.prefill_tiles import Tiles, tile_columns
from rosellm.roseinfer.kernels.table import Kernels
from rosellm.roseinfer.layers.fused import Layers
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.steps.cuda_graph import GraphPool, record_graph
from rosellm.roseinfer.steps.prefill import PREFILL_RANGE

WARMED_TOKENS = 512  # runs up to here are captured before the first request
CAPTURED_TOKENS, CAPTURED_ROWS = 4096, 256


A = TypeVar("A", Tensor, np.ndarray)
Shape = tuple[int, int, int, int]  # tokens, tiles, rows, and blocks per row


@dataclass(frozen=True)
class _Inputs(Generic[A]):
    """The device inputs of a run of N tokens of B sequences, views of one int32 buffer.

    ids, positions ``[N]``; columns ``[6, T]`` of the attention's tiles; last ``[B]``: the packed rows of last
    tokens; table ``[B, W]``. Padding is inert: positions of −1, tiles of no rows.
    """

    ids: A
    positions: A
    columns: A
    last: A
    table: A

    @classmethod
    def of(cls, buffer: A, tokens: int, tiles: int, rows: int, width: int) -> _Inputs[A]:
        ends = list(accumulate([tokens, tokens, 6 * tiles, rows, rows * width], initial=0))
        ids, positions, columns, last, table = (buffer[start:end] for start, end in pairwise(ends))
        return cls(ids, positions, columns.reshape(6, tiles), last, table.reshape(rows, width))


def bucket_of(n_tokens: int) -> int:
    """The captured run that serves ``n_tokens``: powers of two to 512, then multiples of 512."""
    return 1 << (n_tokens - 1).bit_length() if n_tokens <= 512 else -(-n_tokens // 512) * 512


class PackedPrefill:
    """Caches tokens with a kernel that attends and writes keys and values at once; needs a shared pool.

    layers_for: number of tokens → layers. width: blocks a sequence may hold. capture: runs of up to
    ``CAPTURED_TOKENS`` tokens of ``CAPTURED_ROWS`` sequences are padded with inert rows (:func:`bucket_of`)
    and replayed as a CUDA graph, since launching their kernels takes the host longer than running them takes
    the GPU. pool: the graphs' memory.
    """

    def __init__(
        self,
        model: Transformer,
        blocks: KVBlockManager,
        kernels: Kernels,
        layers_for: Callable[[int], Layers],
        width: int,
        capture: bool,
        pool: GraphPool | None,
    ) -> None:
        self.model, self.blocks, self.width, self._pool = model, blocks, width, pool
        self.attention, self.layers_for = kernels.prefill_attention, layers_for
        self.position = kernels.position_heads
        self.rotary = [model.rotary(layer) for layer in range(model.config.n_layers)]
        device = blocks.k_cache.device
        self._capture = capture and device.type == "cuda"
        self._staging = StagingBuffer(device, torch.int32)
        self._captured: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}

    @torch.inference_mode()
    def warm_up(self, rows: int) -> None:
        """Capture runs of up to as many tokens as ``rows`` short prompts may have."""
        bucket = 1
        while self._capture and bucket <= min(4 * rows, WARMED_TOKENS):
            self._forward_of(bucket)
            bucket *= 2

    @torch.inference_mode()
    def run(self, sequences: list[Sequence], counts: list[int]) -> Tensor:
        """Cache ``counts[i]`` more tokens of each; final hidden states ``[n, C]`` of those now fully cached.

        Reserves their slots, with a last chunk to the end of its block; ``n_cached`` is left to the caller.
        """
        with record_function(PREFILL_RANGE):
            starts = [s.n_cached for s in sequences]
            for sequence, count in zip(sequences, counts, strict=True):
                self.blocks.reserve_prompt(0, sequence.block_ids[0], count + self._ahead(sequence, count))
            n_tokens = sum(counts)
            if self._capture and n_tokens <= CAPTURED_TOKENS and len(counts) <= CAPTURED_ROWS:
                return self._replay(sequences, starts, counts, bucket_of(n_tokens))
            columns = tile_columns(starts, counts, None, BLOCK_M)
            shape = n_tokens, columns.shape[1], len(counts), self.width
            n_whole = self._fill(sequences, starts, counts, columns, shape)
            inputs = _Inputs.of(self._staging.send().view(-1), *shape)
            return self._forward(inputs)[inputs.last[:n_whole]]

    def _ahead(self, sequence: Sequence, count: int) -> int:
        """Slots to reserve beyond the last chunk: the rest of its block, if the sequence will need it."""
        n_tokens = sequence.n_cached + count
        if n_tokens < sequence.prefill_length:
            return 0
        return min(-n_tokens % self.blocks.block_size, max(sequence.max_length - 1 - n_tokens, 0))

    def _replay(self, sequences: list[Sequence], starts: list[int], counts: list[int], bucket: int) -> Tensor:
        shape = self._shape(bucket)
        buffer, forward = self._forward_of(bucket)
        n_whole = self._fill(sequences, starts, counts, tile_columns(starts, counts, None, BLOCK_M), shape)
        self._staging.send(buffer)
        return forward()[_Inputs.of(buffer, *shape).last[:n_whole]]

    def _shape(self, bucket: int) -> Shape:
        """Room for a sequence per token, up to ``CAPTURED_ROWS``, and for all their tiles."""
        rows = min(bucket, CAPTURED_ROWS)
        return bucket, min(bucket, rows + bucket // BLOCK_M), rows, self.width

    def _forward_of(self, bucket: int) -> tuple[Tensor, Callable[[], Tensor]]:
        if bucket not in self._captured:
            self._captured[bucket] = self._record(self._shape(bucket))
        return self._captured[bucket]

    def _record(self, shape: Shape) -> tuple[Tensor, Callable[[], Tensor]]:
        tokens, tiles, rows, width = shape
        n_words = 2 * tokens + 6 * tiles + rows + rows * width
        buffer = torch.zeros(n_words, dtype=torch.int32, device=self.blocks.k_cache.device)
        inputs = _Inputs.of(buffer, *shape)
        inputs.positions.fill_(-1)
        return buffer, record_graph(lambda: self._forward(inputs), pool=self._pool)

    def _forward(self, inputs: _Inputs[Tensor]) -> Tensor:
        tiles, config = Tiles(inputs.columns, BLOCK_M), self.model.config

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if rotary := self.rotary[layer]:
                self.position(q=q, k=k, positions=inputs.positions, rotary=rotary)
            return self.attention(
                q=q,
                k_new=k,
                v_new=v,
                k_cache_layer=self.blocks.k_cache[layer],
                v_cache_layer=self.blocks.v_cache[layer],
                block_table=inputs.table,
                tiles=tiles,
                scale=config.scale,
                window=config.window,
            )

        return self.layers_for(len(inputs.ids))(inputs.ids, inputs.positions, attend)  # [N, C]

    def _fill(
        self, sequences: list[Sequence], starts: list[int], counts: list[int], tiles: np.ndarray, shape: Shape
    ) -> int:
        """Write the staging buffer's inputs; returns the number of sequences then fully cached."""
        tokens, n_tiles, rows, width = shape
        host = self._staging.host(2 * tokens + 6 * n_tiles + rows + rows * width)
        inputs = _Inputs.of(host, *shape)
        n, ends = sum(counts), np.cumsum(counts)
        spans = list(zip(sequences, starts, counts, strict=True))
        inputs.ids[:n] = [token for s, a, n in spans for token in s.tokens[a : a + n]]
        inputs.ids[n:] = 0
        inputs.positions[:n] = np.arange(n) + np.repeat(np.array(starts) - ends + counts, counts)
        inputs.positions[n:] = -1
        inputs.columns[:, : tiles.shape[1]] = tiles
        inputs.columns[:, tiles.shape[1] :] = 0
        last = (ends - 1)[[s.completes_prefill(n) for s, _, n in spans]]
        inputs.last[: len(last)] = last
        for row, sequence in zip(inputs.table, sequences, strict=False):
            ids = sequence.block_ids[0]
            row[: len(ids)] = ids
        return len(last)
