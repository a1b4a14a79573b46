"""Capture of CUDA graphs."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from ctypes import CDLL, byref, c_void_p
from functools import cached_property, partial
from typing import TypeVar

import torch

from rosellm.errors import OptionError
from rosellm.no_collection import no_collection

T = TypeVar("T")
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class CaptureStream:
    """A stream of the current GPU to capture on, and the memory of cuBLAS's workspaces for this stream.

    As long as a graph exists, its GEMMs write to the workspace with which they were captured; but workspaces
    may be freed at any time, as ``torch.compile`` does. These return to a pool that serves nothing else.
    Nothing else runs on the stream: torch's own 32 streams serve everyone.
    """

    def __init__(self) -> None:
        handle = c_void_p()
        if status := CDLL("libcuda.so.1").cuStreamCreate(byref(handle), NON_BLOCKING):
            raise RuntimeError(f"cuStreamCreate returned {status}")
        self.stream = torch.cuda.ExternalStream(int(handle.value or 0))
        self.workspaces = torch.cuda.MemPool()

    def allocate_workspaces(self) -> None:
        """Let cuBLAS and cuBLASLt allocate their workspaces for this stream and the current thread."""
        x, y = torch.zeros(2, 16, 16, dtype=torch.float16, device="cuda")
        with torch.cuda.use_mem_pool(self.workspaces):
            torch.mm(x, x, out=y)
            torch.addmm(x[0], x, x, out=y)


_IDLE: defaultdict[int, list[CaptureStream]] = defaultdict(list)  # by GPU


class Graphs:
    """The CUDA graphs of one engine, which share a memory pool.

    Graphs are replayed one after another. Each keeps its outputs, but may overwrite the intermediate tensors
    of another graph.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: list[torch.cuda.CUDAGraph] = []

    @cached_property
    def _side(self) -> CaptureStream:
        idle = _IDLE[torch.cuda.current_device()]
        side = idle.pop() if idle else CaptureStream()
        weakref.finalize(self, idle.append, side)
        return side

    @property
    def count(self) -> int:
        """The number of graphs captured so far."""
        return len(self._captured)

    def capture(self, run: Callable[[], T], warm_up: Callable[[], object] | None) -> Callable[[], T]:
        """Capture ``run`` in a CUDA graph; return a function that replays it and returns its outputs.

        run: launches the kernels to capture.
        warm_up: runs the same kernels before the capture, which compiles and tunes them; None if they have
            all run before.

        Other threads may use CUDA during the capture. Unlike ``torch.cuda.graph``, this method neither waits
        for the device nor returns unused memory to it.
        """
        graph, side = torch.cuda.CUDAGraph(), self._side.stream
        self._captured.append(graph)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._side.allocate_workspaces()
            if warm_up is not None:
                warm_up()
            with no_collection():
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    outputs = run()
                finally:
                    graph.capture_end()
        torch.cuda.current_stream().wait_stream(side)
        return partial(self._replay, graph, outputs)

    def _replay(self, graph: torch.cuda.CUDAGraph, outputs: T) -> T:
        graph.replay()
        return outputs

    def reset(self) -> None:
        """Destroy all graphs; call this before the communicators that they captured are destroyed."""
        for graph in self._captured:
            graph.reset()


def graphs_on(device: torch.device) -> Graphs | None:
    """Return a new :class:`Graphs`, or None on a CPU.

    Raises ``OptionError`` if torch allocates by ``cudaMallocAsync``, which has no memory pools.
    """
    if device.type != "cuda":
        return None
    if (backend := torch.cuda.get_allocator_backend()) != "native":
        raise OptionError(f"CUDA graphs need the native allocator; PYTORCH_CUDA_ALLOC_CONF chose {backend}")
    return Graphs()
