"""GPU memory, as counted by the driver and by torch."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch


class GPUMemory:
    """The memory of one GPU, in bytes; torch keeps memory that it has reserved until :meth:`release`.

    least: maps this rank's number to the minimum over all ranks (``group.Group.least``).
    """

    def __init__(self, device: torch.device, least: Callable[[int], int] = int) -> None:
        self._device, self._least = device, least

    def settle(self) -> None:
        """Collect garbage, since a dropped engine may hold its KV cache until then; then :meth:`release`."""
        gc.collect()
        self.release()

    def release(self) -> None:
        """Return unused memory to the driver, and reset the peak."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    @property
    def free(self) -> int:
        """The number of bytes that no process uses, the minimum over the GPUs of all ranks."""
        return self._least(torch.cuda.mem_get_info(self._device)[0])

    @property
    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    @property
    def reserved(self) -> int:
        """The number of bytes that torch has reserved, in use or not."""
        return torch.cuda.memory_reserved(self._device)

    @property
    def peak(self) -> int:
        """The peak number of bytes reserved by torch since the last :meth:`release`."""
        return torch.cuda.max_memory_reserved(self._device)
