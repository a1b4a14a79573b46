"""Lower bounds on the time of each part of a decode step or prefill, from the part's bytes and FLOPs."""

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
    """The highest rates that a device sustains: bytes read, and floating-point operations, per µs."""

    bytes_per_us: float
    flops_per_us: float

    @classmethod
    def of(cls, measured: Mapping[str, list[float]]) -> Ceiling:
        """Return the best repeat of each rate.

        measured: the result of :func:`measure_ceilings`, or the figures of a device's record ``ceilings``.
        """
        return cls(max(measured["read_TB_s"]) * 1e6, max(measured["matmul_TFLOP_s"]) * 1e6)


@lru_cache(maxsize=8)
def measure_ceiling(device: torch.device, dtype: torch.dtype) -> Ceiling:
    """Return the best of :func:`measure_ceilings`, measured once per device and dtype."""
    return Ceiling.of(measure_ceilings(device, dtype))


def measure_ceilings(device: torch.device, dtype: torch.dtype, repeats: int = 5) -> dict[str, list[float]]:
    """Measure the rates that a GPU sustains; return the value of each repeat.

    read_TB_s: reading 1 GiB.
    copy_TB_s: copying 1 GiB; bytes read and bytes written both count.
    matmul_TFLOP_s: a GEMM of two 8192 × 8192 matrices of ``dtype``.
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
    """Read ``source`` and write almost nothing: sum each ``BLOCK`` elements into one element of ``sums``.

    source: ``[N * BLOCK]`` int32.
    sums: ``[N]`` int32, also returned.
    """
    _sum_kernel[sums.shape](source, sums, BLOCK, num_warps=8)
    return sums


@triton.jit
def _sum_kernel(source, sums, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0)
    tl.store(sums + block, tl.sum(tl.load(source + block.to(tl.int64) * SIZE + tl.arange(0, SIZE))))


def floors_us(config: Arch, batch: int, context: float, itemsize: int, ceiling: Ceiling) -> dict[str, float]:
    """Return lower bounds in µs by cause for a decode step.

    batch: number of sequences.
    context: cached tokens per sequence.
    itemsize: bytes per element of weights, activations and cache.

    Each bound is the larger of memory time and arithmetic time. Assumptions:
    - weights are read once per step;
    - the inputs of each part are read once and its outputs written once, all at the bandwidth of reads, which
      writes do not exceed;
    - logits are not written;
    - gate and up are multiplied before they are stored;
    - a key shared by a group of query heads is read once, and keys outside the window are not read.
    """
    read = batch * min(context + 1, config.window or math.inf)
    return _floors(config, _Work(batch, batch, read, read), itemsize, ceiling)


def prefill_floors_us(
    config: Arch, prompts: float, tokens: float, itemsize: int, ceiling: Ceiling
) -> dict[str, float]:
    """Return lower bounds in µs by cause for a prefill of ``prompts`` prompts of ``tokens`` uncached tokens.

    The assumptions of :func:`floors_us` apply. A token attends to itself and to earlier tokens in the window;
    only the last token of a prompt needs the head.
    """
    seen = min(tokens, config.window or tokens)
    scores = prompts * (seen * (seen + 1) / 2 + (tokens - seen) * seen)
    return _floors(config, _Work(prompts * tokens, prompts, scores, prompts * tokens), itemsize, ceiling)


class _Work(NamedTuple):
    """The amount of work in a step.

    rows: tokens that pass through the layers.
    chosen: tokens that pass through the head.
    scores: query-key pairs per head and layer.
    keys: tokens whose keys and values attention reads.
    """

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
