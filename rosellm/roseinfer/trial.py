"""The number of KV blocks that fit in memory; on a GPU, trial runs measure what else an engine needs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rosellm.models.model import Transformer
from rosellm.roseinfer.cache.gpu_memory import GPUMemory
from rosellm.roseinfer.steps.step import Step

CPU_KV_BYTES = 2 << 30
GPU_CONTEXT_BYTES = 1 << 30  # captured graphs and library workspaces
PREFILL_TOKENS = 16384  # per scheduler iteration
DRIVER_BYTES = 2 << 20  # granularity of the driver's allocations


def kv_blocks_within_memory(
    gpt: Transformer,
    wanted: int,
    block_size: int,
    n_rows: int = 256,
    utilization: float = 0.9,
    measure: Callable[[], int] | None = None,
    least: Callable[[int], int] = int,
    draft: Transformer | None = None,
    form: str | None = None,
) -> int:
    """Return how many KV blocks per layer fit in memory, at most ``wanted``; may be 0.

    gpt: the model, whose weights are already in memory.
    wanted: number of blocks per layer that the engine can use.
    n_rows: maximum number of sequences that decode together.
    utilization: the fraction of the GPU's memory that the engine may use.
    measure: returns the working memory of steps in bytes, and is called only if ``wanted`` blocks take more
        than half of the free memory; None estimates it instead.
    least: maps this rank's number to the minimum over all ranks.
    draft: a model that has a KV cache with as many blocks.
    form: the format of the keys and values of gpt, as in ``KVBlocks``.

    On a GPU, the blocks may take ``utilization`` of its memory, less what is in use (the weights) and the
    working memory of prefills and decode steps. On a CPU, they may take ``CPU_KV_BYTES``.
    """
    token_bytes = kv_bytes_per_token(gpt, form) + (0 if draft is None else kv_bytes_per_token(draft))
    block_bytes = block_size * token_bytes
    if gpt.device.type != "cuda":
        return max(0, min(wanted, CPU_KV_BYTES // block_bytes))
    memory = GPUMemory(gpt.device, least)
    if measure is not None and 2 * wanted * block_bytes <= _room(memory, utilization):
        return wanted
    try:
        working = _estimated_bytes(gpt, n_rows) if measure is None else measure()
    except torch.OutOfMemoryError:
        return 0
    return max(0, min(wanted, (_room(memory, utilization) - working) // block_bytes))


def kv_bytes_per_token(model: Transformer, form: str | None = None) -> int:
    """Return the bytes of a cached token in all layers. form: as in ``KVBlocks``."""
    c = model.config
    if form is None:
        return c.kv_bytes_per_token(model.dtype.itemsize)
    scales = 2 * c.n_layers * c.n_kv_heads
    return c.kv_bytes_per_token(1) + scales * torch.float32.itemsize


def _room(memory: GPUMemory, utilization: float) -> int:
    """Return how many bytes of the ``utilization`` fraction of the GPU's memory are not in use."""
    memory.settle()
    return int(utilization * memory.total) - (memory.total - memory.free)


def _estimated_bytes(gpt: Transformer, n_rows: int) -> int:
    """Estimate the bytes held at once by the largest prefill and by sampling for ``n_rows`` sequences."""
    config, size = gpt.config, gpt.dtype.itemsize
    widths = 4 * config.d_model + config.qkv_width + config.attention_width + config.up_width + config.d_ff
    return GPU_CONTEXT_BYTES + PREFILL_TOKENS * widths * size + 7 * n_rows * config.vocab_size * 4


def working_bytes(
    build: Callable[[], Step], n_tokens: int, memory: GPUMemory, rows: int | None = None
) -> int:
    """Return the bytes used by the largest prefill, the largest decode steps and all graphs.

    build: makes a step. The size of its KV cache does not matter, since inert inputs touch no block.
    n_tokens: number of tokens of the largest prefill.
    rows: the batch size whose decode steps' kernels are loaded before the measurement; None for all kernels.

    A prefill runs and the largest graphs are captured. All smaller graphs are assumed to reuse the memory of
    the largest, and to have as many nodes. Kernels and libraries are loaded before: they stay loaded, and are
    not counted.
    """
    _load(build(), n_tokens, rows)
    memory.settle()
    free, reserved = memory.free, memory.reserved
    step = build()
    largest = step.largest_captures()
    for run in step.rehearsals(n_tokens) + largest:
        run()
    taken = memory.peak - reserved
    memory.release()
    if not largest:
        return taken
    nodes = free - memory.free - (memory.reserved - reserved)  # allocated by the driver, not by torch
    n_graphs = len(largest) + len(step.captures())
    return taken + (max(nodes, 0) + DRIVER_BYTES) * n_graphs // len(largest)


def _load(step: Step, n_tokens: int, rows: int | None) -> None:
    """Run the kernels, and capture one graph, since libraries keep a workspace for the stream of captures."""
    for run in step.warm_ups(rows) + step.rehearsals(n_tokens) + step.largest_captures()[:1]:
        run()
