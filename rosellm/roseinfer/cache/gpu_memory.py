"""A GPU's memory, as the driver and torch count it."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch


class GPUMemory:
    """Bytes of one device. torch keeps what it has once reserved, until :meth:`settle`.

    least: of several ranks' devices the least that is free (``group.Group``).
    """

    def __init__(self, device: torch.device, least: Callable[[int], int] = int) -> None:
        self._device, self._least = device, least

    def settle(self) -> None:
        """Give unused memory back to the driver; the peak starts anew.

        An engine that was dropped holds its cache until garbage is collected.
        """
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    @property
    def free(self) -> int:
        """What no process has."""
        return self._least(torch.cuda.mem_get_info(self._device)[0])

    @property
    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    @property
    def reserved(self) -> int:
        """What torch has, in use or not."""
        return torch.cuda.memory_reserved(self._device)

    @property
    def peak(self) -> int:
        """The most that torch has had since it settled."""
        return torch.cuda.max_memory_reserved(self._device)
