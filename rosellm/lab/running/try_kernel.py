"""Time a reader's single-layer append against the ladder's, and plot it under the reference GPU's roofline.

It is any function with the interface of ``kv_append_triton_identity_pos``, which implements the specification
``kv_append_live_rows_ref``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rosellm.bench import benchmark_kv_append as micro
from rosellm.lab.figures.charts import Chart, text_table
from rosellm.lab.figures.lines import step_lines
from rosellm.lab.records.records import RecordError, Results, ceilings
from rosellm.lab.trying.check_kernel import KernelError, launches
from rosellm.roseinfer.kernels.table import choose_kernels

Append = Callable[..., None]
MAX_SETS = 512
YOURS = "yours"


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
    """Return medians for the ladder's variants and for ``append``, which is last in each batch as "yours".

    On a CPU the variants are torch versions, and ``append``, which is interpreted, is only counted. The floor
    is the bytes at this device's copy bandwidth. Raises KernelError if ``append`` is wrong.
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
        with launches() as launched:
            micro.check_variant("identity_pos", sets[-1], mine, shape)
    except AssertionError as error:
        raise KernelError(f"a wrong append is not timed: {error}") from None
    times = timed("identity_pos", mine) if shape.device.type == "cuda" else {}
    facts["programs"] = tuple(one.programs for one in launched)
    yield Timing(shape.batch, YOURS, times.get("device_rotating"), times.get("wall"), **facts)


def timing_table(timings: Sequence[Timing]) -> str:
    """Return a text table of microseconds per call, the floor, and the programs of your append."""
    rows = []
    for one in timings:
        times = [s and s * 1e6 for s in (one.device_s, one.wall_s, one.floor_s)]
        rows.append([one.batch, one.variant, *times, " + ".join(map(str, one.programs))])
    return text_table(["tokens", "variant", "device, µs", "wall, µs", "floor, µs", "programs"], rows)


@dataclass(frozen=True)
class Point:
    """An append's bytes moved, and the seconds that it takes."""

    bytes_moved: int
    seconds: float


def roof_s(bytes_moved: int, launches: int = 1) -> float:
    """Return the minimum seconds on the recorded GPU: its graph nodes, or the bytes at copy speed."""
    top = ceilings()
    return max(launches * top["cuda_graph_node_us"] / 1e6, bytes_moved / (top["device_copy_TB_s"] * 1e12))


def recorded_points(results: Results, way: str = "device_rotating") -> dict[str, list[Point]]:
    """Return variant → its recorded points. way: ``device_rotating``, ``device_same`` or ``wall``.

    Raises RecordError for a way that was not recorded, as on a CPU.
    """
    rows = results.load("kv_append")["rows"]
    if way not in rows[0]["medians_s"]:
        raise RecordError(f"way {way!r} was not recorded: there are {', '.join(rows[0]['medians_s'])}")
    return {
        variant: [
            Point(row["bytes_moved"], row["medians_s"][way]) for row in rows if row["variant"] == variant
        ]
        for variant in micro.VARIANTS
    }


def roofline(points: Mapping[str, Sequence[Point]], *, title: str) -> Chart:
    """Draw bytes per second over the bytes of an append, a line per name, below the GPU's two ceilings.

    On the left the roof rises: one graph node is the minimum cost of a kernel. On the right it is flat, at
    copy speed.
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
