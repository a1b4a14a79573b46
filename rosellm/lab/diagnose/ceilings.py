"""Measure this machine's ceilings, against which step times are compared, and detect whether it is busy."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from rosellm.environment import first_line_of
from rosellm.errors import DeviceError
from rosellm.lab.records.floors import GIB, measure_ceilings
from rosellm.lab.records.records import number

LEAST_BYTES = 2**20
CALLS = 500
CPU_MATRIX = 1024  # rows and columns
PRESSURE = Path("/proc/pressure/cpu")  # Linux: share of time that programs waited for a core
MOST_WAITING = 50  # % of the last 10 s; near 100 with one program more than cores
MOST_USE = 5  # % of the driver's last sample with a kernel running
LOOKS, EVERY_S, SAMPLE_S = 8, 0.25, 1.0  # the driver's samples last up to a second


@dataclass(frozen=True)
class Ceilings:
    """Bytes read, bytes copied (reads plus writes) and FLOPs per µs, and the µs to call one operator.

    Reads repeat over the same ``read_size`` bytes: on a CPU as many as a step reads, so if caches hold the
    whole model, they set the ceiling. ``call_us`` is the host's time to call an operator from Python on a
    one-element tensor; on a GPU that launches one kernel.
    """

    read_bytes_per_us: float
    copy_bytes_per_us: float
    flops_per_us: float
    call_us: float
    read_size: int

    def __str__(self) -> str:
        return (
            f"reads {number(self.read_bytes_per_us / 1e3)} GB/s ({number(self.read_size / 1e6)} MB, on a "
            f"CPU partly from its caches), copies {number(self.copy_bytes_per_us / 1e3)} GB/s, multiplies "
            f"{number(self.flops_per_us / 1e3)} GFLOP/s, calls an operator in {number(self.call_us)} µs"
        )


def find_ceilings(device: torch.device, dtype: torch.dtype, step_bytes: float) -> Ceilings:
    """Measure the ceilings of ``device`` in ``dtype``; takes about a second.

    step_bytes: bytes that a step reads. Raises ``DeviceError`` if a GPU has less than 2.5 GiB of free memory.
    """
    call_us = _call_us(device)
    if device.type == "cuda":
        found = _of_gpu(device, dtype)
        per_us = found["read_TB_s"] * 1e6, found["copy_TB_s"] * 1e6, found["matmul_TFLOP_s"] * 1e6
        return Ceilings(*per_us, call_us, GIB)
    size = int(min(max(step_bytes, LEAST_BYTES), GIB)) // 4 * 4
    source = torch.ones(size // 4)
    target = torch.empty_like(source)
    a = torch.randn(CPU_MATRIX, CPU_MATRIX).to(dtype)
    out = torch.empty_like(a)
    return Ceilings(
        read_bytes_per_us=size / _least_us(source.sum),
        copy_bytes_per_us=2 * size / _least_us(lambda: target.copy_(source)),
        flops_per_us=2 * CPU_MATRIX**3 / _least_us(lambda: torch.mm(a, a, out=out)),
        call_us=call_us,
        read_size=size,
    )


def _of_gpu(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    try:
        return {name: max(values) for name, values in measure_ceilings(device, dtype).items()}
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"{device} has less than 2.5 GiB of free memory to measure its bandwidth; free some, e.g. with "
            "a smaller gpu_memory_utilization"
        ) from error


def _least_us(run: Callable[[], object], seconds: float = 0.1) -> float:
    """Return the shortest run in µs of those that fit into ``seconds``, at least two, after a warm-up."""
    run()
    taken: list[float] = []
    while len(taken) < 2 or sum(taken) < seconds:
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken) * 1e6


def _call_us(device: torch.device) -> float:
    one = torch.zeros(1, device=device)

    def call_many() -> None:
        for _ in range(CALLS):
            one.add_(1)

    with torch.inference_mode():
        us = _least_us(call_many) / CALLS
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return us


def overload() -> str:
    """Describe CPU contention: more programs want to run than there are cores. "" if not, or if unknown."""
    cores = os.cpu_count()
    try:
        found = re.search(r"some avg10=([\d.]+)", PRESSURE.read_text())
    except OSError:  # not Linux, or switched off
        found = None
    if found is not None:
        waiting = float(found[1])
        told = f"programs waited for one of its {cores} cores in {waiting:.0f} % of the last ten seconds"
        return told if waiting > MOST_WAITING else ""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    told = f"in the last minute {number(load)} programs wanted to run on its {cores} cores"
    return told if cores and load > cores else ""


def gpu_in_use(device: torch.device) -> str:
    """Describe other programs' use of the GPU, or return "" if idle or without nvidia-smi.

    Launches no kernels.
    """
    if device.type != "cuda":
        return ""
    torch.cuda.synchronize(device)
    which = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
    time.sleep(SAMPLE_S)
    for _ in range(LOOKS):
        used = first_line_of(
            "nvidia-smi", which, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"
        )
        if used is not None and used.isdigit() and int(used) > MOST_USE:
            return f"other programs' kernels run on its GPU, {used} % of the time"
        time.sleep(EVERY_S)
    return ""
