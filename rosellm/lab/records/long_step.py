"""A decode step of many rows at a longer context than the workloads', held against an aim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rosellm.lab.records.aims import Verdict
from rosellm.lab.records.records import Results
from rosellm.lab.records.step_time import step_times

RUNG, BATCH, CONTEXT = "split_kv", 64, 500  # cached tokens of each row
NAME = f"step-{BATCH}x{CONTEXT}"
AIMS_US = {RUNG: 400.0}


def recorded(results: Results) -> dict[str, Any]:
    """The recorded figures, none if there are none yet."""
    return results.load(NAME)["figures"] if NAME in results.names() else {}


def verdicts(figures: Mapping[str, Any]) -> list[Verdict]:
    """What came of the record's aims: the median over the engines, of the medians of their turns."""
    steps = step_times(figures.get("turns_us", {}))
    return [
        Verdict(f"step of {figures['batch']} × {figures['context']}, {rung}", aim, steps[rung].us, "µs")
        for rung, aim in figures.get("aims_us", {}).items()
    ]
