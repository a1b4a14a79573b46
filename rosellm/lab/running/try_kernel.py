"""Try your own KV append: checked against the specification, timed against the ladder's, drawn.

An append is any function called like ``kv_append_triton_identity_pos``: with the keywords ``k_cache_layer``
and ``v_cache_layer`` ``[N_BLOCKS, H, BLOCK_SIZE, D]``, ``key_new`` and ``value_new`` ``[B, H, D]``,
``block_idx`` and ``pos``, int32 ``[B]``. A row with a negative block is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from rosellm.errors import RoseError
from rosellm.lab.figures.charts import Chart, text_table
from rosellm.lab.figures.lines import step_lines
from rosellm.lab.records.records import Results, ceilings
from rosellm.roseinfer import benchmark_kv_append as micro
from rosellm.roseinfer.kernels.table import choose_kernels
from rosellm.roseinfer.kv_append_triton import kv_append_live_rows_ref
from rosellm.triton_or_none import triton

Append = Callable[..., None]
SHAPES = ((1, 4, 2), (2, 4, 4), (3, 6, 2), (3, 16, 4), (4, 16, 16), (5, 8, 1))  # heads, head size, block size
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_BATCH = 9
PAST_ROWS = 16  # valid rows that inputs and index tensors hold beyond the batch
GUARD_BLOCKS = 2  # poisoned blocks on either side of a cache
MAX_SETS = 512
YOURS = "yours"


class KernelError(RoseError):
    """An append that cannot be timed or drawn, because it is wrong or there is nothing to draw."""


@dataclass(frozen=True)
class Case:
    """One append to try. inert: number of rows without a block; sliced: rows come from one fused tensor."""

    batch: int
    n_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    inert: int = 0
    sliced: bool = False
    seed: int = 0

    def __str__(self) -> str:
        rows = "sliced from a fused tensor" if self.sliced else "contiguous"
        return (
            f"batch {self.batch} (inert rows: {self.inert}), heads {self.n_heads} × {self.head_dim}, "
            f"blocks of {self.block_size}, {str(self.dtype).removeprefix('torch.')}, rows {rows}"
        )


@dataclass(frozen=True)
class Verdict:
    """The result of :func:`check`: ``smallest`` is the failing case after shrinking, None if all passed."""

    n_cases: int
    smallest: Case | None = None
    faults: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return self.smallest is None

    def __str__(self) -> str:
        if self.passed:
            return f"PASSED: {self.n_cases} random cases, bit for bit; nothing else was touched"
        lines = (f"  {fault}" for fault in self.faults)
        return "\n".join(
            [f"FAILED in case {self.n_cases}. The smallest case that fails:", f"  {self.smallest}", *lines]
        )


def check(append: Append, n: int = 24, seed: int = 0, device: str | torch.device | None = None) -> Verdict:
    """Tries ``append`` on ``n`` random cases and shrinks the first that fails.

    Heads, sizes, dtypes, block tables, inert rows and strides vary. Caches are poisoned and lie between
    guards; inputs and index tensors continue past the batch with valid rows, so that an overrun is detected,
    not fatal. Memory farther off is not protected: on a GPU such an access can end the CUDA context.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    rng = np.random.default_rng(seed)
    for i in range(n):
        case = _random_case(rng)
        if faults_of(append, case, where):
            smallest = _shrunk(append, case, where)
            return Verdict(i + 1, smallest, tuple(faults_of(append, smallest, where)))
    return Verdict(n)


def faults_of(append: Append, case: Case, device: torch.device) -> list[str]:
    """What ``append`` does wrong in one case, a line each; empty if it equals the specification bitwise."""
    trial = _Trial(case, device)
    wanted, found = trial.make_caches(), trial.make_caches()
    inputs = {name: base.clone() for name, base in trial.bases.items()}
    kv_append_live_rows_ref(**trial.operands(wanted))
    try:
        append(**trial.operands(found))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:
        first_line = (str(error).strip() or "no message").splitlines()[0]
        return [f"raised {type(error).__name__}: {first_line}"]
    faults = [line for name in found for line in trial.differences(name, found[name], wanted[name])]
    changed = [name for name, base in trial.bases.items() if not torch.equal(base, inputs[name])]
    return faults + [f"{name}: an input was changed" for name in changed]


class _Trial:
    """One case's tensors; each is a window of a larger one in ``bases``, which shows stray writes."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        random = torch.Generator().manual_seed(case.seed)
        rows, width = case.batch + PAST_ROWS, case.n_heads
        self.blocks = torch.randperm(rows, generator=random)
        self.blocks[torch.randperm(case.batch, generator=random)[: case.inert]] = -1
        self.pos = torch.randint(case.block_size, (rows,), generator=random)
        fused = torch.randn(rows, 3 * width, case.head_dim, generator=random).to(case.dtype)
        key, value = fused[:, width : 2 * width], fused[:, 2 * width :]
        if case.sliced:
            fused = fused.to(device)
            key, value = fused[:, width : 2 * width], fused[:, 2 * width :]
        else:
            key, value = key.contiguous().to(device), value.contiguous().to(device)
        index = {"block_idx": self.blocks.int().to(device), "pos": self.pos.int().to(device)}
        self.bases = {"key_new": key, "value_new": value, **index}

    def make_caches(self) -> dict[str, Tensor]:
        """Both caches with their guards, poisoned: ``[GUARD + rows + GUARD, H, BLOCK_SIZE, D]``."""
        c = self.case
        blocks = len(self.blocks) + 2 * GUARD_BLOCKS
        return micro.make_caches(
            micro.Shape(blocks, c.n_heads, c.head_dim, c.block_size, c.dtype, self.device)
        )

    def operands(self, caches: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What an append is given: the caches without guards, and the batch's rows."""
        windows = {name: cache[GUARD_BLOCKS:-GUARD_BLOCKS] for name, cache in caches.items()}
        return windows | {name: base[: self.case.batch] for name, base in self.bases.items()}

    def differences(self, name: str, found: Tensor, wanted: Tensor) -> Iterator[str]:
        """A line for each kind of difference: how many elements, and where the first one is."""
        size = self.case.dtype.itemsize
        found, wanted = (cache.view(micro.BITS[size]).cpu() for cache in (found, wanted))
        wrong, missed, free = found != wanted, found == micro.POISON[size], wanted == micro.POISON[size]
        kinds = {
            "never written": wrong & missed,
            "given a wrong value": wrong & ~missed & ~free,
            "written by mistake": wrong & free,
        }
        for kind, which in kinds.items():
            if which.any():
                yield f"{name}: {int(which.sum())} elements {kind}, first {self._place(which)}"

    def _place(self, which: Tensor) -> str:
        block, head, slot, element = which.nonzero()[0].tolist()
        block -= GUARD_BLOCKS
        return f"[{block}, {head}, {slot}, {element}], {self._owner(block)}"

    def _owner(self, block: int) -> str:
        if block < 0:
            return "memory before the cache"
        if block >= len(self.blocks):
            return "memory after the cache"
        rows = (self.blocks == block).nonzero().flatten().tolist()
        if not rows:
            return "a block that no row has"
        past = " (past the batch)" if rows[0] >= self.case.batch else ""
        return f"row {rows[0]}'s block{past}"


def _random_case(rng: np.random.Generator) -> Case:
    batch = int(rng.integers(1, MAX_BATCH + 1))
    return Case(
        batch,
        *SHAPES[rng.integers(len(SHAPES))],
        dtype=DTYPES[rng.integers(len(DTYPES))],
        inert=int(rng.integers(0, batch // 2 + 1)),
        sliced=bool(rng.integers(2)),
        seed=int(rng.integers(1 << 30)),
    )


def _shrunk(append: Append, case: Case, device: torch.device) -> Case:
    """A failing case whose smaller neighbours all pass."""
    while True:
        failing = (one for one in _smaller(case) if faults_of(append, one, device))
        smaller = next(failing, None)
        if smaller is None:
            return case
        case = smaller


def _smaller(case: Case) -> Iterator[Case]:
    """The case with one thing less, the largest reduction of each first."""
    if case.inert:
        yield from (replace(case, inert=inert) for inert in sorted({0, case.inert // 2, case.inert - 1}))
    for name in ("batch", "n_heads", "head_dim", "block_size"):
        size = getattr(case, name)
        least = max(1, case.inert) if name == "batch" else 1
        steps = sorted({least, size // 2, size - 1})
        yield from (replace(case, **{name: step}) for step in steps if least <= step < size)
    if case.sliced:
        yield replace(case, sliced=False)
    if case.dtype != torch.float32:
        yield replace(case, dtype=torch.float32)


def count_launches(call: Callable[[], object]) -> list[int]:
    """Runs ``call``; returns how many programs each launched Triton kernel has, interpreted or compiled."""
    programs: list[int] = []
    interface = triton.runtime.jit.KernelInterface
    launch = interface.__getitem__

    def counted(kernel: Any, grid: Any) -> Callable[..., Any]:
        def resolved(arguments: Mapping[str, Any]) -> Sequence[int]:
            sizes = grid(arguments) if callable(grid) else grid
            programs.append(math.prod(sizes))
            return sizes

        return launch(kernel, resolved)

    with patch.object(interface, "__getitem__", counted):
        call()
    return programs


@dataclass(frozen=True)
class Timing:
    """Seconds of an append for one layer; None if not meaningful. programs: one number per kernel."""

    batch: int
    variant: str
    device_s: float | None
    wall_s: float | None
    floor_s: float
    bytes_moved: int
    programs: tuple[int, ...] = ()


def time_against_ladder(
    append: Append,
    batches: Sequence[int],
    *,
    n_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str | torch.device,
    block_size: int = 64,
    repeats: int = 5,
) -> list[Timing]:
    """Medians of the ladder's variants and of ``append``, which comes last in each batch, named "yours".

    On a CPU the variants are torch versions, and ``append``, being interpreted, is counted, not timed. The
    floor is the bytes at this device's copy bandwidth. Raises KernelError if ``append`` is wrong.
    """
    where = torch.device(device)
    bandwidth = float(np.median(micro.copy_bandwidth(where, repeats)))
    timings: list[Timing] = []
    for batch in batches:
        shape = micro.Shape(batch, n_heads, head_dim, block_size, dtype, where)
        timings += _timings(append, shape, shape.bytes_moved / bandwidth, repeats)
    return timings


def _timings(append: Append, shape: micro.Shape, floor_s: float, repeats: int) -> Iterator[Timing]:
    kernels = choose_kernels("auto", "fixed", shape.device)
    mine = replace(kernels, kv_append_identity_pos=append)
    n_sets = -(-micro.ROTATED_BYTES[shape.device.type] // shape.bytes_moved)
    sets = micro.make_operands(shape, min(MAX_SETS, max(2, n_sets)))
    facts: dict[str, Any] = {"floor_s": floor_s, "bytes_moved": shape.bytes_moved}

    def timed(variant: str, kernels: Any) -> dict[str, float]:
        times = micro.time_variant(variant, sets, kernels, repeats)
        return {way: float(np.median(seconds)) for way, seconds in times.items()}

    for variant in micro.VARIANTS:
        times = timed(variant, kernels)
        yield Timing(shape.batch, variant, times.get("device_rotating"), times["wall"], **facts)
    try:
        programs = count_launches(partial(micro.check_variant, "identity_pos", sets[-1], mine, shape))
    except AssertionError as error:
        raise KernelError(f"a wrong append is not timed: {error}") from None
    times = timed("identity_pos", mine) if shape.device.type == "cuda" else {}
    facts["programs"] = tuple(programs)
    yield Timing(shape.batch, YOURS, times.get("device_rotating"), times.get("wall"), **facts)


def timing_table(timings: Sequence[Timing]) -> str:
    """Microseconds per call, the floor, and the programs of your append, as text."""
    rows = []
    for one in timings:
        times = [s and s * 1e6 for s in (one.device_s, one.wall_s, one.floor_s)]
        rows.append([one.batch, one.variant, *times, " + ".join(map(str, one.programs))])
    return text_table(["tokens", "variant", "device, µs", "wall, µs", "floor, µs", "programs"], rows)


@dataclass(frozen=True)
class Point:
    """An append that moves that many bytes in that many seconds."""

    bytes_moved: int
    seconds: float


def roof_s(bytes_moved: int, launches: int = 1) -> float:
    """The minimum seconds on the recorded GPU: its graph nodes, or the bytes at copy speed."""
    top = ceilings()
    return max(launches * top["cuda_graph_node_us"] / 1e6, bytes_moved / (top["device_copy_TB_s"] * 1e12))


def recorded_points(results: Results, way: str = "device_rotating") -> dict[str, list[Point]]:
    """Variant → its recorded points. way: ``device_rotating``, ``device_same`` or ``wall``."""
    rows = results.load("kv_append")["rows"]
    if way not in rows[0]["medians_s"]:
        raise KernelError(f"way {way!r} was not recorded: there are {', '.join(rows[0]['medians_s'])}")
    return {
        variant: [
            Point(row["bytes_moved"], row["medians_s"][way]) for row in rows if row["variant"] == variant
        ]
        for variant in micro.VARIANTS
    }


def roofline(points: Mapping[str, Sequence[Point]], *, title: str) -> Chart:
    """Bytes per second over the bytes of an append, a line per name, below the recorded GPU's two ceilings.

    On the left the roof rises: one graph node is the minimum cost of a kernel. On the right it is flat: copy
    speed.
    """
    if not any(points.values()):
        raise KernelError("there is no point to draw on the roofline")
    sizes = sorted({point.bytes_moved for line in points.values() for point in line})
    speeds = {
        name: [{p.bytes_moved: p.bytes_moved / p.seconds / 1e9 for p in line}.get(size) for size in sizes]
        for name, line in points.items()
    }
    roof = {"the roof": [size / roof_s(size) / 1e9 for size in sizes]}
    axes: dict[str, Any] = {"log_x": True, "log_y": True, "floors": roof}
    return step_lines([size / 1e6 for size in sizes], speeds, "MB an append", "GB/s", title=title, **axes)
