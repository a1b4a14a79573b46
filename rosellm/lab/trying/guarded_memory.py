"""Memory for trying a kernel, in which stray accesses are detected.

Every operand is a window of a larger buffer. The surrounding memory looks like the operand itself, so that an
overrun reads plausible values without crashing, and is compared bit by bit afterwards. Memory that a kernel
allocates is poisoned and lies between guards, too. Accesses farther away are not caught: on a GPU they can
end the CUDA context.
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
POISON = {1: 0x5A, 2: 0x7E5A, 4: 0x7FC5A5A5, 8: 0x7FF85A5A5A5A5A5A}  # NaNs, by element size
GUARD_ROWS, LEAST_GUARD, MOST_GUARD = 64, 256, 1 << 20  # the last two: elements
ALLOCATORS = {
    torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided,
}  # fmt: skip
FILLED = {
    torch.zeros, torch.zeros_like, torch.ones, torch.ones_like, torch.full, torch.full_like,
    Tensor.new_zeros, Tensor.new_ones, Tensor.new_full,
}  # fmt: skip
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}  # times (1 + |expected|)


def bits(x: Tensor) -> Tensor:
    """Return the bit patterns of ``x`` as integers, on the host."""
    return x.view(BITS[x.dtype.itemsize]).cpu()


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor whose element bits are ``POISON``: NaN in all floating-point types."""
    size = dtype.itemsize
    return torch.full(shape, POISON[size], dtype=BITS[size], device=device).view(dtype)


def faulty(found: Tensor, expected: Tensor, exact: bool) -> Tensor:
    """Return a mask of the wrong elements: bits differ and, unless ``exact``, values are not close."""
    differ = bits(found) != bits(expected)
    if exact or not found.is_floating_point():
        return differ
    one, other = found.double().cpu(), expected.double().cpu()
    near = (one - other).abs() <= TOLERANCE[found.dtype] * (1 + other.abs())
    return differ & ~near & ~(one == other)


def fault(name: str, wrong: Tensor, found: Tensor, expected: Tensor, kind: str) -> str:
    """Describe in one line the first wrong element, its value, the expected value, and the count."""
    place = tuple(wrong.nonzero()[0].tolist())
    there, wanted = _values(found[place], expected[place])
    n = f"{int(wrong.sum()):,} of {wrong.numel():,} elements"
    return f"{name}{list(place) or ''}: found {there}, expected {wanted} ({kind}, {n})"


def _values(found: Tensor, expected: Tensor) -> tuple[str, str]:
    """Format both with enough digits to distinguish them."""
    short = _value(found), _value(expected)
    return short if short[0] != short[1] else (_value(found, 9), _value(expected, 9))


def _value(x: Tensor, digits: int = 4) -> str:
    if int(bits(x[None])[0]) == POISON[x.dtype.itemsize]:
        return "poison"
    return f"{x.item():.{digits}g}" if x.is_floating_point() else str(x.item())


@dataclass
class Buffer:
    """Flat memory, and the operands that are windows of it, by name."""

    memory: Tensor
    windows: dict[str, Tensor] = field(default_factory=dict)

    def faults(self, before: Tensor, expected: Buffer, exact: bool) -> Iterator[str]:
        """Yield what is wrong after a call.

        before: the memory before the call; expected: the memory after the specification ran.
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
        """Return the same window of another memory of this size."""
        return flat.as_strided(window.shape, window.stride(), window.storage_offset())

    def outside(self, expected: Tensor) -> Iterator[str]:
        """If memory outside the windows is not as expected, yield the nearest one and how far away it is."""
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
    """Random operands of one call, reproducible by seed. ``buffers``: their memory, in order."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device, self.buffers = device, list[Buffer]()
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Return standard normal numbers, fp32, on the host."""
        return torch.randn(shape, generator=self.generator)

    def whole(self, low: int, high: int, *shape: int) -> Tensor:
        """Return integers from low to high - 1, int64, on the host."""
        return torch.randint(low, high, shape, generator=self.generator)

    def order(self, n: int) -> Tensor:
        """Return a random permutation of 0 to n - 1."""
        return torch.randperm(n, generator=self.generator)

    def put(self, name: str, values: Tensor, dtype: torch.dtype, on_host: bool = False) -> Tensor:
        """Place ``values`` between guards, as an operand called ``name``."""
        return self.name(name, self.lay(values, dtype, on_host))

    def lay(self, values: Tensor, dtype: torch.dtype, on_host: bool = False) -> Tensor:
        """Place ``values`` between guards, which repeat them; :meth:`name` then marks parts as operands."""
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
        """Register a part of the most recently placed values as the operand ``name``."""
        self.buffers[-1].windows[name] = window
        return window

    def state(self, rows: int, width: int, stop_tokens: tuple[int, ...] = ()) -> DeviceState:
        """Return rows of an engine's state, with ``width`` blocks each: every column is strided."""
        made = DeviceState(rows, width, self.device, stop_tokens)
        state = made.of(self.put("state.rows", made.rows.cpu(), torch.int32))
        state.ring = self.put("state.ring", made.ring, torch.int32, on_host=True)
        return state


def _guard(shape: tuple[int, ...]) -> int:
    """Return the number of guard elements on either side of a tensor: some of its rows."""
    row = torch.Size(shape[1:]).numel()
    return min(max(GUARD_ROWS * row, LEAST_GUARD), MOST_GUARD)


class Allocations(TorchFunctionMode):
    """A mode in which new tensors lie between guards, and uninitialised ones are poisoned."""

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
        """Yield a line for each tensor with a write outside it."""
        for one in self._made:
            yield from one.outside(poisoned(tuple(one.memory.shape), one.memory.dtype, one.memory.device))
