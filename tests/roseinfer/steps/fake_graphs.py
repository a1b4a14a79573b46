"""Graphs without a GPU: what would be captured is called again on the same buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from rosellm.roseinfer.steps.cuda_graph import Graphs

T = TypeVar("T")


class FakeGraphs:
    """Counts like ``cuda_graph.Graphs``."""

    def __init__(self) -> None:
        self.count = 0

    def capture(self, run: Callable[[], T], warm_up: Callable[[], object] | None) -> Callable[[], T]:
        self.count += 1
        if warm_up is not None:
            warm_up()
        return run


def graphs_anywhere(device: torch.device) -> FakeGraphs | Graphs:
    return FakeGraphs() if device.type == "cpu" else Graphs()


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines on the CPU decide, pad and replay as they do on a GPU."""
    for module in ("roseinfer.assembly", "ladder.rungs"):
        monkeypatch.setattr(f"rosellm.{module}.graphs_on", graphs_anywhere)
