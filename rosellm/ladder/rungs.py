"""The rungs above ``dense``, in order; each class overrides what differs from the rung before it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, compress, zip_longest
from operator import ne
from typing import cast

import numpy as np
import torch
from torch import Tensor

from rosellm.errors import RecipeError
from rosellm.ladder.dense import BUILD_RANGE, H2D_RANGE, DecodeInputs, DecodeOutputs, Dense
from rosellm.ladder.pools import SlotPool, Slots, Table
from rosellm.models.attention import Attend
from rosellm.roseinfer.cache.staging import StagingBuffer
from rosellm.roseinfer.steps.cuda_graph import graphs_on
from rosellm.roseinfer.steps.planner import batch_bucket, batch_buckets
from rosellm.roseinfer.steps.step import profile_range

SWITCH_VARIABLE = "ROSELLM_TRITON_KV_APPEND"
MIN_BATCH_VARIABLE = "ROSELLM_TRITON_KV_APPEND_MIN_BATCH"
DEFAULT_MIN_BATCH = 128
INT32S_PER_ROW_NUMBER = 2  # ``index_copy_`` takes int64
Tensors = list[Tensor]  # one per layer, [B, H_kv, D]


class Paged(Dense):
    """A step whose attention kernel reads the paged cache (``rosetrainer.paged_attention``)."""

    def attention(self, inputs: DecodeInputs) -> Attend:
        blocks, config = self.blocks, self.model.config

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.kernels.paged_attention_decode(
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


class NoMask(Paged):
    """A step without a mask, since paged attention needs only the context lengths."""

    def build_mask(self, context_lens: Tensor, max_context: int) -> None:
        return None


class PinnedH2D(NoMask):
    """A step that writes all tables into a reused pinned buffer, and sends them in one asynchronous copy."""

    def prepare(self) -> None:
        super().prepare()
        self.staging = StagingBuffer(self.model.device, torch.int32)

    def stage_tables(self, tables: list[list[Table]]) -> Tensor:
        """Send ``tables[pool][row]`` to the device as ``[POOLS, B, MAX_BLOCKS]``."""
        with profile_range(BUILD_RANGE):
            fill_tables(self.staging.host(len(tables), len(tables[0]), self.max_blocks), tables)
        with profile_range(H2D_RANGE):
            return self.staging.send()


class Autotune(PinnedH2D):
    """The step of :class:`PinnedH2D`, for which the engine chooses an autotuned attention kernel."""


class CudaGraph(PinnedH2D):
    """A step that replays one CUDA graph per batch bucket, from static input buffers.

    A batch bucket is the batch size, rounded up; padding rows have context length 0 and write nothing to the
    cache. On a CPU, the step runs eagerly. Outputs are views that the next replay overwrites.
    """

    def prepare(self) -> None:
        super().prepare()
        self.graphs = graphs_on(self.model.device)
        self.captured: dict[int, tuple[DecodeInputs, Callable[[], DecodeOutputs]]] = {}

    def run_model(self, inputs: DecodeInputs) -> DecodeOutputs:
        batch = len(inputs.ids)
        if batch_bucket(batch) not in self.captured:
            self.capture(batch_bucket(batch))
        static, replay = self.captured[batch_bucket(batch)]
        static.context_lens[batch:].zero_()
        static.context_lens[:batch].copy_(inputs.context_lens)
        static.ids[:batch].copy_(inputs.ids)
        stacked(static)[:, :batch].copy_(stacked(inputs))
        out = replay()
        return DecodeOutputs(
            out.logits[:batch], [k[:batch] for k in out.keys], [v[:batch] for v in out.values]
        )

    def capture(self, bucket: int) -> None:
        device, pools = self.model.device, len(self.blocks.pools)
        ids, context_lens = torch.zeros(2, bucket, dtype=torch.int32, device=device)
        tables = torch.zeros(pools, bucket, self.max_blocks, dtype=torch.int32, device=device)
        static = DecodeInputs(ids, context_lens, tables)
        run = partial(super().run_model, static)
        replay = run if self.graphs is None else self.graphs.capture(run, run)
        self.captured[bucket] = static, replay

    def captures(self, rows: int | None = None) -> list[Callable[[], object]]:
        """Return a call for each graph that is not captured yet, the largest bucket first.

        rows: only the bucket of this number of sequences; None for all buckets.
        """
        if self.graphs is None:
            return []
        buckets = batch_buckets(self.most_rows) if rows is None else [batch_bucket(rows)]
        missing = [bucket for bucket in sorted(buckets, reverse=True) if bucket not in self.captured]
        return [partial(self.capture, bucket) for bucket in missing]

    @property
    def n_captured(self) -> int:  # type: ignore[override]
        """The number of CUDA graphs captured so far."""
        return 0 if self.graphs is None else self.graphs.count


class TritonAppend(CudaGraph):
    """A step that stores new keys and values by one kernel per layer, if there are enough rows.

    append_from: minimum number of rows for the kernel; None for never.
    """

    def prepare(self) -> None:
        super().prepare()
        self.append_from = append_from_environment()

    def append(self, keys: Tensors, values: Tensors, slots: list[Slots]) -> None:
        if self.append_from is None or len(slots[0].pos) < self.append_from:
            return super().append(keys, values, slots)
        self.append_rows(keys, values, slots)

    def append_rows(self, keys: Tensors, values: Tensors, slots: list[Slots]) -> None:
        self.append_indexed(self.kernels.kv_append, torch.int32, keys, values, slots)


class FullBatch(TritonAppend):
    """A step that passes the position as an int if all rows share it, without row or position tensors."""

    def append_rows(self, keys: Tensors, values: Tensors, slots: list[Slots]) -> None:
        if not have_one_position(slots):
            return super().append_rows(keys, values, slots)
        tensors = self.index_tensors((s.block_idx for s in slots), torch.int32)
        for layer, pool in enumerate(self.blocks.pool_of):
            operands = self.blocks.operands(layer, keys[layer], values[layer])
            self.kernels.kv_append_full_batch(**operands, block_idx=tensors[pool], pos=slots[0].pos[0])


class IdentityPos(FullBatch):
    """A step whose append kernel needs no row tensor: program b stores row b, at that row's own position."""

    def append_rows(self, keys: Tensors, values: Tensors, slots: list[Slots]) -> None:
        if have_one_position(slots):
            return super().append_rows(keys, values, slots)
        rows = chain.from_iterable((s.block_idx, s.pos) for s in slots)
        tensors = self.index_tensors(rows, torch.int32)
        for layer, pool in enumerate(self.blocks.pool_of):
            block_idx, pos = tensors[2 * pool : 2 * pool + 2]
            operands = self.blocks.operands(layer, keys[layer], values[layer])
            self.kernels.kv_append_identity_pos(**operands, block_idx=block_idx, pos=pos)


class MutableBlockInfo(IdentityPos):
    """A step whose pools increment the entry of a block in place, instead of making a new tuple."""

    pool_kind = SlotPool


class ReusedIndexBuffers(MutableBlockInfo):
    """A step that sends all index lists in one copy, from a reused pinned to a reused device buffer."""

    def prepare(self) -> None:
        super().prepare()
        device = self.model.device
        self.index_staging = {dtype: StagingBuffer(device, dtype) for dtype in (torch.int32, torch.int64)}
        self.index_buffers = {
            dtype: torch.empty(0, dtype=dtype, device=device) for dtype in self.index_staging
        }

    def index_tensors(self, rows: Iterable[list[int]], dtype: torch.dtype) -> Tensors:
        values = np.array(list(rows))  # [n, B]
        self.index_staging[dtype].host(*values.shape)[:] = values
        if values.size > self.index_buffers[dtype].numel():
            self.index_buffers[dtype] = self.index_buffers[dtype].new_empty(2 * values.size)
        return list(self.index_staging[dtype].send(self.index_buffers[dtype][: values.size]))


class ResidentTables(ReusedIndexBuffers):
    """A step that keeps tables on the device, and sends only the rows that have changed."""

    def prepare(self) -> None:
        super().prepare()
        pools, device = len(self.blocks.pools), self.model.device
        self.resident = torch.zeros(pools, 0, self.max_blocks, dtype=torch.int32, device=device)
        self.sent: list[list[Table]] = [[] for _ in range(pools)]  # copies of what the device's rows hold

    def stage_tables(self, tables: list[list[Table]]) -> Tensor:
        """Return ``tables[pool][row]`` on the device, as ``[POOLS, B, MAX_BLOCKS]``.

        The result is a view that the next call overwrites.
        """
        batch = len(tables[0])
        with profile_range(BUILD_RANGE):
            if batch > self.resident.shape[1]:
                self.grow(batch)
            changed = self.changed_rows(tables)
            if changed:
                self.build_rows(changed, [[rows[row] for row in changed] for rows in tables])
        with profile_range(H2D_RANGE):
            if changed:
                self.send_rows(len(changed))
        for rows, sent in zip(tables, self.sent, strict=True):
            for row in changed:
                sent[row] = list(rows[row])
        return self.resident[:, :batch]

    def changed_rows(self, tables: list[list[Table]]) -> list[int]:
        changed: set[int] = set()
        for rows, sent in zip(tables, self.sent, strict=True):
            changed.update(compress(range(len(rows)), map(ne, rows, sent)))
        return sorted(changed)

    def grow(self, batch: int) -> None:
        """Replace the buffer with a larger one, and mark every row as changed."""
        pools, capacity = len(self.sent), max(batch, 2 * self.resident.shape[1])
        self.resident = self.resident.new_zeros(pools, capacity, self.max_blocks)
        self.sent = [[[]] * capacity for _ in range(pools)]

    def build_rows(self, changed: list[int], tables: list[list[Table]]) -> None:
        """Write the indices of changed rows, then these rows of all tables, into one pinned buffer.

        tables: the changed rows only, as ``[pool][changed row]``.
        """
        pools, n = len(tables), len(changed)
        host = self.staging.host(n * (INT32S_PER_ROW_NUMBER + pools * self.max_blocks))
        numbers, rows = np.split(host, [n * INT32S_PER_ROW_NUMBER])
        numbers.view(np.int64)[:] = changed
        fill_tables(rows.reshape(pools, n, self.max_blocks), tables)

    def send_rows(self, n: int) -> None:
        numbers, rows = self.staging.send().tensor_split([n * INT32S_PER_ROW_NUMBER])
        self.resident.index_copy_(1, numbers.view(torch.int64), rows.view(-1, n, self.max_blocks))


class OneTable(ResidentTables):
    """A step with one pool for all layers: allocating block i allocates block i of every layer."""

    @staticmethod
    def pool_of(n_layers: int) -> list[int]:
        return [0] * n_layers


def fill_tables(out: np.ndarray, tables: list[list[Table]]) -> None:
    """Write ``tables[pool][row]`` to ``out [POOLS, B, MAX_BLOCKS]``, padded with 0."""
    for pool, rows in enumerate(tables):
        padded = np.array(list(zip_longest(*rows, fillvalue=0)), dtype=np.int64).reshape(-1, len(rows)).T
        out[pool, :, : padded.shape[1]] = padded
        out[pool, :, padded.shape[1] :] = 0


def have_one_position(slots: list[Slots]) -> bool:
    """Return whether all rows write at the same position; it is then the same in every pool."""
    positions = slots[0].pos
    return positions.count(positions[0]) == len(positions)


def stacked(inputs: DecodeInputs) -> Tensor:
    """Return the tables as one tensor ``[POOLS, B, MAX_BLOCKS]``, which they are in rungs with graphs."""
    return cast(Tensor, inputs.tables)


def append_from_environment() -> int | None:
    """Return the minimum batch size for the append kernel: 128 by default; None for never.

    ROSELLM_TRITON_KV_APPEND (0 for never, or 1) and ROSELLM_TRITON_KV_APPEND_MIN_BATCH set it. Raises
    ``RecipeError`` if either has an invalid value.
    """
    switch = os.environ.get(SWITCH_VARIABLE, "1")
    if switch not in ("0", "1"):
        raise RecipeError(f"{SWITCH_VARIABLE}={switch!r}; use 0 or 1")
    text = os.environ.get(MIN_BATCH_VARIABLE, str(DEFAULT_MIN_BATCH))
    if not text.isdecimal():
        raise RecipeError(f"{MIN_BATCH_VARIABLE}={text!r}; use a whole number, 0 or more")
    return int(text) if switch == "1" else None
