"""Lower bounds on each part of a decode step on a device, from its bytes and FLOPs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from rosellm.models.arch import Arch
from rosellm.triton_or_none import tl, triton

GIB = 2**30
BLOCK = 4096  # elements


@dataclass(frozen=True)
class Ceiling:
    """A device's ceilings: bytes read and floating-point operations per µs."""

    bytes_per_us: float
    flops_per_us: float

    @classmethod
    def of(cls, measured: Mapping[str, list[float]]) -> Ceiling:
        """Return the best of :func:`measure_ceilings`, or of a device's record ``ceilings``."""
        return cls(max(measured["read_TB_s"]) * 1e6, max(measured["matmul_TFLOP_s"]) * 1e6)


@lru_cache(maxsize=8)
def measure_ceiling(device: torch.device, dtype: torch.dtype) -> Ceiling:
    """Measure a GPU's ceilings; see :func:`measure_ceilings`."""
    return Ceiling.of(measure_ceilings(device, dtype))


def measure_ceilings(device: torch.device, dtype: torch.dtype, repeats: int = 5) -> dict[str, list[float]]:
    """Measure what a GPU sustains, per repeat: reading 1 GiB, copying it (both ways count), and a GEMM.

    The GEMM is that of two 8192 × 8192 matrices of ``dtype``.
    """
    source = torch.ones(GIB // 4, dtype=torch.int32, device=device)
    target, sums = torch.empty_like(source), source.new_empty(source.numel() // BLOCK)
    a = torch.randn(8192, 8192, device=device, dtype=dtype)
    out = torch.empty_like(a)
    ways: dict[str, tuple[float, Callable[[], object]]] = {
        "read_TB_s": (GIB / 1e12, lambda: sum_blocks(source, sums)),
        "copy_TB_s": (2 * GIB / 1e12, lambda: target.copy_(source)),
        "matmul_TFLOP_s": (2 * 8192**3 / 1e12, lambda: torch.mm(a, a, out=out)),
    }
    return {name: [work / _seconds(run) for _ in range(repeats)] for name, (work, run) in ways.items()}


def _seconds(run: Callable[[], object]) -> float:
    return triton.testing.do_bench(run, warmup=10, rep=40, return_mode="min") / 1e3


def sum_blocks(source: Tensor, sums: Tensor) -> Tensor:
    """Sum each ``BLOCK`` of source ``[N * BLOCK]`` int32 into sums ``[N]``: almost nothing is written."""
    _sum_kernel[sums.shape](source, sums, BLOCK, num_warps=8)
    return sums


@triton.jit
def _sum_kernel(source, sums, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0)
    tl.store(sums + block, tl.sum(tl.load(source + block.to(tl.int64) * SIZE + tl.arange(0, SIZE))))


def floors_us(config: Arch, batch: int, context: float, itemsize: int, ceiling: Ceiling) -> dict[str, float]:
    """Return µs by cause of a decode step for ``batch`` rows with ``context`` cached tokens each.

    Each is the larger of memory and arithmetic time. Weights are read once per step, each part's inputs are
    read and its outputs written once, all at read bandwidth, which no write exceeds; logits need not be
    written. Gate and up are multiplied before they are stored; a key shared by a group of query heads is read
    once; keys beyond the window are not read.
    """
    read = batch * min(context + 1, config.window or math.inf)
    return _floors(config, _Work(batch, batch, read, read), itemsize, ceiling)


def prefill_floors_us(
    config: Arch, prompts: float, tokens: float, itemsize: int, ceiling: Ceiling
) -> dict[str, float]:
    """Return µs by cause of a prefill of ``prompts`` prompts of ``tokens`` each, none of them cached.

    A token attends to itself and to earlier tokens in the window; only a prompt's last token needs the head.
    """
    seen = min(tokens, config.window or tokens)
    scores = prompts * (seen * (seen + 1) / 2 + (tokens - seen) * seen)
    return _floors(config, _Work(prompts * tokens, prompts, scores, prompts * tokens), itemsize, ceiling)


class _Work(NamedTuple):
    """Rows through the layers, rows through the head, query-key pairs, and keys read."""

    rows: float
    chosen: float
    scores: float
    keys: float


def _floors(config: Arch, work: _Work, itemsize: int, ceiling: Ceiling) -> dict[str, float]:
    c, f, layers, vocab = config.d_model, config.d_ff, config.n_layers, config.vocab_size
    heads, qkv, kv = config.attention_width, config.qkv_width, config.kv_bytes_per_token(itemsize)
    weights = sum(n * k for n, k in config.shapes.values())
    biases = sum(config.shapes[name][0] for name in config.biases)
    norm = c * (2 if config.norm.kind == "layer" else 1)
    elements = {
        "GEMM": layers * (weights + biases + work.rows * (qkv + heads + 3 * c + 2 * f)),
        "head": vocab * c + work.chosen * c,
        "norm": (2 * layers + 1) * (norm + 2 * work.rows * c),
        "elementwise": layers * work.rows * (config.up_width + f + 6 * c),
        "embedding": (3 if config.rope is None else 2) * work.rows * c,
        "attention": layers * work.rows * 2 * heads,
    }
    n_bytes: dict[str, float] = {cause: n * itemsize for cause, n in elements.items()}
    n_bytes["append"] = 2 * work.rows * kv
    n_bytes["attention"] += work.keys * kv
    n_bytes["layers"] = n_bytes["GEMM"] + n_bytes["attention"]  # the whole layer in one kernel
    flops = {
        "GEMM": 2 * work.rows * layers * weights,
        "head": 2 * work.chosen * vocab * c,
        "attention": 4 * work.scores * layers * heads,
    }
    return {
        cause: max(n / ceiling.bytes_per_us, flops.get(cause, 0) / ceiling.flops_per_us)
        for cause, n in n_bytes.items()
    }
