"""Host staging buffers for copies to the device."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

MOST_BUFFERS = 16


_streams: dict[tuple[int, int], torch.cuda.Stream] = {}  # by device and handle


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the current stream of a GPU, as ``torch.cuda.current_stream`` does, but three times as fast."""
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)  # noqa: SLF001
    if key not in _streams:
        _streams[key] = torch.cuda.current_stream(device)
    return _streams[key]


class StagingBuffer:
    """Reusable host memory for non-blocking copies to the device, pinned if there is a GPU.

    Buffers grow as needed. A buffer is rewritten only after its last copy has finished, which an event
    signals. Copies queue behind the steps in flight; while the oldest copy is unfinished, another buffer is
    used, so the host waits only if ``MOST_BUFFERS`` copies are in flight. If the host waits for each step's
    tokens, one buffer is enough.

    waits: how often the host has waited for a buffer.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.waits = 0
        self._pin = device.type == "cuda"
        self._new_event = torch.cuda.Event if self._pin else None  # copies on a CPU are synchronous
        self._taken = torch.empty(0, dtype=dtype, device="cpu")  # the buffer being written
        self._array = self._taken.numpy()  # the same memory; kept, because ``numpy()`` is slow
        self._copied: torch.cuda.Event | None = None  # the event of the buffer's copies
        self._capacity = 0
        self._given = self._array  # the latest array from host()
        self._sent: deque[tuple[Tensor, np.ndarray, torch.cuda.Event]] = deque()  # oldest first

    def host(self, *shape: int) -> np.ndarray:
        """Return a writable, contiguous host array of this shape with undefined contents."""
        size = math.prod(shape)
        if self._new_event is not None:
            self._taken, self._array, self._copied = self._free_buffer(self._new_event)
        if size > len(self._array):
            self._capacity = max(self._capacity, 2 * size)
            self._taken = torch.empty(self._capacity, dtype=self.dtype, device="cpu", pin_memory=self._pin)
            self._array = self._taken.numpy()
        self._given = self._array[:size].reshape(shape)
        return self._given

    def put(self, array: np.ndarray) -> StagingBuffer:
        """Stage ``array`` for :meth:`send`; it is copied unless it is the latest array from :meth:`host`."""
        if array is not self._given:
            self.host(*array.shape)[...] = array
        return self

    def send(self, out: Tensor | None = None) -> Tensor:
        """Copy the staged array to the device, into ``out [n]`` if given; return the device tensor."""
        source = self._taken[: self._given.size]
        target = torch.empty_like(source, device=self.device) if out is None else out
        target.copy_(source, non_blocking=True)
        if self._copied is not None:
            self._copied.record(current_stream(self.device))
            self._sent.append((self._taken, self._array, self._copied))
        return target.view(self._given.shape)

    def _free_buffer(
        self, new_event: Callable[[], torch.cuda.Event]
    ) -> tuple[Tensor, np.ndarray, torch.cuda.Event]:
        """Return the oldest buffer if its copy has ended or ``MOST_BUFFERS`` are in use, else a new one."""
        if self._sent and self._sent[0][-1].query():
            return self._sent.popleft()
        if len(self._sent) < MOST_BUFFERS:
            none = torch.empty(0, dtype=self.dtype, device="cpu")
            return none, none.numpy(), new_event()
        self.waits += 1
        self._sent[0][-1].synchronize()
        return self._sent.popleft()
