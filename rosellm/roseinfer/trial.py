"""What an engine's steps take of a GPU's memory beside weights and KV cache, measured before there is one."""

from __future__ import annotations

from collections.abc import Callable

from rosellm.roseinfer.cache.gpu_memory import GPUMemory
from rosellm.roseinfer.steps.step import Step

DRIVER_BYTES = 2 << 20  # the driver hands memory out in pieces of this size


def working_bytes(build: Callable[[], Step], n_tokens: int, memory: GPUMemory) -> int:
    """Bytes for the largest prefill (``n_tokens``), the largest decode steps and all graphs.

    build: a step on a cache of any size; inert inputs reach no block. Of two trials the first loads kernels
    and libraries: they stay loaded, so what they take is already missing from the free memory.
    """
    _trial(build, n_tokens, memory)
    return _trial(build, n_tokens, memory)


def _trial(build: Callable[[], Step], n_tokens: int, memory: GPUMemory) -> int:
    """Only the largest graphs are captured: the others fit into their memory, and have no more nodes."""
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
    nodes = free - memory.free - (memory.reserved - reserved)  # the driver's, not torch's
    n_graphs = len(largest) + len(step.captures())
    return taken + (max(nodes, 0) + DRIVER_BYTES) * n_graphs // len(largest)
