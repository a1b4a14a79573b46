"""The first two GPU-resident rungs: their append, and the first one's prefill, differ from later rungs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rosellm.ladder.prefill import Prefill
from rosellm.models.attention import Attend
from rosellm.models.model import Transformer
from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.kernels.table import Kernels
from rosellm.roseinfer.layers.attention import Binder
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.steps.planner import NO_ROWS, Batch, Planner
from rosellm.roseinfer.steps.resident import ResidentStep
from rosellm.roseinfer.steps.worker import Worker


class AppendThenAttend(Binder):
    """A binder of two kernels per layer: one stores new keys and values, the other is paged attention."""

    def __call__(self, state: DeviceState, variant: str) -> Attend:
        kernels, blocks = self.kernels, self.blocks
        positions = state.positions.clamp_min(0)  # [B]
        block = state.table.gather(1, (positions // blocks.block_size).long()[:, None])[:, 0]
        block = torch.where(state.positions >= 0, block, -1)  # inert rows are not written
        slot = positions % blocks.block_size

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            caches = {"k_cache_layer": blocks.k_cache[layer], "v_cache_layer": blocks.v_cache[layer]}
            kernels.kv_append_identity_pos(**caches, key_new=k, value_new=v, block_idx=block, pos=slot)
            return kernels.paged_attention_decode(
                **caches,
                q=q,
                k_new=k,
                v_new=v,
                block_table=state.table,
                context_lens=positions,
                scale=self.config.scale,
                window=self.config.window,
            )

        return self.model.positioned(positions, attend)


class PaddedPrompts:
    """A prefill that launches every kernel from Python, and adds completed sequences to the device state."""

    def __init__(self, prefill: Prefill, planner: Planner, worker: Worker) -> None:
        self.prefill, self.planner, self.worker = prefill, planner, worker

    @torch.inference_mode()
    def run(self, sequences: list[Sequence], counts: list[int]) -> Batch:
        """Cache ``counts[i]`` more tokens of sequence i, and choose the completed sequences' next tokens.

        Returns the state rows of the completed sequences.
        """
        for sequence, count in zip(sequences, counts, strict=True):
            self.planner.blocks.reserve_prompt(sequence.block_ids, count)
        whole = [s for s, n in zip(sequences, counts, strict=True) if s.completes_prefill(n)]
        hidden = self.prefill.run(sequences, counts, [[s.block_ids for s in sequences]])
        if not whole:
            return NO_ROWS
        indices = self.planner.attach(whole, [s.prefill_length - 1 for s in whole])
        self.worker.choose(hidden, indices, self.worker.next_tokens.chooser.mode([s.params for s in whole]))
        return self.planner.batch(whole)


class NothingCaptured:
    """A replacement for a worker's packed prefill in a rung without one; it captures and compiles nothing."""

    def captures(self) -> list[Callable[[], object]]:
        return []

    def warm_ups(self) -> list[Callable[[], object]]:
        return []

    def rehearsals(self, n_tokens: int) -> list[Callable[[], object]]:
        return []


def packed_prefill(model: Transformer, kernels: Kernels, parts: dict[str, Any]) -> ResidentStep:
    """Build a step like that of later rungs, but with a separate kernel for the append.

    parts: the arguments of a ``Worker``.
    """
    bind = AppendThenAttend(kernels, parts["blocks"], model)
    return ResidentStep.on(Worker(**parts | {"bind": bind}), model)


def resident_step(model: Transformer, kernels: Kernels, parts: dict[str, Any]) -> ResidentStep:
    """Build the step of :func:`packed_prefill`, but run prompts through the plain model.

    parts: the arguments of a ``Worker``.
    """
    blocks = parts["blocks"]
    replaced = {"bind": AppendThenAttend(kernels, blocks, model), "prompts": NothingCaptured()}
    worker = Worker(**parts | replaced)
    call, state = worker.call, worker.state
    n_rows, width = state.table.shape
    planner = Planner(n_rows, width, state.ring.numpy(), blocks, call)
    prefill = Prefill(model, blocks, [0] * model.config.n_layers)
    return ResidentStep(planner, worker, PaddedPrompts(prefill, planner, worker), call)
