"""Measure sides in alternation, so that temporary slowdowns of the machine affect all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rosellm.bench.record import across_repeats

Runs = Mapping[str, Callable[[], dict[str, Any]]]  # a side's name → one run of it


def in_turns(runs: Runs, repeats: int) -> dict[str, dict[str, Any]]:
    """Return each side's raw figures with medians and means, after one unmeasured run."""
    for run in runs.values():
        run()
    raw: dict[str, list[dict[str, Any]]] = {side: [] for side in runs}
    for _ in range(repeats):
        for side, run in runs.items():
            raw[side].append(run())
    return {side: {"repeat_runs": repeats, **across_repeats(found)} for side, found in raw.items()}
