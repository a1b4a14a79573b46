"""Measurements that notebooks run at small sizes, and that ``measure`` records on a GPU at full size.

Each returns a plain dict that a record stores unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from rosellm.lab.records.bench import decode_tokens, first_difference, forced_logits, make_prompts
from rosellm.lab.records.trace import Trace
from rosellm.ladder.dense import H2D_RANGE
from rosellm.ladder.pools import SlotPool, TuplePool
from rosellm.models.model import Transformer
from rosellm.roseinfer.steps.step import STEP_RANGE
from rosellm.rosetrainer import paged_attention as paged
from rosellm.triton_or_none import triton

POOLS = {"tuple": TuplePool, "slots": SlotPool}
APPEND_RANGE = f"{STEP_RANGE}.kv_append"


def count_step(trace: Trace, n_layers: int) -> dict[str, Any]:
    """Count what one profiled decode step launched, copied and allocated.

    On a CPU, "kernels" are operators called from Python, and nothing is copied. ``range_us`` maps each part
    of the step to the host's µs in it, which the profiler inflates.
    """
    tables, append = trace.within(H2D_RANGE), trace.within(APPEND_RANGE)
    return {
        "kernels": trace.kernels,
        "gpu_time_us": trace.gpu_time(),
        "host_to_device_copies": len(trace.host_to_device),
        "host_to_device_bytes": sum(e.n_bytes for e in trace.host_to_device),
        "table_copies": len(tables.host_to_device),
        "table_bytes": sum(e.n_bytes for e in tables.host_to_device),
        "append_kernels_a_layer": append.kernels / n_layers,
        "append_copies_a_layer": len(append.host_to_device) / n_layers,
        "allocations": trace.allocations,
        "allocated_bytes": trace.allocated_bytes,
        "range_us": {e.name.rpartition(".")[2]: e.duration for e in trace.ranges() if e.name != STEP_RANGE},
    }


def equality(
    model: Transformer, rungs: list[str], lengths: list[int], batch: int, new_tokens: int
) -> dict[str, dict]:
    """Compare every rung with the first of ``rungs``, the reference.

    lengths: prompt lengths, through which the prompts cycle.
    batch: number of prompts.
    new_tokens: tokens generated per prompt.

    Returns rung → figures. Tokens are those that the rung generates by itself; logits are compared while it
    is fed the reference's tokens. ``max_logit_difference`` is to be judged against ``logit_deviation``, the
    standard deviation of the reference's logits. ``smallest_gap_of_reference`` is the smallest difference
    between the two best logits of any of the reference's choices.
    """
    prompts = make_prompts(batch, lengths, model.config.vocab_size, seed=1)
    options = {"gate_from": 1}
    reference = decode_tokens(model, rungs[0], prompts, new_tokens, **options)
    expected = forced_logits(model, rungs[0], prompts, reference, **options)
    best = expected.topk(2, dim=-1).values
    figures = {}
    for rung in rungs:
        tokens = decode_tokens(model, rung, prompts, new_tokens, **options)
        logits = forced_logits(model, rung, prompts, reference, **options)
        same = np.equal(tokens, reference)
        figures[rung] = {
            "max_logit_difference": (expected - logits).abs().max().item(),
            "logit_deviation": expected.std().item(),
            "share_of_argmax_equal": (expected.argmax(-1) == logits.argmax(-1)).float().mean().item(),
            "tokens_equal": bool(same.all()),
            "share_of_tokens_equal": float(same.mean()),
            "first_difference": (parted := first_difference(expected, reference, tokens)),
            "gap_at_first_difference": parted and parted["logit_gap"],
            "smallest_gap_of_reference": (best[..., 0] - best[..., 1]).min().item(),
            "distinct_tokens_of_reference": len({t for row in reference for t in row}),
        }
    return figures


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


def bookkeeping_cost(
    batch: int, layers: int, steps: int, block_size: int = 64, repeats: int = 5
) -> dict[str, list[float]]:
    """Time the Python code that reserves the cache slot of a token in one layer.

    batch: number of sequences.
    layers: number of layers.
    steps: tokens to reserve per sequence and layer.
    repeats: measurements of each kind of pool.

    Returns kind of pool → nanoseconds per token and layer, for each repeat.
    """
    return {
        name: [_reserve_ns(kind, batch, layers, steps, block_size) for _ in range(repeats)]
        for name, kind in POOLS.items()
    }


def _reserve_ns(kind: type[TuplePool], batch: int, layers: int, steps: int, block_size: int) -> float:
    blocks = -(-steps // block_size) * batch
    pools = [kind(layer, blocks, block_size) for layer in range(layers)]
    tables: list[list[list[int]]] = [[[] for _ in range(batch)] for _ in range(layers)]
    start = time.perf_counter_ns()
    for _ in range(steps):
        for layer in range(layers):
            pools[layer].reserve_tokens(tables[layer])
    return (time.perf_counter_ns() - start) / (steps * layers * batch)
