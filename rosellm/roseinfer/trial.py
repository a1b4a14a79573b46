"""Measure an engine's GPU memory besides weights and KV cache, before the cache is allocated."""

from __future__ import annotations

from collections.abc import Callable

from rosellm.roseinfer.cache.gpu_memory import GPUMemory
from rosellm.roseinfer.steps.step import Step

DRIVER_BYTES = 2 << 20  # granularity of the driver's allocations


def working_bytes(build: Callable[[], Step], n_tokens: int, memory: GPUMemory) -> int:
    """Return the bytes used by the largest prefill (``n_tokens``), the largest decode steps and all graphs.

    build: makes a step on a cache of any size; inert inputs touch no block. The trial runs twice: the first
    run loads kernels and libraries, which stay loaded and so no longer count as free memory in the second.
    """
    _trial(build, n_tokens, memory)
    return _trial(build, n_tokens, memory)


def _trial(build: Callable[[], Step], n_tokens: int, memory: GPUMemory) -> int:
    """Capture only the largest graphs: the others reuse their memory, and have no more nodes."""
    memory.settle()
    free, reserved = memory.free, memory.reserved
    step = build()
    largest = step.largest_captures()
    for run in step.rehearsals(n_tokens) + largest:
        run()
    taken = memory.peak - reserved
    memory.settle()
    if not largest:
        return taken
    nodes = free - memory.free - (memory.reserved - reserved)  # allocated by the driver, not by torch
    n_graphs = len(largest) + len(step.captures())
    return taken + (max(nodes, 0) + DRIVER_BYTES) * n_graphs // len(largest)
