"""What the tests of the kernels share: where they run, random operands, the comparison with the spec."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import pytest
import torch
from torch import Tensor

from rosellm.models.quantized import QuantizedWeight, empty_weight
from rosellm.roseinfer.kernels.table import TORCH, TRITON, Kernels
from tests.helpers import DTYPES, INTERPRETED, ON_GPU, TRITON_DEVICES, bits

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EXACT_IN_INTERPRETER = (torch.float32, torch.float16)


def _place(device, dtype: torch.dtype):
    name = f"{device.id}-{str(dtype).removeprefix('torch.')}"
    return pytest.param(*device.values, dtype, id=name, marks=device.marks)


# (device, dtype): bfloat16 is not rounded rightly by Triton's interpreter.
GPU_PLACES = [_place(ON_GPU, dtype) for dtype in DTYPES]
PLACES = [*(_place(INTERPRETED, dtype) for dtype in EXACT_IN_INTERPRETER), *GPU_PLACES]
every_place = pytest.mark.parametrize(("device", "dtype"), PLACES)
every_gpu_place = pytest.mark.parametrize(("device", "dtype"), GPU_PLACES)
every_device = pytest.mark.parametrize("device", TRITON_DEVICES)
# The torch specs, and the kernels wherever they run.
every_twin = pytest.mark.parametrize(
    ("kernels", "device"),
    [
        pytest.param(TORCH, "cpu", id="reference"),
        *(pytest.param(TRITON, *one.values, id=one.id, marks=one.marks) for one in TRITON_DEVICES),
    ],
)
guarded = pytest.mark.usefixtures("guarded_outputs")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU here")
STRIDE = 2**27  # of rows far apart: the sixteenth is the first that 32 bits do not reach


def normals(seed: int = 0) -> Callable[..., Tensor]:
    """Return a function of a shape: normally distributed numbers, others at each call."""
    return partial(torch.randn, generator=torch.Generator().manual_seed(seed))


def far_apart(rows: Tensor) -> Tensor:
    """The rows ``[N, ...]``, ``STRIDE`` elements from each other: past 2**31 of them from the 17th row on.

    Only what is touched takes memory. Below lie as many elements as an offset that wraps around would go
    back.
    """
    n_bytes, kept_free = (2**31 + STRIDE * len(rows)) * rows.itemsize, 0x4000  # MAP_NORESERVE
    memory = mmap(-1, n_bytes, flags=MAP_PRIVATE | MAP_ANONYMOUS | kept_free)
    every = torch.frombuffer(memory, dtype=rows.dtype)[2**31 :]
    return every.as_strided(rows.shape, (STRIDE, *rows[0].stride())).copy_(rows)


def quantized(weight: Tensor, form: str) -> QuantizedWeight:
    """A weight ``[N, K]`` in 8 or 4 bits; form: one of ``WEIGHT_FORMS``."""
    return empty_weight(*weight.shape, form, weight.device, weight.dtype).copy_(weight)


def assert_near(found: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """No element is off by more than ``tolerance`` times the largest of its row (the last axis)."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    tolerance = TOLERANCE[found.dtype] if tolerance is None else tolerance
    distance = (found.double() - expected.double()).abs().amax(dim=-1)
    size = expected.double().abs().amax(dim=-1)
    worst = (distance / size).max().item()
    assert (distance <= tolerance * size).all(), f"off by {worst:.2e} of a row's largest element"


def copied(value: Any, device: str | None = None) -> Any:
    """A copy of each tensor of a case, or of a tuple in it, dense ones with their strides."""
    if isinstance(value, dict):
        return {name: copied(one, device) for name, one in value.items()}
    if isinstance(value, Tensor):
        return value.to(device or value.device, copy=True)
    return type(value)(*(copied(one, device) for one in value)) if isinstance(value, tuple) else value


def tensors_of(case: dict) -> Iterator[tuple[str, Tensor]]:
    """A case's tensors by name, also those in tuples."""
    for name, value in case.items():
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, Tensor):
                yield name, one


def assert_equals_spec(
    name: str,
    case: dict,
    *,
    written: tuple[str, ...] = (),
    exact: tuple[str, ...] = (),
    tolerance: float | None = None,
    spec_on: str | None = None,
    kernels: Kernels = TRITON,
    **options,
) -> None:
    """The kernel ``name`` gives what its torch spec gives for the arguments ``case``, and writes no others.

    written: arguments that hold results as well; exact: that hold the very bits of the spec's. spec_on: the
    spec's device, if it is another. options: of the kernel alone.
    """
    before, theirs = copied(case), copied(case, spec_on)
    expected = getattr(TORCH, name)(**theirs)
    found = getattr(kernels, name)(**case, **options)
    if expected is not None:
        assert expected.isfinite().all()
        assert_near(found, expected.to(found.device), tolerance)
    for one in written:
        wanted = theirs[one].to(case[one].device)
        assert torch.equal(case[one].isnan(), wanted.isnan())
        assert_near(case[one].nan_to_num(), wanted.nan_to_num(), tolerance)
    for one in exact:
        assert torch.equal(bits(case[one]), bits(theirs[one].to(case[one].device))), one
    for (one, now), (_, then) in zip(tensors_of(case), tensors_of(before), strict=True):
        if one not in (*written, *exact):
            dense = (x.clone(memory_format=torch.contiguous_format) for x in (now, then))
            assert torch.equal(*(x.view(torch.uint8) for x in dense)), f"{one} was written"
