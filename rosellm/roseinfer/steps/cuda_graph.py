"""Capture of CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

from rosellm.no_collection import no_collection

T = TypeVar("T")


GraphPool = Any  # torch's handle


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return the stream of a GPU's captures; cuBLAS keeps 32 MiB for every stream that it is called on."""
    return torch.cuda.Stream(device)


def _free_workspaces() -> None:
    """Free cuBLAS's workspaces. ``torch.compile`` may do so at any time; a graph then still needs its own."""
    torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001 - there is no public function


class Graphs:
    """The CUDA graphs of one engine, which share a memory pool.

    Graphs are replayed one after another. Each keeps its outputs, but may overwrite the intermediate tensors
    of another graph.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: list[torch.cuda.CUDAGraph] = []

    @property
    def count(self) -> int:
        """The number of graphs captured so far."""
        return len(self._captured)

    def capture(self, run: Callable[[], T], warm_up: Callable[[], object] | None) -> Callable[[], T]:
        """Capture ``run`` into a new graph that uses the shared memory pool, as :func:`record_graph` does."""
        graph = torch.cuda.CUDAGraph()
        self._captured.append(graph)
        return record_graph(run, warm_up, self._pool, graph)

    def reset(self) -> None:
        """Destroy all graphs; call this before the communicators that they captured are destroyed."""
        for graph in self._captured:
            graph.reset()


def graphs_on(device: torch.device) -> Graphs | None:
    """Return a new :class:`Graphs`, or None on a CPU."""
    return Graphs() if device.type == "cuda" else None


def record_graph(
    run: Callable[[], T],
    warm_up: Callable[[], object] | None,
    pool: GraphPool | None = None,
    graph: torch.cuda.CUDAGraph | None = None,
) -> Callable[[], T]:
    """Capture ``run`` in a CUDA graph; return a function that replays it and returns the captured outputs.

    run: launches the kernels to capture.
    warm_up: runs the same kernels before the capture, which compiles and tunes them; None if they have all
        run before.
    pool: the memory pool to allocate from, shared with other graphs; None for a private pool.
    graph: an empty graph to capture into; None for a new one.

    Other threads may use CUDA during the capture. Unlike ``torch.cuda.graph``, this function neither waits
    for the device nor returns unused memory to it. cuBLAS's workspaces are freed before and after, so
    that the one which the graph uses belongs to its memory pool.
    """
    side = _capture_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph() if graph is None else graph
    shared = {} if pool is None else {"pool": pool}
    with torch.cuda.stream(side):
        if warm_up is not None:
            warm_up()
        _free_workspaces()
        with no_collection():
            graph.capture_begin(**shared, capture_error_mode="thread_local")
            try:
                outputs = run()
            finally:
                graph.capture_end()
                _free_workspaces()
    torch.cuda.current_stream().wait_stream(side)

    def replay() -> T:
        graph.replay()
        return outputs

    return replay
