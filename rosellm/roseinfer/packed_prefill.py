"""Prefill without padding: uncached tokens of many sequences in one run, all inputs in one copy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from rosellm.roseinfer.decode_layers import Layers
from rosellm.roseinfer.kernels import Kernels
from rosellm.roseinfer.kv_blocks import KVBlockManager
from rosellm.roseinfer.prefill import PREFILL_RANGE
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.staging import StagingBuffer
from rosellm.rosetrainer.model import GPT
from rosellm.rosetrainer.prefill_attention import BLOCK_M, Tiles, tile_columns


class PackedPrefill:
    """Caches tokens by a kernel that attends and writes keys and values at once; for a shared pool.

    ``layers_for`` gives the layers for a number of tokens.
    """

    def __init__(self, model: GPT, blocks: KVBlockManager, kernels: Kernels, layers_for) -> None:
        self.model, self.blocks = model, blocks
        self.attention, self.layers_for = kernels.prefill_attention, layers_for
        self._staging = StagingBuffer(model.device, torch.int32)

    @torch.inference_mode()
    def run(self, sequences: list[Sequence], counts: list[int]) -> Tensor:
        """Cache ``counts[i]`` more tokens of each; hidden states ``[n, C]`` of the last tokens of those cached wholly.

        The books are advanced; ``n_cached`` stays for whoever commits.
        """
        with record_function(PREFILL_RANGE):
            starts = [s.n_cached for s in sequences]
            for sequence, count in zip(sequences, counts, strict=True):
                self.blocks.reserve_prompt(0, sequence.block_ids[0], count)
            ids, positions, columns, last, table = self._stage(sequences, starts, counts)
            tiles = Tiles(columns, BLOCK_M)

            def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return self.attention(
                    q=q,
                    k_new=k,
                    v_new=v,
                    k_cache_layer=self.blocks.k_cache[layer],
                    v_cache_layer=self.blocks.v_cache[layer],
                    block_table=table,
                    tiles=tiles,
                    scale=q.shape[-1] ** -0.5,
                )

            layers: Layers = self.layers_for(len(ids))
            hidden = layers(ids, positions, attend)  # [N, C]
            return hidden[last]

    def _stage(self, sequences: list[Sequence], starts: list[int], counts: list[int]) -> list[Tensor]:
        """Token ids and positions ``[N]``, tiles ``[6, T]``, last rows ``[n]``, tables ``[B, W]``; one copy."""
        n_tokens, batch = sum(counts), len(counts)
        ends = np.cumsum(counts)
        whole = [a + n == len(s.tokens) for s, a, n in zip(sequences, starts, counts, strict=True)]
        columns = tile_columns(starts, counts, None, BLOCK_M)
        width = max(len(s.block_ids[0]) for s in sequences)
        sizes = [n_tokens, n_tokens, columns.size, sum(whole), batch * width]
        host = self._staging.host(sum(sizes))
        ids, positions, tiles, last, table = np.split(host, np.cumsum(sizes)[:-1])
        ids[:] = [t for s, a, n in zip(sequences, starts, counts, strict=True) for t in s.tokens[a : a + n]]
        positions[:] = np.arange(n_tokens) + np.repeat(np.array(starts) - ends + counts, counts)
        tiles[:] = columns.reshape(-1)
        last[:] = (ends - 1)[whole]
        rows = table.reshape(batch, width)
        rows[:] = 0
        for row, sequence in zip(rows, sequences, strict=True):
            row[: len(sequence.block_ids[0])] = sequence.block_ids[0]
        ids, positions, tiles, last, table = self._staging.send().split(sizes)
        return [ids, positions, tiles.view(6, -1), last, table.view(batch, width)]
