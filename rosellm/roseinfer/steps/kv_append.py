"""Writing a decode step's new keys and values of all layers into the cache.

A variant is called with the manager's caches, each layer's key and value ``[B, H_kv, D]`` and each pool's
``Slots``. Variants differ in the index tensors needed per pool and the kernels launched per layer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from rosellm.errors import RecipeError
from rosellm.roseinfer.cache.kv_blocks import KVBlockManager, Slots
from rosellm.roseinfer.cache.staging import StagingBuffer
from rosellm.roseinfer.kernels.table import Kernels
from rosellm.roseinfer.kv_append_triton import kv_append_ref

SWITCH_VARIABLE = "ROSELLM_TRITON_KV_APPEND"
MIN_BATCH_VARIABLE = "ROSELLM_TRITON_KV_APPEND_MIN_BATCH"
DEFAULT_MIN_BATCH = 128


@dataclass(frozen=True)
class AppendGate:
    """Batch size from which a Triton append is used; smaller batches use ``index_put``. None: never."""

    min_batch: int | None = DEFAULT_MIN_BATCH

    @classmethod
    def from_environment(cls) -> AppendGate:
        """From ROSELLM_TRITON_KV_APPEND (0 or 1; default 1) and ROSELLM_TRITON_KV_APPEND_MIN_BATCH (128)."""
        switch = os.environ.get(SWITCH_VARIABLE, "1")
        if switch not in ("0", "1"):
            raise RecipeError(f"{SWITCH_VARIABLE}={switch!r}; use 0 or 1")
        text = os.environ.get(MIN_BATCH_VARIABLE, str(DEFAULT_MIN_BATCH))
        if not text.isdecimal():
            raise RecipeError(f"{MIN_BATCH_VARIABLE}={text!r}; use a whole number, 0 or more")
        return cls(int(text) if switch == "1" else None)


class FreshIndices:
    """A new device tensor, made by its own pageable copy, for each list of integers."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def __call__(self, rows: Iterable[list[int]]) -> list[Tensor]:
        return [torch.tensor(row, dtype=self.dtype).to(self.device) for row in rows]


class ReusedIndices:
    """All lists of a step in one reused pinned buffer and one reused device buffer: one copy."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._staging = StagingBuffer(device, dtype)
        self._device_buffer = torch.empty(0, dtype=dtype, device=device)

    def __call__(self, rows: Iterable[list[int]]) -> list[Tensor]:
        values = np.array(list(rows))  # [n, B]
        self._staging.host(*values.shape)[:] = values
        if values.size > self._device_buffer.numel():
            self._device_buffer = self._device_buffer.new_empty(2 * values.size)
        return list(self._staging.send(self._device_buffer))


Indices = FreshIndices | ReusedIndices
Tensors = list[Tensor]  # one per layer
Append = Callable[[KVBlockManager, Tensors, Tensors, list[Slots]], None]
INDICES: dict[str, type[Indices]] = {"fresh": FreshIndices, "reused": ReusedIndices}


class GenericAppend:
    """Index tensors for batch row, block and position per pool; one call of ``kernel`` per layer."""

    def __init__(self, kernel: Callable[..., None], indices: Indices) -> None:
        self.kernel, self.indices = kernel, indices

    def __call__(self, blocks: KVBlockManager, keys: Tensors, values: Tensors, slots: list[Slots]) -> None:
        batch_idx = list(range(len(slots[0].pos)))
        tensors = self.indices(chain.from_iterable((batch_idx, s.block_idx, s.pos) for s in slots))
        for layer, pool in enumerate(blocks.pool_of):
            rows, block_idx, pos = tensors[3 * pool : 3 * pool + 3]
            operands = _operands(blocks, keys, values, layer)
            self.kernel(**operands, batch_idx=rows, block_idx=block_idx, pos=pos)


class FullBatchAppend:
    """If all rows write at one position: no row or position tensors; other batches go to ``fallback``."""

    def __init__(self, kernel: Callable[..., None], indices: Indices, fallback: Append) -> None:
        self.kernel, self.indices, self.fallback = kernel, indices, fallback

    def __call__(self, blocks: KVBlockManager, keys: Tensors, values: Tensors, slots: list[Slots]) -> None:
        positions = slots[0].pos  # the same in every pool
        if positions.count(positions[0]) != len(positions):
            return self.fallback(blocks, keys, values, slots)
        tensors = self.indices(s.block_idx for s in slots)
        for layer, pool in enumerate(blocks.pool_of):
            operands = _operands(blocks, keys, values, layer)
            self.kernel(**operands, block_idx=tensors[pool], pos=positions[0])


class IdentityPosAppend:
    """Row b of the batch is program b; each row has its own position: no row tensor."""

    def __init__(self, kernel: Callable[..., None], indices: Indices) -> None:
        self.kernel, self.indices = kernel, indices

    def __call__(self, blocks: KVBlockManager, keys: Tensors, values: Tensors, slots: list[Slots]) -> None:
        tensors = self.indices(chain.from_iterable((s.block_idx, s.pos) for s in slots))
        for layer, pool in enumerate(blocks.pool_of):
            block_idx, pos = tensors[2 * pool : 2 * pool + 2]
            self.kernel(**_operands(blocks, keys, values, layer), block_idx=block_idx, pos=pos)


class GatedAppend:
    """``large`` from ``min_batch`` rows on, ``small`` below."""

    def __init__(self, min_batch: int, small: Append, large: Append) -> None:
        self.min_batch, self.small, self.large = min_batch, small, large

    def __call__(self, blocks: KVBlockManager, keys: Tensors, values: Tensors, slots: list[Slots]) -> None:
        append = self.large if len(slots[0].pos) >= self.min_batch else self.small
        append(blocks, keys, values, slots)


def build_append(
    variant: str, indices: str, kernels: Kernels, device: torch.device, gate: AppendGate
) -> Append:
    """The append of a recipe: ``index_put``, ``generic``, ``full_batch`` or ``identity_pos``.

    The last three are used from the batch size of ``gate`` on, ``index_put`` below it.
    """
    make = INDICES[indices]
    index_put = GenericAppend(kv_append_ref, make(device, torch.int64))
    if variant == "index_put" or gate.min_batch is None:
        return index_put
    small_ints = make(device, torch.int32)
    append: Append = GenericAppend(kernels.kv_append, small_ints)
    if variant == "identity_pos":
        append = IdentityPosAppend(kernels.kv_append_identity_pos, small_ints)
    if variant != "generic":
        append = FullBatchAppend(kernels.kv_append_full_batch, small_ints, fallback=append)
    return GatedAppend(gate.min_batch, small=index_put, large=append)


def _operands(blocks: KVBlockManager, keys: Tensors, values: Tensors, layer: int) -> dict[str, Tensor]:
    return {
        "k_cache_layer": blocks.k_cache[layer],
        "v_cache_layer": blocks.v_cache[layer],
        "key_new": keys[layer],
        "value_new": values[layer],
    }
