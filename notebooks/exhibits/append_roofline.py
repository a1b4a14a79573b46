"""Plot recorded single-layer appends under the reference GPU's roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rosellm.bench import benchmark_kv_append as micro
from rosellm.lab.figures.charts import Chart
from rosellm.lab.figures.lines import step_lines
from rosellm.lab.records.records import RecordError, Results, ceilings
from rosellm.lab.trying.check_kernel import KernelError


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
    """Return variant → its recorded points. way: ``device_rotating`` or ``wall``.

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
