"""CUDA graphs: which batch sizes are captured, in what memory, and how."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")


GraphPool = Any  # torch's handle


def batch_bucket(batch: int) -> int:
    """The captured batch size that serves ``batch``: powers of two to 8, then multiples of 8, 32 and 128."""
    for limit, step in ((8, None), (64, 8), (256, 32)):
        if batch <= limit:
            return 1 << (batch - 1).bit_length() if step is None else -(-batch // step) * step
    return -(-batch // 128) * 128


@cache
def _capture_stream() -> torch.cuda.Stream:
    """One stream for all captures: cuBLAS keeps 32 MiB for each stream that it was ever called on."""
    return torch.cuda.Stream()


def graph_pool(device: torch.device) -> GraphPool | None:
    """Memory shared by the graphs of one engine; None on a CPU.

    Graphs run one after the other: each keeps its own outputs, but may reuse another's intermediates.
    """
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def record_graph(
    run: Callable[[], T], warm_up: Callable[[], object] | None = None, pool: GraphPool | None = None
) -> Callable[[], T]:
    """A CUDA graph of ``run``: each call replays it and returns the tensors it was captured with.

    Before capture, two runs of ``warm_up`` (None: of ``run``) compile and tune kernels and allocate memory.
    Only calls from this thread can invalidate the capture; other threads are not restricted.
    """
    side = _capture_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            (warm_up or run)()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
        outputs = run()

    def replay() -> T:
        graph.replay()
        return outputs

    return replay
