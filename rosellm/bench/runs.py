"""Runs of a job: repeat, measure and trace them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile

from rosellm.atomic import replacing
from rosellm.bench.job import Job
from rosellm.bench.record import across_repeats, distribution, tokens_sha256
from rosellm.errors import RoseError
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.outputs import RequestOutput

Run = Callable[[Job], dict[str, Any]]  # serves all requests; its figures for the record


def repeat(run: Run, job: Job, mode: str, warmup_runs: int, repeat_runs: int) -> dict[str, Any]:
    """Run the job repeatedly; return every measured run's raw figures, medians and means."""
    for _ in range(warmup_runs):
        run(job)
    return mode_result(mode, warmup_runs, [run(job) for _ in range(repeat_runs)])


def mode_result(mode: str, warmup_runs: int, repeats: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one mode's part of a record."""
    return {"mode": mode, "warmup_runs": warmup_runs, "repeat_runs": len(repeats), **across_repeats(repeats)}


def prepare_run(engine: Engine) -> None:
    """Prepare a run: empty the prefix cache, wait for the device, reset the memory peak."""
    if engine.prefix_cache is not None:
        engine.prefix_cache.clear()
    reset_peak_memory(engine.device)


def reset_peak_memory(device: torch.device) -> None:
    """Wait until ``device`` is idle, then reset its memory peak."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int | None:
    """Return peak bytes allocated on the GPU since :func:`reset_peak_memory`; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def check_served(outputs: list[RequestOutput]) -> None:
    """Raise ``RoseError`` if a request failed: a run with fewer tokens is no measurement."""
    for number, output in enumerate(outputs, 1):
        if output.finish_reason == "failed":
            raise RoseError(f"request {number} of {len(outputs)} failed: {output.error}")


def run_figures(tokens: list[list[int]], total_time: float, peak: int | None) -> dict[str, Any]:
    """Return figures common to all runs. tokens: new ones per request; total_time: seconds; peak: bytes."""
    completion_tokens = sum(map(len, tokens))
    return {
        "total_time_s": total_time,
        "completion_tokens": completion_tokens,
        "total_throughput_tok_s": completion_tokens / total_time,
        "peak_gpu_memory_bytes": peak,
        "tokens_sha256": tokens_sha256(tokens),
    }


def request_figures(outputs: list[RequestOutput], percents: Iterable[int]) -> dict[str, float | None]:
    """Return the distributions of TTFT, TPOT and latency over the requests, in seconds."""
    figures: dict[str, float | None] = {}
    for metric in ("ttft", "tpot", "latency"):
        figures |= distribution(metric, [getattr(output.metrics, metric) for output in outputs], percents)
    return figures


def write_trace(run: Run, job: Job, path: Path) -> None:
    """Write a Chrome trace of one run, with all its threads."""
    with profile(experimental_config=_ExperimentalConfig(profile_all_threads=True)) as trace:
        run(job)
    with replacing(path) as unfinished:
        trace.export_chrome_trace(str(unfinished))
