"""Measure this machine's ceilings, to compare step times with, and the load of other programs on it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil
import torch
from torch.utils.benchmark import Timer

from rosellm.environment import first_line_of
from rosellm.errors import DeviceError
from rosellm.lab.records.floors import GIB, measure_ceilings
from rosellm.lab.records.records import number

LEAST_BYTES = 2**20
CPU_MATRIX = 1024  # number of rows and of columns
MOST_CPU, MOST_GPU = 90, 5  # % of the time that other programs may run
CPU_SAMPLE_S = 0.5
LOOKS, EVERY_S, SAMPLE_S = 8, 0.25, 1.0  # the driver averages over up to a second


@dataclass(frozen=True)
class Ceilings:
    """The highest speeds measured on this machine.

    read_bytes_per_us: bytes read per µs.
    copy_bytes_per_us: bytes read plus bytes written per µs of a copy.
    flops_per_us: FLOPs per µs of a matrix multiplication.
    call_us: the host's µs to call an operator from Python on one element, which launches a kernel on a GPU.
    read_size: number of bytes that were read repeatedly. On a CPU, it is what a step reads (at most 1 GiB),
        so that the caches set the ceiling if they hold the whole model.
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

    step_bytes: number of bytes that a step reads.

    Raises ``DeviceError`` if a GPU has less than 2.5 GiB of free memory.
    """
    with torch.inference_mode():
        call_us = _least_us("one.add_(1)", one=torch.zeros(1, device=device))
    if device.type == "cuda":
        try:
            found = {name: max(values) * 1e6 for name, values in measure_ceilings(device, dtype).items()}
        except torch.OutOfMemoryError as error:
            raise DeviceError(
                f"{device} has less than 2.5 GiB of free memory to measure its bandwidth; free some, e.g. "
                "with a smaller gpu_memory_utilization"
            ) from error
        return Ceilings(found["read_TB_s"], found["copy_TB_s"], found["matmul_TFLOP_s"], call_us, GIB)
    size = int(min(max(step_bytes, LEAST_BYTES), GIB)) // 4 * 4
    source = torch.ones(size // 4)
    a = torch.randn(CPU_MATRIX, CPU_MATRIX).to(dtype)
    return Ceilings(
        read_bytes_per_us=size / _least_us("source.sum()", source=source),
        copy_bytes_per_us=2
        * size
        / _least_us("target.copy_(source)", source=source, target=torch.empty_like(source)),
        flops_per_us=2 * CPU_MATRIX**3 / _least_us("torch.mm(a, a, out=out)", a=a, out=torch.empty_like(a)),
        call_us=call_us,
        read_size=size,
    )


def _least_us(statement: str, **operands: torch.Tensor) -> float:
    """Return the shortest time of a statement in µs, measured for about 0.1 s."""
    timer = Timer(statement, globals=operands, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=0.1).times) * 1e6


def other_load(device: torch.device) -> str:
    """Describe the load of other programs on the CPU or the GPU; return "" if there is little.

    This process waits meanwhile.
    """
    if (busy := psutil.cpu_percent(interval=CPU_SAMPLE_S)) > MOST_CPU:
        return f"other programs keep its {psutil.cpu_count()} cores busy {busy:.0f} % of the time"
    if device.type != "cuda":
        return ""
    torch.cuda.synchronize(device)
    which = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
    time.sleep(SAMPLE_S)
    for _ in range(LOOKS):
        used = first_line_of(
            "nvidia-smi", which, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"
        )
        if used is not None and used.isdigit() and int(used) > MOST_GPU:
            return f"other programs' kernels run on its GPU, {used} % of the time"
        time.sleep(EVERY_S)
    return ""
