"""What a GPU-resident step is built of besides layers: attention that appends, and the choice of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rosellm.roseinfer.decode_layers import can_pack, packed_head
from rosellm.roseinfer.device_state import DeviceState
from rosellm.roseinfer.fused_attention import tile_for
from rosellm.roseinfer.kernels import Kernels
from rosellm.roseinfer.kv_blocks import KVBlockManager
from rosellm.roseinfer.sampling import SamplingParams, draw, likeliest
from rosellm.roseinfer.split_attention import SPLIT_TILE, is_worth_splitting
from rosellm.rosetrainer.attention import Attend
from rosellm.rosetrainer.model import GPT

ALIGNMENT = 64
SPLIT = "split"


class Binder(Protocol):
    """Attention over the cache that also appends, for the rows of a state."""

    def variant(self, rows: int, longest: int) -> str:
        """Which kernels serve ``rows`` of at most ``longest`` cached tokens; each is captured apart."""
        ...

    def __call__(self, state: DeviceState, variant: str) -> Attend: ...


class AppendThenAttend:
    """Two kernels a layer: the new keys and values into their slots, then paged attention."""

    def __init__(self, kernels: Kernels, blocks: KVBlockManager) -> None:
        self.kernels, self.blocks = kernels, blocks

    def variant(self, rows: int, longest: int) -> str:
        """One for all."""
        return ""

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
                scale=q.shape[-1] ** -0.5,
            )

        return attend


@dataclass(frozen=True)
class PagedAttention:
    """An ``Attend`` by a kernel that also appends, and all that it reads besides a layer's q, k and v."""

    kernel: Callable[..., Tensor]
    tile: int
    blocks: KVBlockManager
    state: DeviceState

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.kernel(
            q=q,
            k_new=k,
            v_new=v,
            k_cache_layer=self.blocks.k_cache[layer],
            v_cache_layer=self.blocks.v_cache[layer],
            block_table=self.state.table,
            positions=self.state.positions,
            scale=q.shape[-1] ** -0.5,
            tile=self.tile,
        )


class AppendAndAttend:
    """One kernel a layer does both; its tile fits the longest context."""

    def __init__(self, kernels: Kernels, blocks: KVBlockManager) -> None:
        self.kernels, self.blocks = kernels, blocks

    def variant(self, rows: int, longest: int) -> str:
        """The tile, in tokens."""
        return str(tile_for(rows, longest))

    def __call__(self, state: DeviceState, variant: str) -> PagedAttention:
        return PagedAttention(self.kernels.append_and_attend, int(variant), self.blocks, state)


class SplitAppendAndAttend(AppendAndAttend):
    """The same, but few sequences with long contexts are attended to in ranges (``split_attention``)."""

    def variant(self, rows: int, longest: int) -> str:
        """SPLIT, or the tile, in tokens."""
        return SPLIT if is_worth_splitting(rows, longest) else super().variant(rows, longest)

    def __call__(self, state: DeviceState, variant: str) -> PagedAttention:
        if variant != SPLIT:
            return super().__call__(state, variant)
        return PagedAttention(self.kernels.split_append_and_attend, SPLIT_TILE, self.blocks, state)


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
        drawn = [p for p in params if not p.is_greedy]
        if not drawn:
            return "greedy"
        return "filtered" if any(p.top_k or p.top_p < 1 for p in drawn) else "drawn"

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
            sampled=mode == "drawn",
        )


def draw_for(state: DeviceState, logits: Tensor, noise) -> Tensor:
    """``sampling.draw`` with the requests' settings as the device keeps them; ``[n]`` int32."""
    positions = state.positions + 1  # of the tokens drawn
    return draw(logits, state.temperatures, state.top_k, state.top_p, state.seeds, positions, noise)


# By a recipe's attention and append.
BINDERS = {
    ("paged", "identity_pos"): AppendThenAttend,
    ("paged", "fused"): AppendAndAttend,
    ("split", "fused"): SplitAppendAndAttend,
}


def build_chooser(head: str, model: GPT, kernels: Kernels) -> Chooser:
    """The chooser of a recipe's ``head``. On a CPU "fused" packs the head's weights for oneDNN instead."""
    if head == "logits":
        return LogitsChooser(model.logits, kernels.gumbel_noise)
    if kernels.name == "torch" and can_pack(model):
        return LogitsChooser(packed_head(model), kernels.gumbel_noise)
    return FusedChooser(model, kernels)
