"""Time paged attention autotuned and in every fixed launch configuration."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from rosellm.lab.records.experiment import Asked, table
from rosellm.lab.records.turns import each
from rosellm.models.model import Transformer
from rosellm.rosetrainer import paged_attention as paged
from rosellm.triton_or_none import triton


def attention_operands(model: Transformer, batch: int, context: int, block_size: int = 64) -> dict[str, Any]:
    """Return random operands of ``paged_attention_decode`` in the model's shape.

    batch: number of sequences.
    context: cached tokens per sequence.
    """
    c, device, dtype = model.config, model.device, model.dtype
    per_sequence = -(-c.n_positions // block_size)
    used = -(-context // block_size)
    generator = torch.Generator(device=device).manual_seed(0)
    normal: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
    cache_shape = (batch * used, c.n_kv_heads, block_size, c.head_dim)
    table = torch.zeros(batch, per_sequence, dtype=torch.int32, device=device)
    table[:, :used] = torch.randperm(batch * used, generator=generator, device=device).view(batch, used)
    return {
        "q": torch.randn(batch, c.n_heads, c.head_dim, **normal),
        "k_new": torch.randn(batch, c.n_kv_heads, c.head_dim, **normal),
        "v_new": torch.randn(batch, c.n_kv_heads, c.head_dim, **normal),
        "k_cache_layer": torch.randn(cache_shape, **normal),
        "v_cache_layer": torch.randn(cache_shape, **normal),
        "block_table": table,
        "context_lens": torch.full((batch,), context, dtype=torch.int32, device=device),
        "scale": c.scale,
    }


def launch_costs(model: Transformer, batch: int, context: int, calls: int = 200) -> dict[str, Any]:
    """Time paged attention in every fixed launch configuration and autotuned; needs a GPU.

    calls: launches per repeat in the measurement of host time.

    Device times are µs per call; launch times are the host's µs per call, of five repeats.
    """
    operands = attention_operands(model, batch, context)
    tuned = paged.make_autotuned_paged_attention_decode()
    start = time.perf_counter()
    tuned(**operands)
    torch.cuda.synchronize()
    tuning_s = time.perf_counter() - start
    fixed = {choice: paged.make_fixed_paged_attention_decode(*choice) for choice in paged.AUTOTUNE_CHOICES}
    default = paged.make_fixed_paged_attention_decode()
    best = next(iter(tuned.tuner.cache.values()))
    return {
        "batch": batch,
        "context": context,
        "tuning_s": tuning_s,
        "chosen": [best.num_warps, best.num_stages],
        "device_us": {
            f"{w} warps, {s} stages": device_us(partial(f, **operands)) for (w, s), f in fixed.items()
        },
        "default_device_us": device_us(lambda: default(**operands)),
        "fixed_launch_us": _launch_us(lambda: default(**operands), calls),
        "autotuned_launch_us": _launch_us(lambda: tuned(**operands), calls),
    }


def device_us(run: Callable[[], object]) -> float:
    """Return device µs per call, measured by replaying a CUDA graph of many calls, without launch gaps."""
    return triton.testing.do_bench_cudagraph(run, rep=50, return_mode="median") * 1e3


def _launch_us(run: Callable[[], object], calls: int) -> list[float]:
    """Return the host's µs per call of five repeats; ``calls`` launches must fit into the device's queue."""
    repeats = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        repeats.append((time.perf_counter() - start) / calls * 1e6)
    return repeats


def autotune(asked: Asked) -> dict:
    """Time paged attention autotuned and in every fixed launch configuration, at several sizes."""
    model, size = asked.gpt, asked.size
    launches = [
        launch_costs(model, min(batch, size.rows), min(length, size.prompt))
        for batch, length in each("autotune", ((8, 128), (64, 256), (64, 960), (256, 64)))
    ]
    return {"launches": launches}


EXPERIMENTS = [table("autotune", autotune, needs_gpu=True)]
