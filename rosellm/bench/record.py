"""Benchmark records: one JSON object per run, with all raw figures and the environment."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rosellm.atomic import write_text
from rosellm.environment import environment
from rosellm.errors import RoseError
from rosellm.models.families.table import write_arch
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.outputs import RequestOutput

SCHEMA_VERSION = 1


def new_record(kind: str, where: torch.device, **fields: Any) -> dict[str, Any]:
    """Return a record with ``fields`` and the environment.

    kind: the kind of benchmark, such as "scheduler" or "streaming".
    where: the device that was measured.
    """
    return {"schema_version": SCHEMA_VERSION, "kind": kind, **fields, "environment": environment(where)}


def engine_facts(engine: Engine) -> dict[str, Any]:
    """Describe how an engine was built; ``rung`` is None for a custom recipe."""
    return {
        "rung": engine.rung,
        "recipe": engine.recipe.as_dict(),
        "kernels": engine.kernels.name,
        "prefix_cache": engine.prefix_cache is not None,
        "device": engine.device.type,
        "dtype": dtype_name(engine),
        "quantization": engine.model.quantization,
        "kv_cache_dtype": engine.kv_form or "auto",
        "model_shape": write_arch(engine.config),
        "max_batch_size": engine.max_batch_size,
        "block_size": engine.block_size,
        "num_kv_blocks": engine.num_kv_blocks,
    }


def dtype_name(engine: Engine) -> str:
    """Return the dtype of the weights, for example ``float16``."""
    return str(engine.model.dtype).removeprefix("torch.")


def distribution(
    name: str, values: Iterable[float | None], percents: Iterable[int]
) -> dict[str, float | None]:
    """Return the mean and percentiles of ``values``, as ``{name}_mean_s``, ``{name}_p50_s`` and so on.

    values: seconds; None is ignored. Without values, all figures are None.
    percents: the percentiles to return, from 0 to 100.
    """
    known = [value for value in values if value is not None]
    figures = {"mean": float(np.mean(known)) if known else None}
    for percent in percents:
        figures[f"p{percent}"] = float(np.percentile(known, percent)) if known else None
    return {f"{name}_{which}_s": figure for which, figure in figures.items()}


def across_repeats(repeats: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of every repeat, and the median and mean of each number that all repeats have."""
    numeric = [name for name in repeats[0] if all(isinstance(one[name], (int, float)) for one in repeats)]
    columns = {name: [repeat[name] for repeat in repeats] for name in numeric}
    return {
        "repeats": repeats,
        "medians": {name: float(np.median(column)) for name, column in columns.items()},
        "means": {name: float(np.mean(column)) for name, column in columns.items()},
    }


def run_figures(tokens: list[list[int]], total_time: float, device: torch.device | None) -> dict[str, Any]:
    """Return the figures that all benchmarks have: times in seconds, tokens per second, memory in bytes.

    tokens: the output tokens of each request.
    total_time: seconds of the whole run.
    device: if it is a GPU, the figures include its peak memory since :func:`reset_peak_memory`.
    """
    peak = torch.cuda.max_memory_allocated(device) if device and device.type == "cuda" else None
    completion_tokens = sum(map(len, tokens))
    return {
        "total_time_s": total_time,
        "completion_tokens": completion_tokens,
        "total_throughput_tok_s": completion_tokens / total_time,
        "peak_gpu_memory_bytes": peak,
        "tokens_sha256": tokens_sha256(tokens),
    }


def request_figures(outputs: list[RequestOutput], percents: Iterable[int]) -> dict[str, float | None]:
    """Return the mean and percentiles of TTFT, TPOT and latency over the requests, in seconds."""
    figures: dict[str, float | None] = {}
    for metric in ("ttft", "tpot", "latency"):
        figures |= distribution(metric, [getattr(output.metrics, metric) for output in outputs], percents)
    return figures


def mode_result(mode: str, warmup_runs: int, repeats: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one mode's part of a record.

    repeats: the figures of each measured run.
    """
    return {"mode": mode, "warmup_runs": warmup_runs, "repeat_runs": len(repeats), **across_repeats(repeats)}


def tokens_sha256(outputs: Iterable[list[int]]) -> str:
    """Hash the output ids of all requests: per request the length, then the ids, in little-endian int32."""
    digest = hashlib.sha256()
    for token_ids in outputs:
        digest.update(np.array([len(token_ids), *token_ids], dtype="<i4").tobytes())
    return digest.hexdigest()


def check_writable(path: Path) -> Path:
    """Return ``path`` if a file can be written there; otherwise raise ``RoseError``."""
    folder = path.parent
    if not folder.is_dir():
        raise RoseError(f"cannot write {path}: there is no folder {folder}")
    if path.exists() and not path.is_file():
        raise RoseError(f"cannot write {path}: it exists and is not a regular file")
    if not os.access(folder, os.W_OK):
        raise RoseError(f"cannot write {path}: the folder {folder} is read-only")
    return path


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write ``record`` to ``path`` as JSON, atomically; numbers are not rounded. Raises ``RoseError``."""
    check_writable(path)
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    try:
        write_text(path, text)
    except OSError as error:
        raise RoseError(f"cannot write {path}: {error.strerror}") from error
