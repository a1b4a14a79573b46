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

BLOCK_SIZE, CALLS = 64, 200  # launches per repeat of a measurement of host time


def attention_operands(model: Transformer, batch: int, context: int) -> dict[str, Any]:
    """Return random operands of ``paged_attention_decode`` in the model's shape.

    batch: number of sequences.
    context: cached tokens per sequence.
    """
    c, device, dtype = model.config, model.device, model.dtype
    per_sequence = -(-c.n_positions // BLOCK_SIZE)
    used = -(-context // BLOCK_SIZE)
    generator = torch.Generator(device=device).manual_seed(0)
    normal: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
    cache_shape = (batch * used, c.n_kv_heads, BLOCK_SIZE, c.head_dim)
    blocks = torch.zeros(batch, per_sequence, dtype=torch.int32, device=device)
    blocks[:, :used] = torch.randperm(batch * used, generator=generator, device=device).view(batch, used)
    return {
        "q": torch.randn(batch, c.n_heads, c.head_dim, **normal),
        "k_new": torch.randn(batch, c.n_kv_heads, c.head_dim, **normal),
        "v_new": torch.randn(batch, c.n_kv_heads, c.head_dim, **normal),
        "k_cache_layer": torch.randn(cache_shape, **normal),
        "v_cache_layer": torch.randn(cache_shape, **normal),
        "block_table": blocks,
        "context_lens": torch.full((batch,), context, dtype=torch.int32, device=device),
        "scale": c.scale,
    }


def launch_costs(model: Transformer, batch: int, context: int) -> dict[str, Any]:
    """Time paged attention in every fixed launch configuration and autotuned; needs a GPU.

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
        "fixed_launch_us": _launch_us(lambda: default(**operands)),
        "autotuned_launch_us": _launch_us(lambda: tuned(**operands)),
    }


def device_us(run: Callable[[], object]) -> float:
    """Return device µs per call, measured by replaying a CUDA graph of many calls, without launch gaps."""
    return triton.testing.do_bench_cudagraph(run, rep=50, return_mode="median") * 1e3


def _launch_us(run: Callable[[], object]) -> list[float]:
    """Return the host's µs per call of five repeats; ``CALLS`` launches must fit into the device's queue."""
    repeats = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            run()
        repeats.append((time.perf_counter() - start) / CALLS * 1e6)
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
