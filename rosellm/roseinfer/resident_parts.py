"""What a GPU-resident step is built of besides layers: attention that appends, and the choice of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rosellm.roseinfer.decode_layers import can_pack, packed_head
from rosellm.roseinfer.device_state import DeviceState
from rosellm.roseinfer.kernels import Kernels
from rosellm.roseinfer.kv_blocks import KVBlockManager
from rosellm.roseinfer.sampling import SamplingParams, draw, likeliest
from rosellm.rosetrainer.attention import Attend
from rosellm.rosetrainer.model import GPT

ALIGNMENT = 64
Bind = Callable[[DeviceState], Attend]


def append_then_attend(kernels: Kernels, blocks: KVBlockManager) -> Bind:
    """Two kernels a layer: the new keys and values into their slots, then paged attention."""

    def bind(state: DeviceState) -> Attend:
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
                scale=q.shape[-1] ** -0.5,
            )

        return attend

    return bind


def append_and_attend(kernels: Kernels, blocks: KVBlockManager) -> Bind:
    """One kernel a layer does both."""

    def bind(state: DeviceState) -> Attend:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return kernels.append_and_attend(
                q=q,
                k_new=k,
                v_new=v,
                k_cache_layer=blocks.k_cache[layer],
                v_cache_layer=blocks.v_cache[layer],
                block_table=state.table,
                positions=state.positions,
                scale=q.shape[-1] ** -0.5,
            )

        return attend

    return bind


class Chooser(Protocol):
    """Final hidden states ``[n, C]`` → the next tokens, with all that is random on the device."""

    def mode(self, params: list[SamplingParams]) -> str:
        """Which way of choosing serves these requests; a step is captured for each."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, V]``."""
        ...

    def __call__(self, hidden: Tensor, state: DeviceState, mode: str) -> tuple[Tensor | None, Tensor]:
        """Values and indices as ``device_state.advance`` takes them; the state's rows are those of hidden."""
        ...


class LogitsChooser:
    """All logits, then an argmax; or a draw, where any request is not greedy."""

    def __init__(self, logits: Callable[[Tensor], Tensor], noise: Callable[..., Tensor]) -> None:
        self.logits, self.noise = logits, noise

    def mode(self, params: list[SamplingParams]) -> str:
        return "greedy" if all(p.is_greedy for p in params) else "drawn"

    def __call__(self, hidden: Tensor, state: DeviceState, mode: str) -> tuple[Tensor | None, Tensor]:
        logits = self.logits(hidden)
        tokens = likeliest(logits) if mode == "greedy" else draw_for(state, logits, self.noise)
        return None, tokens[:, None]


class FusedChooser:
    """The head's product keeps the best token only; full logits just where top-k or top-p need them.

    Those come from a copy of the head whose vocabulary is padded to a multiple of ``ALIGNMENT``: the odd row
    length of GPT-2's logits costs the GEMM its aligned stores.
    """

    def __init__(self, model: GPT, kernels: Kernels) -> None:
        self.best_tokens, self.noise = kernels.best_tokens, kernels.gumbel_noise
        self.weight = model.lm_head.weight
        self._padded = F.pad(self.weight, (0, 0, 0, -len(self.weight) % ALIGNMENT))

    def mode(self, params: list[SamplingParams]) -> str:
        filtered = any((p.top_k or p.top_p < 1) and not p.is_greedy for p in params)
        return "filtered" if filtered else "fused"

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._padded)[:, : len(self.weight)]

    def __call__(self, hidden: Tensor, state: DeviceState, mode: str) -> tuple[Tensor | None, Tensor]:
        if mode == "filtered":
            return None, draw_for(state, self.logits(hidden), self.noise)[:, None]
        return self.best_tokens(
            hidden=hidden,
            weight=self.weight,
            temperature=state.temperatures,
            seeds=state.seeds,
            positions=state.positions,
        )


def draw_for(state: DeviceState, logits: Tensor, noise) -> Tensor:
    """``sampling.draw`` with the requests' settings as the device keeps them; ``[n]`` int32."""
    positions = state.positions + 1  # of the tokens drawn
    return draw(logits, state.temperatures, state.top_k, state.top_p, state.seeds, positions, noise)


BIND = {"identity_pos": append_then_attend, "fused": append_and_attend}


def build_chooser(head: str, model: GPT, kernels: Kernels) -> Chooser:
    """The chooser of a recipe's ``head``. On a CPU "fused" packs the head's weights for oneDNN instead."""
    if head == "logits":
        return LogitsChooser(model.logits, kernels.gumbel_noise)
    if kernels.name == "torch" and can_pack(model):
        return LogitsChooser(packed_head(model), kernels.gumbel_noise)
    return FusedChooser(model, kernels)
