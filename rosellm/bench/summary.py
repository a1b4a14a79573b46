"""Print a benchmark's figures in a form that is easy to compare line by line."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

UNITS = {
    "s": (1.0, 6),
    "ms": (1e3, 2),
    "ms/token": (1e3, 2),
    "tokens/s": (1.0, 2),
    "requests/s": (1.0, 2),
}  # scale, decimals


Line = tuple[str, list[str], str]  # title, names of figures such as "medians.ttft_p50_s", unit


def print_summary(result: dict[str, Any], lines: Iterable[Line]) -> None:
    """Print one mode's figures, each line as ``title: a/b/c unit``; one that it lacks prints as "none"."""
    print(f"=== {result['mode']} summary ===")
    print(f"Warmup runs: {result['warmup_runs']}")
    print(f"Measured runs: {result['repeat_runs']}")
    for title, names, unit in lines:
        scale, decimals = UNITS[unit]
        figures = (result[part].get(name) for part, name in (path.split(".") for path in names))
        numbers = ("none" if figure is None else f"{figure * scale:.{decimals}f}" for figure in figures)
        print(f"{title}: {'/'.join(numbers)} {unit}")
    sys.stdout.flush()
