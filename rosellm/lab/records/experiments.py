"""Measurements that notebooks run live at small sizes, and that ``measure`` records on a GPU at full size.

Each takes a model and sizes, and returns a plain dict that a record stores unchanged.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from rosellm.lab.records.bench import (
    Bench,
    compare_logits,
    decode_tokens,
    first_difference,
    forced_logits,
    make_prompts,
    run_recipe,
    share_equal,
)
from rosellm.lab.records.ledger import step_ledger, tokens_before_profile, tokens_needed
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
    """Count what one decode step launched, copied and allocated.

    On a CPU "kernels" are operators called from Python, and nothing is copied.
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
        "range_us": host_time(trace),
    }


def host_time(trace: Trace) -> dict[str, float]:
    """Return the host's microseconds in each part of the step, all inflated by the profiler."""
    parts = {e.name.rpartition(".")[2]: e.duration for e in trace.ranges() if e.name != STEP_RANGE}
    return parts


def counted_rungs(
    model: Transformer,
    rungs: list[str],
    batch: int,
    new_tokens: int = 16,
    lengths: int | list[int] = 2,
    gate_from: int | None = None,
) -> dict[str, dict]:
    """Return each rung's counted step at one batch size; prompts cycle through ``lengths``."""
    prompts = make_prompts(batch, lengths, model.config.vocab_size)
    figures = {}
    for rung in rungs:
        run = run_recipe(model, rung, prompts, new_tokens, gate_from=gate_from)
        figures[rung] = count_step(run.trace, model.config.n_layers)
    return figures


def equality(
    model: Transformer, rungs: list[str], lengths: list[int], batch: int, new_tokens: int
) -> dict[str, dict]:
    """Compare every rung with the first: tokens of free runs, and logits when fed the same tokens.

    The smallest gap between the two best logits shows how close the reference's choices were.
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
        figures[rung] = {
            **compare_logits(expected, logits),
            "tokens_equal": tokens == reference,
            "share_of_tokens_equal": share_equal(tokens, reference),
            "first_difference": (parted := first_difference(expected, reference, tokens)),
            "gap_at_first_difference": parted and parted["logit_gap"],
            "smallest_gap_of_reference": (best[..., 0] - best[..., 1]).min().item(),
            "distinct_tokens_of_reference": len({t for row in reference for t in row}),
        }
    return figures


def attention_operands(model: Transformer, batch: int, context: int, block_size: int = 64) -> dict[str, Any]:
    """Return random operands of ``paged_attention_decode`` in the model's shape.

    context: cached tokens per row.
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
    """Time paged attention in every launch configuration, fixed and autotuned: device and host launch time.

    Needs a GPU.
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


def device_us(run: Callable[[], object], calls: int = 20) -> float:
    """Return device µs per call, from replays of a CUDA graph of ``calls`` calls: no launch gaps."""
    run()
    torch.cuda.synchronize()
    return (
        triton.testing.do_bench_cudagraph(lambda: [run() for _ in range(calls)], rep=50, return_mode="median")
        * 1e3
        / calls
    )


def _launch_us(run: Callable[[], object], calls: int) -> list[float]:
    """Return host microseconds per call, five times; ``calls`` must not fill the device's queue."""
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
    """Return nanoseconds of Python to reserve a token's slot in a layer, per repeat, by kind of metadata."""
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


def ledgers(
    model: Transformer, rungs: list[str], batch: int, context: int, steps: int = 8
) -> dict[str, dict[str, Any]]:
    """Return each rung's ledger of a step of ``batch`` rows with about ``context`` cached tokens each."""
    length, room = max(1, context - tokens_before_profile(steps)), tokens_needed(steps) + 1
    prompts = make_prompts(batch, length, model.config.vocab_size)
    return {rung: step_ledger(Bench(model, rung, prompts, room), steps).as_dict() for rung in rungs}


def step_grid(
    model: Transformer, rung: str, batches: list[int], contexts: list[int], steps: int = 12
) -> list[dict[str, Any]]:
    """Return median device µs per decode step for each batch size and cached context, and KV bytes read.

    Steps run as in a scheduler, as many ahead as the rung allows.
    """
    rows: list[dict[str, Any]] = []
    for batch in batches:
        for context in contexts:
            prompts = make_prompts(batch, context, model.config.vocab_size)
            bench = Bench(model, rung, prompts, steps + 2)
            if not rows and model.device.type == "cuda":
                _raise_clocks(bench, steps)
            seconds = bench.run_ahead(steps)
            read = min(context + steps / 2, model.config.window or math.inf)
            kv_bytes = batch * read * model.config.kv_bytes_per_token(model.dtype.itemsize)
            rows.append(
                {
                    "batch": batch,
                    "context": context,
                    "step_us": median(seconds[2:]) * 1e6,
                    "steps_us": [s * 1e6 for s in seconds],
                    "kv_bytes": kv_bytes,
                }
            )
    return rows


def _raise_clocks(bench: Bench, steps: int, seconds: float = 1.0) -> None:
    """Run steps until the clocks of an idle GPU are at full speed."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        bench.run_ahead(steps)
        bench.restart()


FIRST_TOKENS = """
import sys
from rosellm import LLM, SamplingParams
model, load_format, device, rung = sys.argv[1:]
llm = LLM(model, rung=rung, device=device, load_format=load_format, max_batch_size=8)
llm.generate([[1]], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True), use_tqdm=False)
"""


def cold_start(
    model: str, load_format: str, device: str, rung: str, repeats: int = 2
) -> dict[str, list[float]]:
    """Return seconds of processes that generate two tokens, from start to end, by state of the kernel cache.

    The second token takes a decode step; all graphs of the engine, for up to 8 sequences, are captured first.
    "compiled anew": with an empty cache of compiled Triton kernels; "compiled before": with the cache filled
    by that run.
    """
    seconds: dict[str, list[float]] = {"compiled anew": [], "compiled before": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            for name in seconds:
                start = time.perf_counter()
                subprocess.run(
                    [sys.executable, "-c", FIRST_TOKENS, model, load_format, device, rung],
                    env=os.environ | {"TRITON_CACHE_DIR": cache},
                    check=True,
                )
                seconds[name].append(time.perf_counter() - start)
    return seconds
