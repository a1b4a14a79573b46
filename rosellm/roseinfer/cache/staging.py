"""Host memory on its way to the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class StagingBuffer:
    """One host buffer, pinned where there is a GPU, reused and growing; each send is one non-blocking copy.

    The buffer is rewritten only after the previous copy has finished, which an event tells.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._pin = device.type == "cuda"
        self._host = torch.empty(0, dtype=dtype)
        self._sent = torch.cuda.Event() if self._pin else None

    def host(self, *shape: int) -> np.ndarray:
        """A writable, contiguous host array of this shape; its old contents are undefined."""
        size = int(np.prod(shape))
        if self._sent is not None:
            self._sent.synchronize()
        if size > self._host.numel():
            self._host = torch.empty(
                max(size, 2 * self._host.numel()), dtype=self.dtype, pin_memory=self._pin
            )
        self._shape = shape
        return self._host[:size].view(shape).numpy()

    def send(self, out: Tensor | None = None) -> Tensor:
        """Copy what :meth:`host` handed out to the device, into the front of ``out`` if given; one copy."""
        source = self._host[: int(np.prod(self._shape))]
        target = (
            torch.empty(source.shape, dtype=self.dtype, device=self.device)
            if out is None
            else out[: source.numel()]
        )
        target.copy_(source, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
        return target.view(self._shape)
