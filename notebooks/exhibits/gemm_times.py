"""Recorded times of the GEMMs of GPT-2 small's layers, by rows."""

from __future__ import annotations

import numpy as np

from rosellm.lab.records.records import ceilings


def recorded_gemms() -> dict[int, float]:
    """Return rows → recorded µs of all layers' GEMMs of GPT-2 small on the H200: cuBLAS in a chain."""
    chain_us, head_us = (ceilings()[f"{name}_us_vocab_50257"] for name in ("cublas_gemm_chain", "lm_head"))
    return {int(rows): us - head_us[rows] for rows, us in chain_us.items()}


def gemms_us(rows: int) -> float:
    """Interpolate ``recorded_gemms`` linearly to any number of rows."""
    recorded = recorded_gemms()
    return float(np.interp(rows, list(recorded), list(recorded.values())))
