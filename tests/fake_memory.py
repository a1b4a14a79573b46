"""A GPU's memory without a GPU: bytes that a test moves by hand."""

from __future__ import annotations

import gc
from collections.abc import Callable

GiB, MiB = 1 << 30, 1 << 20


class FakeMemory:
    """Like ``gpu_memory.GPUMemory``; held: what is in use, asked for anew at each look.

    ``driver``: bytes that torch does not count; ``reserved``: what torch has; ``held``: what it must keep.
    """

    def __init__(self, total: int = 80 * GiB, held: Callable[[], int] = lambda: 0) -> None:
        self.total, self.held = total, held
        self.driver = 0
        self.reserved = self.peak = held()

    def settle(self) -> None:
        gc.collect()
        self.release()

    def release(self) -> None:
        self.reserved = self.peak = self.held()

    @property
    def free(self) -> int:
        return self.total - self.driver - self.reserved

    def reserve(self, n_bytes: int) -> None:
        self.reserved += n_bytes
        self.peak = max(self.peak, self.reserved)
