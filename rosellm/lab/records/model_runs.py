"""Modern models by name, those with records, and the ceilings under them."""

from __future__ import annotations

from pathlib import Path

from rosellm.lab.records.floors import Ceiling
from rosellm.lab.records.records import Results


def short_name(model: str) -> str:
    """Convert e.g. ``Qwen/Qwen3-0.6B`` to ``Qwen3-0.6B``."""
    return Path(model).name


def recorded_models(results: Results) -> list[str]:
    """Return the models that have records of whole runs."""
    return sorted({path.parent.name for path in results.folder.glob("*/D1.json")})


def ceiling_of(results: Results) -> Ceiling:
    """Return the device's ceilings from its record ``ceilings``."""
    figures = results.load("ceilings")["figures"]
    return Ceiling(max(figures["read_TB_s"]) * 1e6, max(figures["matmul_TFLOP_s"]) * 1e6)
