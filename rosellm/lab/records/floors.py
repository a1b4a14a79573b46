"""The least time that each part of a decode step can take on a device, from its bytes and its operations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from rosellm.models.config import ModelConfig
from rosellm.triton_or_none import triton


@dataclass(frozen=True)
class Ceiling:
    """The most that a device does: bytes moved and floating-point operations a µs."""

    bytes_per_us: float
    flops_per_us: float


@lru_cache(maxsize=8)
def measure_ceiling(device: torch.device, dtype: torch.dtype) -> Ceiling:
    """A GPU's, from a copy of 1 GiB and a product of two 8192 × 8192 matrices."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a = torch.randn(8192, 8192, device=device, dtype=dtype)
    out = torch.empty_like(a)
    copied, multiplied = (
        triton.testing.do_bench(run, warmup=10, rep=40, return_mode="min") * 1e3
        for run in (lambda: target.copy_(source), lambda: torch.mm(a, a, out=out))
    )
    return Ceiling(2 * source.numel() / copied, 2 * 8192**3 / multiplied)


def floors_us(
    config: ModelConfig, batch: int, context: float, itemsize: int, ceiling: Ceiling
) -> dict[str, float]:
    """µs by cause for ``batch`` rows with ``context`` cached tokens each: the longer of bytes and operations.

    Weights are read once a step, each part's inputs read and its outputs written once; logits need not be.
    """
    c, f, layers, vocab = config.d_model, config.d_ff, config.n_layers, config.vocab_size
    heads, qkv = config.n_heads * config.head_dim, config.qkv_width
    kv = config.kv_bytes_per_token(itemsize)
    weights = c * qkv + heads * c + 2 * c * f
    elements = {
        "GEMM": layers * (weights + qkv + 2 * c + f + batch * (qkv + heads + 3 * c + 2 * f)),
        "head": vocab * c + batch * c,
        "norm": (2 * layers + 1) * (2 * c + 2 * batch * c),
        "elementwise": layers * batch * (2 * f + 6 * c),
        "embedding": 3 * batch * c,
        "attention": layers * batch * 2 * heads,
    }
    n_bytes: dict[str, float] = {cause: n * itemsize for cause, n in elements.items()}
    n_bytes["append"] = 2 * batch * kv
    n_bytes["attention"] += batch * (context + 1) * kv
    n_bytes["layers"] = n_bytes["GEMM"] + n_bytes["attention"]  # all of them in one kernel
    flops = {
        "GEMM": 2 * batch * layers * weights,
        "head": 2 * batch * vocab * c,
        "attention": 4 * batch * layers * heads * (context + 1),
    }
    return {
        cause: max(n / ceiling.bytes_per_us, flops.get(cause, 0) / ceiling.flops_per_us)
        for cause, n in n_bytes.items()
    }
