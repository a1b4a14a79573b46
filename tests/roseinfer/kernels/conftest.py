"""Memory that kernels' outputs are given in tests: poisoned, and guarded on either side."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

GUARD = 64


@pytest.fixture
def guarded_outputs(monkeypatch) -> Iterator[None]:
    """Every ``new_empty`` and ``torch.empty`` gives guarded memory; the guards are looked at afterwards."""
    held: list[Tensor] = []
    new_empty = Tensor.new_empty

    def guarded(shape: torch.Size, dtype: torch.dtype, device: torch.device | None) -> Tensor:
        memory = torch.full((shape.numel() + 2 * GUARD,), 77, dtype=dtype, device=device)
        held.append(memory)
        return memory[GUARD:-GUARD].fill_(float("nan") if dtype.is_floating_point else -77).view(shape)

    def guarded_new_empty(self: Tensor, *size, dtype=None, device=None) -> Tensor:
        shape = torch.Size(size if isinstance(size[0], int) else size[0])
        if not shape.numel():
            return new_empty(self, shape, dtype=dtype, device=device)
        return guarded(shape, dtype or self.dtype, device or self.device)

    def guarded_empty(*size: int, dtype=None, device=None) -> Tensor:
        return guarded(torch.Size(size), dtype or torch.get_default_dtype(), device)

    monkeypatch.setattr(Tensor, "new_empty", guarded_new_empty)
    monkeypatch.setattr(torch, "empty", guarded_empty)
    yield
    for memory in held:
        assert (memory[:GUARD] == 77).all() and (memory[-GUARD:] == 77).all(), "written outside an output"
