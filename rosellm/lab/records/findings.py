"""Each notebook's finding in one line, computed from the records of a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable

from rosellm.lab.records.records import RecordError, Results, number
from rosellm.lab.records.verdicts import verdicts
from rosellm.roseinfer.recipe import BEFORE, BEST_RUNG

LONGER_NAMES = {"paged": "paged_attention", "no_mask": "mask_removal"}
NOTEBOOKS = {rung: f"{i:02}_{LONGER_NAMES.get(rung, rung)}" for i, rung in enumerate(BEFORE, 1)}
RUNG_OF = {notebook: rung for rung, notebook in NOTEBOOKS.items()}


def finding(results: Results, notebook: str) -> str:
    """One line of plain text with ``code`` marks; raises RecordError for a notebook that has none."""
    if notebook in OTHERS:
        return OTHERS[notebook](results)
    if notebook not in RUNG_OF:
        raise RecordError(f"notebook {notebook!r} has no finding: it tells of no rung and of no experiment")
    rung = RUNG_OF[notebook]
    rows = verdicts(results, BEFORE[rung], rung)
    largest_first = sorted(rows, key=lambda row: -abs(math.log(row.ratio)))
    told = [f"{row.workload} {row.change}" for row in largest_first if row.sign][:3]
    return f"tok/s {', '.join(told)}" if told else "no difference beyond the noise"


def _span(results: Results) -> str:
    values = results.values("W3")
    return f"W3: {number(values['dense'])} → {number(values[BEST_RUNG])} tok/s up the ladder"


def _split(results: Results) -> str:
    steps = results.load("grid")["figures"]["few"]
    pairs = zip(steps["dependent_launch"], steps["split_kv"], strict=True)
    gain, row = max((1 - new["step_us"] / old["step_us"], new["batch"]) for old, new in pairs)
    rows = "1 row" if row == 1 else f"{row} rows"
    return f"no workload passes its gate; behind it a step of {rows} takes up to {number(gain * 100)} % less"


def _invariance(results: Results) -> str:
    cost = results.load("determinism")["figures"]["cost"]
    lost = ", ".join(f"{workload} −{number(cost[workload]['cost'] * 100)} %" for workload in ("W2", "W3"))
    return f"no bit changes in any company, for {lost}"


def _pressure(results: Results) -> str:
    figures = results.load("kv_pressure")["figures"]
    kept = ", ".join(f"{workload} {number(one['ratio'] * 100)} %" for workload, one in figures.items())
    return f"what a quarter of the KV blocks leaves of the tokens a second: {kept}"


def _append(results: Results) -> str:
    rows = [row for row in results.load("kv_append")["rows"] if row["batch_size"] == 256]
    best = min(rows, key=lambda row: row["medians_s"]["device_rotating"])
    least, floor = best["medians_s"]["device_rotating"] * 1e6, best["floor_s"] * 1e6
    return (
        f"256 tokens: `{best['variant']}` takes {number(least)} µs of GPU time, its bytes {number(floor)} µs"
    )


OTHERS: dict[str, Callable[[Results], str]] = {
    "00_map": _span,
    "21_split_kv": _split,
    "23_determinism": _invariance,
    "24_faults": _pressure,
    "25_your_kernel": _append,
}

TOLD = {*RUNG_OF, *OTHERS}
