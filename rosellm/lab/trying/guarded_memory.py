"""Memory for trying a kernel, in which accesses outside the operands are detected.

Every operand is a window of a larger buffer. The memory on both sides, the guards, repeats the operand's
values, so that reads outside the window are plausible and do not crash; it is compared bit by bit afterwards.
Tensors that a kernel allocates lie between guards, too, and are poisoned (filled with NaN) if uninitialised.
Accesses beyond the guards are not detected; on a GPU they can end the CUDA context.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rosellm.roseinfer.cache.device_state import DeviceState

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
POISON = {1: 0x5A, 2: 0x7E5A, 4: 0x7FC5A5A5, 8: 0x7FF85A5A5A5A5A5A}  # NaNs, by element size in bytes
GUARD_ROWS, LEAST_GUARD, MOST_GUARD = 64, 256, 1 << 20  # rows, elements, elements
ALLOCATORS = {
    torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided,
}  # fmt: skip
FILLED = {
    torch.zeros, torch.zeros_like, torch.ones, torch.ones_like, torch.full, torch.full_like,
    Tensor.new_zeros, Tensor.new_ones, Tensor.new_full,
}  # fmt: skip
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}  # multiplied by 1 + |expected|


def bits(x: Tensor) -> Tensor:
    """Return the bit patterns of ``x`` as integers of the same size, on the host."""
    return x.view(BITS[x.dtype.itemsize]).cpu()


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor filled with the bits of ``POISON``, which are NaN in all floating-point types."""
    size = dtype.itemsize
    return torch.full(shape, POISON[size], dtype=BITS[size], device=device).view(dtype)


def faulty(found: Tensor, expected: Tensor, exact: bool) -> Tensor:
    """Return a boolean mask of the wrong elements, on the host.

    exact: whether an element is wrong if any bit differs; otherwise it is wrong if its value is not close.
    """
    differ = bits(found) != bits(expected)
    if exact or not found.is_floating_point():
        return differ
    one, other = found.double().cpu(), expected.double().cpu()
    near = (one - other).abs() <= TOLERANCE[found.dtype] * (1 + other.abs())
    return differ & ~near & ~(one == other)


def fault(name: str, wrong: Tensor, found: Tensor, expected: Tensor, kind: str) -> str:
    """Describe the first wrong element and the number of wrong elements in one line.

    wrong: the mask that :func:`faulty` returned.
    kind: what is wrong with these elements, such as "never written".
    """
    place = tuple(wrong.nonzero()[0].tolist())
    there, wanted = _values(found[place], expected[place])
    n = f"{int(wrong.sum()):,} of {wrong.numel():,} elements"
    return f"{name}{list(place) or ''}: found {there}, expected {wanted} ({kind}, {n})"


def _values(found: Tensor, expected: Tensor) -> tuple[str, str]:
    """Format two numbers with enough digits to distinguish them."""
    short = _value(found), _value(expected)
    return short if short[0] != short[1] else (_value(found, 9), _value(expected, 9))


def _value(x: Tensor, digits: int = 4) -> str:
    if int(bits(x[None])[0]) == POISON[x.dtype.itemsize]:
        return "poison"
    return f"{x.item():.{digits}g}" if x.is_floating_point() else str(x.item())


@dataclass
class Buffer:
    """Memory with guards, as a flat tensor.

    windows: the operands in this memory, by name.
    """

    memory: Tensor
    windows: dict[str, Tensor] = field(default_factory=dict)

    def faults(self, before: Tensor, expected: Buffer, exact: bool) -> Iterator[str]:
        """Yield a line for each fault in this memory after a call.

        before: the memory before the call.
        expected: an equal buffer, on which the specification ran.
        exact: as in :func:`faulty`; operands that must not be written at all are always compared exactly.
        """
        if torch.equal(bits(self.memory), bits(expected.memory)):
            return
        for name, window in self.windows.items():
            found, wanted, then = (self._at(window, x) for x in (self.memory, expected.memory, before))
            written = bits(wanted) != bits(then)
            wrong = faulty(found, wanted, exact or not written.any())
            missed = wrong & written & (bits(found) == bits(then))
            kinds = {
                "never written": missed,
                "a wrong value": wrong & written & ~missed,
                "written by mistake": wrong & ~written,
            }
            yield from (fault(name, of, found, wanted, kind) for kind, of in kinds.items() if of.any())
        yield from self.outside(expected.memory)

    def _at(self, window: Tensor, flat: Tensor) -> Tensor:
        """Return the part of another flat memory ``flat`` at the place of ``window``."""
        return flat.as_strided(window.shape, window.stride(), window.storage_offset())

    def outside(self, expected: Tensor) -> Iterator[str]:
        """Yield a line on the first wrong element outside the windows, and the window next to it, if any."""
        wrong = bits(self.memory) != bits(expected)
        for window in self.windows.values():
            self._at(window, wrong)[...] = False
        if not wrong.any():
            return
        first = int(wrong.nonzero()[0])
        ends = {name: self._ends(window) for name, window in self.windows.items()}
        name = min(ends, key=lambda one: max(ends[one][0] - first, first - ends[one][1], 0))
        low, high = ends[name]
        where = "between the rows of"
        if not low <= first <= high:
            where = (
                f"{low - first} before the beginning of" if first < low else f"{first - high} past the end of"
            )
        there, wanted = _values(self.memory[first], expected[first])
        n = f"{int(wrong.sum()):,} elements"
        yield f"memory {where} {name}: found {there}, expected {wanted} (written outside, {n})"

    @staticmethod
    def _ends(window: Tensor) -> tuple[int, int]:
        """Return the offsets of the window's first and last element."""
        first, steps = int(window.storage_offset()), zip(window.shape, window.stride(), strict=True)
        return first, first + sum((int(n) - 1) * int(step) for n, step in steps)


class Draw:
    """Random operands of one call, reproducible by seed.

    buffers: the memory of the operands, in the order in which they were placed.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device, self.buffers = device, list[Buffer]()
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Return standard normal numbers: fp32, on the host."""
        return torch.randn(shape, generator=self.generator)

    def whole(self, low: int, high: int, *shape: int) -> Tensor:
        """Return random integers from ``low`` to ``high - 1``: int64, on the host."""
        return torch.randint(low, high, shape, generator=self.generator)

    def order(self, n: int) -> Tensor:
        """Return a random permutation of 0 to n - 1."""
        return torch.randperm(n, generator=self.generator)

    def put(self, name: str, values: Tensor, dtype: torch.dtype, on_host: bool = False) -> Tensor:
        """Place ``values`` by :meth:`lay`, and return them as the operand ``name``."""
        return self.name(name, self.lay(values, dtype, on_host))

    def lay(self, values: Tensor, dtype: torch.dtype, on_host: bool = False) -> Tensor:
        """Place ``values`` between guards that repeat them, and return them in ``dtype``.

        on_host: whether to place them in host memory, pinned if the device is a GPU.

        :meth:`name` then registers parts of the result as operands.
        """
        flat, guard = values.flatten().to(dtype), _guard(values.shape)
        around = flat.repeat(-(-guard // max(1, flat.numel())))[:guard]
        memory = torch.cat((around, flat, around))
        if not on_host:
            memory = memory.to(self.device)
        elif self.device.type == "cuda":
            memory = memory.pin_memory()
        self.buffers.append(Buffer(memory))
        return memory[guard : guard + flat.numel()].view(values.shape)

    def name(self, name: str, window: Tensor) -> Tensor:
        """Register ``window``, a part of the values placed last, as the operand ``name``; return it."""
        self.buffers[-1].windows[name] = window
        return window

    def state(self, rows: int, width: int, stop_tokens: tuple[int, ...] = ()) -> DeviceState:
        """Return an engine's state whose rows are between guards; every column is strided.

        rows: number of state rows.
        width: number of entries of a row's block table.
        """
        made = DeviceState(rows, width, self.device, stop_tokens)
        state = made.of(self.put("state.rows", made.rows.cpu(), torch.int32))
        state.ring = self.put("state.ring", made.ring, torch.int32, on_host=True)
        return state


def _guard(shape: tuple[int, ...]) -> int:
    """Return the number of guard elements on either side of a tensor of this shape."""
    row = torch.Size(shape[1:]).numel()
    return min(max(GUARD_ROWS * row, LEAST_GUARD), MOST_GUARD)


class Allocations(TorchFunctionMode):
    """A torch function mode that places new tensors between guards and poisons uninitialised tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[Buffer] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if (func not in ALLOCATORS and func not in FILLED) or not made.numel() or made.is_pinned():
            return made
        guard = _guard(tuple(made.shape))
        span = 1 + sum((n - 1) * s for n, s in zip(made.shape, made.stride(), strict=True))
        memory = poisoned((span + 2 * guard,), made.dtype, made.device)
        window = memory.as_strided(made.shape, made.stride(), guard)
        if func in FILLED:
            window.copy_(made)
        self._made.append(Buffer(memory, {"a tensor that it made": window}))
        return window

    def faults(self) -> Iterator[str]:
        """Yield a line for each new tensor whose guards were overwritten."""
        for one in self._made:
            yield from one.outside(poisoned(tuple(one.memory.shape), one.memory.dtype, one.memory.device))
