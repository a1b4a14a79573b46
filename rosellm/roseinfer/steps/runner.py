"""Running the model for one decode step: kernels launched from Python, or a captured CUDA graph replayed.

B sequences, one new token each. Attention reads the cache and the new token; the cache is written after the
run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor

from rosellm.models.arch import Arch
from rosellm.models.attention import Attend
from rosellm.models.model import Transformer
from rosellm.roseinfer.cache.kv_blocks import KVBlockManager
from rosellm.roseinfer.steps.cuda_graph import graphs_on
from rosellm.roseinfer.steps.planner import batch_bucket


@dataclass
class DecodeInputs:
    """The device inputs of a step."""

    ids: Tensor  # [B] int32
    positions: Tensor  # [B] int32, tokens cached before this step
    context_lens: Tensor  # [B] int32, the same values, for attention
    tables: list[Tensor] | Tensor  # a table [B, MAX_BLOCKS] int32 per pool
    mask: Tensor | None  # [B, max(context_lens) + 1], added to scores; None if not needed
    max_context: int  # the longest context, known to the host


@dataclass
class DecodeOutputs:
    """The outputs of a step: logits ``[B, V]`` and each layer's new key and value ``[B, H_kv, D]``."""

    logits: Tensor
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


AttendFactory = Callable[[DecodeInputs, KVBlockManager], Attend]


def dense_attention(_kernel: Callable[..., Tensor], config: Arch) -> AttendFactory:
    """Past keys and values gathered into dense ``[B, H_kv, L, D]`` tensors, then ordinary masked attention.

    Written out because torch's fused attention may pick a backend that replans for every new length, and here
    the length changes every step.
    """

    def bind(inputs: DecodeInputs, blocks: KVBlockManager) -> Attend:
        used = -(-inputs.max_context // blocks.block_size)
        slots = torch.arange(inputs.max_context, device=inputs.context_lens.device)
        mask = cast(Tensor, inputs.mask)  # dense attention requires one (see Recipe)
        held = slots[None, :] < inputs.context_lens[:, None]  # [B, max_context]

        def gather(cache: Tensor, table: Tensor, new: Tensor) -> Tensor:
            past = cache[table[:, :used].long()].transpose(1, 2)  # [B, H_kv, blocks, BLOCK_SIZE, D]
            past = past.reshape(len(table), new.shape[1], -1, new.shape[2])[:, :, : inputs.max_context]
            past = torch.where(held[:, None, :, None], past, 0)  # 0 * NaN is NaN
            return torch.cat((past, new[:, :, None]), dim=2)  # [B, H_kv, max_context + 1, D]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            table = inputs.tables[blocks.pool_of[layer]]
            k_all = gather(blocks.k_cache[layer], table, k)
            v_all = gather(blocks.v_cache[layer], table, v)
            grouped = q.view(len(q), k.shape[1], -1, q.shape[2])  # [B, H_kv, G, D]
            scores = grouped @ k_all.transpose(2, 3) * config.scale  # [B, H_kv, G, max_context + 1]
            weights = (scores + mask[:, None, None]).softmax(dim=-1, dtype=torch.float32)
            return (weights.to(v.dtype) @ v_all).view_as(q)

        return attend

    return bind


def paged_attention(kernel: Callable[..., Tensor], config: Arch) -> AttendFactory:
    """Attention directly over the paged cache by ``kernel`` (see ``rosetrainer.paged_attention``)."""

    def bind(inputs: DecodeInputs, blocks: KVBlockManager) -> Attend:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return kernel(
                q=q,
                k_new=k,
                v_new=v,
                k_cache_layer=blocks.k_cache[layer],
                v_cache_layer=blocks.v_cache[layer],
                block_table=inputs.tables[blocks.pool_of[layer]],
                context_lens=inputs.context_lens,
                scale=config.scale,
                window=config.window,
            )

        return attend

    return bind


ATTENTION = {"dense": dense_attention, "paged": paged_attention}


class EagerRunner:
    """Every kernel is launched from Python."""

    n_captured = 0

    def __init__(self, model: Transformer, blocks: KVBlockManager, attention: AttendFactory) -> None:
        self.model, self.blocks, self.attention = model, blocks, attention

    def __call__(self, inputs: DecodeInputs) -> DecodeOutputs:
        attend = self.attention(inputs, self.blocks)
        keys, values = [], []

        def keep_and_attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys.append(k)
            values.append(v)
            return attend(layer, q, k, v)

        hidden = self.model(inputs.ids, inputs.positions, keep_and_attend)
        return DecodeOutputs(self.model.logits(hidden), keys, values)

    def captures(self, buckets: list[int], width: int) -> list[Callable[[], object]]:
        """Nothing is captured."""
        return []


class GraphRunner:
    """One CUDA graph per batch bucket, fed through static buffers.

    Rows past the batch are inert: context length 0, token 0, and nothing of them is written to the cache. On
    a CPU, which has no graphs, the same static buffers feed an eager run. Outputs are views that the next run
    overwrites.
    """

    def __init__(self, model: Transformer, blocks: KVBlockManager, attention: AttendFactory) -> None:
        self._eager = EagerRunner(model, blocks, attention)
        self._device = model.device
        self._captured: dict[int, _Captured] = {}
        self._graphs = graphs_on(model.device)

    def __call__(self, inputs: DecodeInputs) -> DecodeOutputs:
        batch = len(inputs.ids)
        bucket = batch_bucket(batch)
        if bucket not in self._captured:
            self._capture(bucket, _stacked_tables(inputs).shape[2])
        return self._captured[bucket].run(inputs, batch)

    @property
    def n_captured(self) -> int:
        return 0 if self._graphs is None else self._graphs.count

    def captures(self, buckets: list[int], width: int) -> list[Callable[[], object]]:
        """Captures, the largest first, of batches of these sizes with block tables of ``width`` blocks."""
        if self._graphs is None:
            return []
        missing = [bucket for bucket in sorted(buckets, reverse=True) if bucket not in self._captured]
        return [partial(self._capture, bucket, width) for bucket in missing]

    def _capture(self, bucket: int, width: int) -> None:
        pools = self._eager.blocks.num_pools
        ids, positions, context_lens = torch.zeros(3, bucket, dtype=torch.int32, device=self._device)
        static_tables = torch.zeros(pools, bucket, width, dtype=torch.int32, device=self._device)
        static = DecodeInputs(ids, positions, context_lens, static_tables, mask=None, max_context=0)
        run = partial(self._eager, static)
        replay = run if self._graphs is None else self._graphs.capture(run, run)
        self._captured[bucket] = _Captured(static, replay)


def _stacked_tables(inputs: DecodeInputs) -> Tensor:
    """``[POOLS, B, MAX_BLOCKS]``: recipes with graphs have one tensor for all pools."""
    return cast(Tensor, inputs.tables)


@dataclass
class _Captured:
    """Static input buffers of one bucket and the function that runs the model over them."""

    static: DecodeInputs
    replay: Callable[[], DecodeOutputs]

    def run(self, inputs: DecodeInputs, batch: int) -> DecodeOutputs:
        static = self.static
        if batch < len(static.ids):
            static.context_lens[batch:].zero_()
        static.ids[:batch].copy_(inputs.ids)
        static.positions[:batch].copy_(inputs.positions)
        static.context_lens[:batch].copy_(inputs.context_lens)
        _stacked_tables(static)[:, :batch].copy_(_stacked_tables(inputs))
        out = self.replay()
        return DecodeOutputs(
            out.logits[:batch], [k[:batch] for k in out.keys], [v[:batch] for v in out.values]
        )


RUNNERS: dict[str, type[EagerRunner | GraphRunner]] = {"eager": EagerRunner, "graph": GraphRunner}
