"""What the tests of the fused kernels share: guarded outputs, relative distances, replayed chains."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from rosellm.roseinfer.kernels.table import TRITON, TRITON_DEPENDENT, Kernels
from tests.helpers import DTYPES, INTERPRETED, ON_GPU

GUARD = 64
REPLAYS = 50
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EXACT_IN_INTERPRETER = (torch.float32, torch.float16)


def _place(device, dtype: torch.dtype):
    name = f"{device.id}-{str(dtype).removeprefix('torch.')}"
    return pytest.param(*device.values, dtype, id=name, marks=device.marks)


# (device, dtype): bfloat16 is not rounded rightly by Triton's interpreter.
PLACES = [
    *(_place(INTERPRETED, dtype) for dtype in EXACT_IN_INTERPRETER),
    *(_place(ON_GPU, dtype) for dtype in DTYPES),
]


class GuardedMemory:
    """Memory for outputs: poisoned, so that an element left unwritten shows, with a guard on either side."""

    def __init__(self) -> None:
        self.held: list[Tensor] = []

    def hand_out(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        count = shape.numel()
        memory = torch.full((count + 2 * GUARD,), 77, dtype=dtype, device=device)
        inner = memory[GUARD : GUARD + count]
        inner.fill_(float("nan") if dtype.is_floating_point else -77)
        self.held.append(memory)
        return inner.view(shape)

    def check(self) -> None:
        for memory in self.held:
            assert (memory[:GUARD] == 77).all() and (memory[-GUARD:] == 77).all(), "written outside an output"


@pytest.fixture
def guarded_outputs(monkeypatch) -> Iterator[GuardedMemory]:
    """Every ``new_empty`` and ``torch.empty`` gives guarded memory; the guards are looked at afterwards."""
    guarded, new_empty = GuardedMemory(), Tensor.new_empty

    def guarded_new_empty(self: Tensor, *size, dtype=None, device=None) -> Tensor:
        shape = torch.Size(size if isinstance(size[0], int) else size[0])
        if not shape.numel():
            return new_empty(self, shape, dtype=dtype, device=device)
        return guarded.hand_out(shape, dtype or self.dtype, device or self.device)

    def guarded_empty(*size: int, dtype=None, device=None) -> Tensor:
        return guarded.hand_out(torch.Size(size), dtype or torch.get_default_dtype(), device)

    monkeypatch.setattr(Tensor, "new_empty", guarded_new_empty)
    monkeypatch.setattr(torch, "empty", guarded_empty)
    yield guarded
    guarded.check()


def assert_near(found: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """No element is off by more than ``tolerance`` times the largest of its row (the last axis)."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    tolerance = TOLERANCE[found.dtype] if tolerance is None else tolerance
    distance = (found.double() - expected.double()).abs().amax(dim=-1)
    size = expected.double().abs().amax(dim=-1)
    worst = (distance / size).max().item()
    assert (distance <= tolerance * size).all(), f"off by {worst:.2e} of a row's largest element"


def clones(case: dict) -> dict:
    """The case with a copy of each tensor, the strides kept where they are those of a dense tensor."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in case.items()}


def assert_untouched(case: dict, before: dict) -> None:
    """The tensors of ``case`` are bit for bit those of ``before``."""
    for name, value in before.items():
        if isinstance(value, Tensor):
            assert torch.equal(case[name].view(torch.uint8), value.view(torch.uint8)), f"{name} was written"


Chain = Callable[[Kernels], tuple[Tensor, ...]]


def assert_replays_equal_ordinary_launches(chain: Chain, refill: Callable[[int], None]) -> None:
    """``chain``, captured with dependent launches, gives at every replay what ordinary launches give.

    refill(seed) puts fresh inputs into the tensors that the chain reads.
    """
    refill(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        chain(TRITON_DEPENDENT)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = chain(TRITON_DEPENDENT)
    for seed in range(1, REPLAYS + 1):
        refill(seed)
        graph.replay()
        found = [output.clone() for output in outputs]
        refill(seed)
        for mine, expected in zip(found, chain(TRITON), strict=True):
            if expected.is_floating_point():
                assert_near(mine, expected)
            else:
                assert torch.equal(mine, expected)
