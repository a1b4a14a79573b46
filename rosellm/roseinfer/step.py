"""One decode step driven by the host: reserve, stage, run, append, sample, commit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import record_function

from rosellm.roseinfer.block_tables import Tables
from rosellm.roseinfer.kv_append import Append
from rosellm.roseinfer.kv_blocks import KVBlockManager, Slots
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.runner import DecodeInputs, EagerRunner, GraphRunner
from rosellm.roseinfer.sampling import Sampler

STEP_RANGE = "roseinfer.decode_step_sessions"


def dense_mask(context_lens: Tensor, max_context: int, dtype: torch.dtype) -> Tensor:
    """What to add to the scores so that padding is not seen: ``[B, max_context + 1]``.

    0 for real tokens, else the lowest number; made by ``arange``, a comparison with the lengths, a column of
    ones for the new token, a cast, and the turn into a penalty.
    """
    positions = torch.arange(max_context, device=context_lens.device)
    held = positions[None, :] < context_lens[:, None]  # [B, max_context]
    new = torch.ones(len(context_lens), 1, dtype=torch.bool, device=context_lens.device)
    seen = torch.cat((held, new), dim=1).to(dtype)
    return (1 - seen) * torch.finfo(dtype).min


def no_mask(context_lens: Tensor, max_context: int, dtype: torch.dtype) -> None:
    """Paged attention needs only the lengths."""


MASKS = {"dense": dense_mask, "none": no_mask}


class HostStep:
    """Decode for a batch of sequences, each with one token not cached yet; every part chosen beforehand."""

    def __init__(
        self,
        blocks: KVBlockManager,
        tables: Tables,
        mask: Callable[[Tensor, int, torch.dtype], Tensor | None],
        runner: EagerRunner | GraphRunner,
        append: Append,
        sampler: Sampler,
    ) -> None:
        self.blocks, self.tables, self.mask = blocks, tables, mask
        self.runner, self.append, self.sampler = runner, append, sampler

    @torch.inference_mode()
    def __call__(self, sequences: list[Sequence]) -> None:
        """One token more for every sequence: its block lists, cached length and tokens are updated."""
        with record_function(STEP_RANGE):
            slots, block_ids = self._reserve(sequences)
            inputs = self._stage(sequences, block_ids)
            with record_function(f"{STEP_RANGE}.model"):
                outputs = self.runner(inputs)
            with record_function(f"{STEP_RANGE}.kv_append"):
                self.append(self.blocks, outputs.keys, outputs.values, slots)
            with record_function(f"{STEP_RANGE}.sample"):
                tokens = self.sampler(outputs.logits, sequences)
            with record_function(f"{STEP_RANGE}.commit"):
                for sequence, token in zip(sequences, tokens, strict=True):
                    sequence.commit(token, n_cached=1)

    def _reserve(self, sequences: list[Sequence]) -> tuple[list[Slots], list[list[list[int]]]]:
        with record_function(f"{STEP_RANGE}.reserve"):
            pools = range(self.blocks.num_pools)
            block_ids = [[s.block_ids[pool] for s in sequences] for pool in pools]
            return [self.blocks.reserve_tokens(pool, block_ids[pool]) for pool in pools], block_ids

    def _stage(self, sequences: list[Sequence], block_ids: list[list[list[int]]]) -> DecodeInputs:
        tables = self.tables.stage(block_ids)
        with record_function(f"{STEP_RANGE}.stage_tokens"):
            contexts = [s.n_cached for s in sequences]
            device = self.blocks.k_cache.device
            ints = torch.tensor([[s.last_token for s in sequences], contexts], dtype=torch.int32).to(device)
        with record_function(f"{STEP_RANGE}.build_mask"):
            mask = self.mask(ints[1], max(contexts), self.blocks.k_cache.dtype)
        return DecodeInputs(ints[0], ints[1], ints[1], tables, mask, max(contexts))
