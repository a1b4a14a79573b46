"""Modern models' recorded whole runs, beside a rival's and the floor."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

from rosellm.bench.prompts import make_prompts, new_tokens
from rosellm.bench.workloads import MODEL_WORKLOADS, Workload
from rosellm.lab.records.floors import Ceiling, prefill_floors_us
from rosellm.lab.records.records import Results, modern_rivals, one_lease
from rosellm.models.families.table import read_arch

RIVAL = "vLLM 0.22.1"
BYTES = 2  # per element, in the models' dtype


class Row(NamedTuple):
    """One workload of one model: our median, the rival's, and the floor, in ``unit``; None if unknown."""

    workload: str
    ours: float | None
    rival: float | None
    floor: float | None
    unit: str


def short_name(model: str) -> str:
    """Convert e.g. ``Qwen/Qwen3-0.6B`` to ``Qwen3-0.6B``."""
    return Path(model).name


def recorded_models(results: Results) -> list[str]:
    """Return the models that have records of whole runs."""
    return sorted({path.parent.name for path in results.folder.glob("*/D1.json")})


def table(results: Results, model: str) -> list[Row]:
    """Return a row per workload that has a record or a rival's figure."""
    theirs = modern_rivals(model).get(RIVAL, {})
    rows = (_row(results, model, w, theirs) for w in MODEL_WORKLOADS)
    return [row for row in rows if row.ours is not None or row.rival is not None]


def lease_table(results: Results, model: str) -> list[Row]:
    """Return ``table`` for the session that ran both engines; results: the machine that defines the floor."""
    figures = one_lease(model)
    return [
        Row(name, *figures[name], floor(results, model, name), unit_of(workload))
        for name, workload in MODEL_WORKLOADS.items()
        if name in figures
    ]


def ceiling_of(results: Results) -> Ceiling:
    """Return the device's ceilings from its record ``ceilings``."""
    figures = results.load("ceilings")["figures"]
    return Ceiling(max(figures["read_TB_s"]) * 1e6, max(figures["matmul_TFLOP_s"]) * 1e6)


def floor(results: Results, model: str, name: str) -> float | None:
    """Return the bound of a recorded run in its workload's unit; None without its record and ceilings.

    All requests run together. Each decode step reads the weights and the cached keys and values once, and
    prompts are multiplied, both at the rates in the device's record ``ceilings``.
    """
    path = results.folder / model / f"{name}.json"
    if not path.is_file() or "ceilings" not in results.names():
        return None
    record = json.loads(path.read_text())
    arch, options = read_arch(record["model_shape"]), Namespace(**record["options"])
    prompts, new = [len(one) for one in make_prompts(options, vocab_size=2)], new_tokens(options)
    ceiling, total = ceiling_of(results), sum(prompts)
    least = prefill_floors_us(arch, len(prompts), total / len(prompts), BYTES, ceiling)
    us = least["GEMM"] + least["head"]
    us += sum(prefill_floors_us(arch, 1, tokens, BYTES, ceiling)["attention"] for tokens in prompts)
    read = sum((n - 1) * prompt + n * (n - 1) / 2 for prompt, n in zip(prompts, new, strict=True))
    weights = (max(new) - 1) * arch.n_step_parameters * BYTES
    us += (weights + read * arch.kv_bytes_per_token(BYTES)) / ceiling.bytes_per_us
    unit = unit_of(MODEL_WORKLOADS[name])
    return us / 1e3 if unit == "ms" else (total if unit == "prompt tok/s" else sum(new)) / us * 1e6


def _row(results: Results, model: str, name: str, rival: dict) -> Row:
    path = results.folder / model / f"{name}.json"
    ours = figure(json.loads(path.read_text()), MODEL_WORKLOADS[name]) if path.is_file() else None
    least = floor(results, model, name)
    return Row(name, ours, rival.get(name), least, unit_of(MODEL_WORKLOADS[name]))


def unit_of(workload: Workload) -> str:
    """Return a workload's unit: TTFT in ms, or prompt tokens or new tokens per second."""
    if workload.max_new_tokens > 1:
        return "tok/s"
    return "ms" if workload.num_requests == 1 else "prompt tok/s"


def figure(record: dict[str, Any], workload: Workload) -> float:
    """Return the median over a record's repeats, in the workload's unit."""
    (result,) = record["results"].values()
    medians, unit = result["medians"], unit_of(workload)
    if unit == "ms":
        return medians["ttft_p50_s"] * 1e3
    if unit == "tok/s":
        return medians["total_throughput_tok_s"]
    return workload.num_requests * (workload.prompt_tokens or 1) / medians["total_time_s"]
