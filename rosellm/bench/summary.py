"""Print a benchmark's figures in a form that is easy to compare line by line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

UNITS = {
    "s": (1.0, 6),
    "ms": (1e3, 2),
    "ms/token": (1e3, 2),
    "tokens/s": (1.0, 2),
    "requests/s": (1.0, 2),
}  # scale, decimals


def summary_line(title: str, figures: Iterable[float | None], unit: str) -> str:
    """Format ``title: a/b/c unit``. figures: in seconds or per second; None prints as "none"."""
    scale, decimals = UNITS[unit]
    numbers = ("none" if figure is None else f"{figure * scale:.{decimals}f}" for figure in figures)
    return f"{title}: {'/'.join(numbers)} {unit}"


def print_summary(result: dict[str, Any], lines: Iterable[str]) -> None:
    """Print the figures of one mode line by line."""
    print(f"=== {result['mode']} summary ===")
    print(f"Warmup runs: {result['warmup_runs']}")
    print(f"Measured runs: {result['repeat_runs']}")
    print(*lines, sep="\n", flush=True)
