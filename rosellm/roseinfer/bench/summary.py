"""What a benchmark prints of its figures, in the form in which people compare runs line by line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

UNITS = {"s": (1.0, 6), "ms": (1e3, 2), "ms/token": (1e3, 2), "tokens/s": (1.0, 2)}  # scale, decimals


def summary_line(title: str, figures: Iterable[float | None], unit: str) -> str:
    """``title: a/b/c unit``. figures: seconds or tokens a second; one without value reads "none"."""
    scale, decimals = UNITS[unit]
    numbers = ("none" if figure is None else f"{figure * scale:.{decimals}f}" for figure in figures)
    return f"{title}: {'/'.join(numbers)} {unit}"


def print_summary(result: dict[str, Any], lines: Iterable[str]) -> None:
    """The runs of one mode, and what was measured, line by line."""
    print(f"=== {result['mode']} summary ===")
    print(f"Warmup runs: {result['warmup_runs']}")
    print(f"Measured runs: {result['repeat_runs']}")
    print(*lines, sep="\n", flush=True)
