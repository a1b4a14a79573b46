"""Prefill with the plain model's operators; the prompt tokens of several sequences are packed."""

from __future__ import annotations

from itertools import chain, zip_longest

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rosellm.ladder.pools import PooledBlocks, Table
from rosellm.models.arch import Arch
from rosellm.models.attention import CausalAttention, in_window, masked_attention
from rosellm.models.model import Transformer
from rosellm.roseinfer.cache.kv_blocks import KVBlocks
from rosellm.roseinfer.kernels.likely import store_likely_ref
from rosellm.roseinfer.layers.logprobs import PromptTokens, likely_prompt_tokens
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.steps.step import PREFILL_RANGE, profile_range

# cuDNN's attention builds a new plan, which takes tens of milliseconds, for every new length.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Prefill:
    """A prefill that runs the model on chunks of prompts, and fills slots that the caller has reserved.

    pool_of: the index of each layer's pool.
    """

    def __init__(self, model: Transformer, blocks: PooledBlocks | KVBlocks, pool_of: list[int]) -> None:
        self.model, self.blocks, self.pool_of = model, blocks, pool_of

    @torch.inference_mode()
    def run(self, sequences: list[Sequence], counts: list[int], tables: list[list[Table]]) -> Tensor:
        """Cache ``counts[i]`` more tokens of sequence i, without updating its ``num_cached_tokens``.

        tables: the sequences' blocks, as ``[pool][row]``. Returns the final hidden states ``[n, C]`` at the
        last token of each sequence whose prefill this completes. Logprobs of prompts are given to the
        sequences that request them.
        """
        with profile_range(PREFILL_RANGE), sdpa_kernel(BACKENDS):
            return self._run(sequences, [s.num_cached_tokens for s in sequences], counts, padded(tables))

    def _run(
        self, sequences: list[Sequence], starts: list[int], counts: list[int], tables: np.ndarray
    ) -> Tensor:
        device, blocks = self.model.device, self.blocks
        chunks = [s.tokens[a : a + n] for s, a, n in zip(sequences, starts, counts, strict=True)]
        ids = list(chain.from_iterable(chunks))
        rows = np.repeat(np.arange(len(counts)), counts)  # [N]
        positions = np.concatenate([np.arange(a, a + n) for a, n in zip(starts, counts, strict=True)])
        block_idx = tables[:, rows, positions // blocks.block_size]  # [POOLS, N]
        slots = torch.from_numpy(np.stack((*block_idx, positions % blocks.block_size))).to(device)
        ints = torch.tensor(np.stack((ids, positions)), dtype=torch.int32).to(device)  # [2, N]
        attention = self._attention(starts, counts, torch.from_numpy(tables).to(device))

        def write_and_attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            block_idx, pos = slots[self.pool_of[layer]], slots[-1]
            blocks.k_cache[layer][block_idx, :, pos] = k
            blocks.v_cache[layer][block_idx, :, pos] = v
            return attention(layer, q, k, v)

        hidden = self.model(ints[0], ints[1], write_and_attend)  # [N, C]
        for asked in PromptTokens.asked(sequences, starts, counts):
            asked.give(likely_prompt_tokens(self.model.logits, store_likely_ref, hidden, *asked.wishes))
        whole = [s.completes_prefill(n) for s, n in zip(sequences, counts, strict=True)]
        last = torch.from_numpy((np.cumsum(counts) - 1)[whole]).to(device)
        return hidden[last]  # [n, C]

    def _attention(
        self, starts: list[int], counts: list[int], tables: Tensor
    ) -> CausalAttention | PrefixAttention:
        config = self.model.config
        if any(starts):
            own = [tables[pool] for pool in self.pool_of]
            return PrefixAttention(self.blocks, own, starts, counts, config)
        return CausalAttention(counts, self.model.device, config.scale, config.window)


class PrefixAttention:
    """An ``Attend``: new tokens attend to their sequence's cached prefix and, causally, to one another.

    Both are limited to the model's window, if it has one.

    blocks: the cache, which must already hold the new keys and values.
    tables: the block table ``[B, W]`` for each layer.
    starts, counts: cached and new tokens per sequence.
    config: the model's architecture.
    """

    def __init__(
        self,
        blocks: PooledBlocks | KVBlocks,
        tables: list[Tensor],
        starts: list[int],
        counts: list[int],
        config: Arch,
    ) -> None:
        self.blocks, self.tables, self.scale = blocks, tables, config.scale
        device, width = tables[0].device, tables[0].shape[1]
        start, count = torch.tensor(starts, device=device), torch.tensor(counts, device=device)
        step = torch.arange(max(counts), device=device)
        self.real = step[None, :] < count[:, None]  # [B, T]
        query_position = start[:, None] + step[None, :]  # [B, T]
        key_position = torch.arange(width * blocks.block_size, device=device)  # [S]
        self.held = key_position[None, :] < (start + count)[:, None]  # [B, S]
        seen = in_window(query_position[:, :, None], key_position[None, None, :], config.window)
        self.mask = seen[:, None]  # [B, 1, T, S]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        padded = q.new_zeros(*self.real.shape, *q.shape[1:])  # [B, T, H, D]
        padded[self.real] = q
        keys, values = (
            self._gather(cache[layer], layer) for cache in (self.blocks.k_cache, self.blocks.v_cache)
        )
        out = masked_attention(padded.transpose(1, 2), keys, values, self.mask, scale=self.scale)
        return out.transpose(1, 2)[self.real]

    def _gather(self, cache: Tensor, layer: int) -> Tensor:
        """Gather each sequence's keys or values from a layer's blocks: ``[B, H_kv, S, D]``, zero-padded."""
        _, n_kv_heads, block_size, head_dim = cache.shape
        table = self.tables[layer]  # [B, W]
        batch, width = table.shape
        gathered = cache[table].transpose(1, 2).reshape(batch, n_kv_heads, width * block_size, head_dim)
        return torch.where(self.held[:, None, :, None], gathered, 0)  # 0 * NaN is NaN


def padded(tables: list[list[Table]]) -> np.ndarray:
    """Return the block indices of ``tables[pool][row]`` as ``[POOLS, B, W]`` int64, padded with block 0."""
    return np.stack([np.array(list(zip_longest(*rows, fillvalue=0)), np.int64).T for rows in tables])
