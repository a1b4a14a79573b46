"""Measure an engine's throughput with little KV memory, and the cost and effect of batch invariance."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from rosellm.bench.benchmark_scheduler import run_scheduler
from rosellm.bench.job import Job
from rosellm.bench.workloads import WORKLOADS, Workload
from rosellm.lab.records.bench import get_model, make_prompts
from rosellm.lab.records.experiment import Asked, table
from rosellm.lab.records.turns import each, runs_in_turns
from rosellm.models.model import Transformer
from rosellm.roseinfer.cache.kv_blocks import blocks_for
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import SamplingParams

BITS = {2: torch.int16, 4: torch.int32}


def whole_runs(workload: Workload, engines: dict[str, Engine], repeats: int) -> dict[str, dict[str, Any]]:
    """Run a workload on several engines in alternation, after a warm-up run of each.

    Returns engine's name → figures of every repeat, with medians and means, and the engine's KV blocks.
    """
    vocab_size = next(iter(engines.values())).config.vocab_size
    prompts = make_prompts(workload.num_requests, workload.prompt_tokens or 1, vocab_size)
    params = SamplingParams(temperature=0.0, max_tokens=workload.max_new_tokens, ignore_eos=True)

    def run(engine: Engine) -> dict[str, Any]:
        return run_scheduler(Job(engine, prompts, params))

    runs = runs_in_turns({name: partial(run, engine) for name, engine in engines.items()}, repeats)
    for name, own in runs.items():
        blocks, tok_s = engines[name].num_kv_blocks, own["medians"]["total_throughput_tok_s"]
        runs[name] = {"num_kv_blocks": blocks, "tok_s": tok_s, **own}
    return runs


def _blocks_each(workload: Workload, block_size: int = 64) -> int:
    """Return the number of KV blocks that one request of the workload needs."""
    return blocks_for((workload.prompt_tokens or 1) + workload.max_new_tokens - 1, block_size)


def tight_pool(
    model: Transformer, workload: Workload, share: float = 0.25, repeats: int = 3, **options: Any
) -> dict[str, Any]:
    """Run all requests at once with as many KV blocks as they need together, and with fewer.

    share: the reduced number of blocks as a fraction of the full number; at least enough for one request.
    options: further arguments of ``Engine``.
    """
    n, one = workload.num_requests, _blocks_each(workload, options.get("block_size", 64))
    pools = {"ample": n * one, "tight": max(one, int(n * one * share))}
    engines = {
        name: Engine(model, max_batch_size=n, num_kv_blocks=blocks, **options)
        for name, blocks in pools.items()
    }
    runs = whole_runs(workload, engines, repeats)
    sizes = {"prompt_tokens": workload.prompt_tokens, "new_tokens": workload.max_new_tokens, "share": share}
    return {"requests": n, **sizes, "ratio": runs["tight"]["tok_s"] / runs["ample"]["tok_s"], **runs}


def determinism_cost(model: Transformer, workload: Workload, repeats: int = 3) -> dict[str, Any]:
    """Measure a workload's throughput without and with ``deterministic``.

    ``cost`` is the fraction of throughput that the deterministic mode loses.
    """
    batch = workload.max_batch_size
    sizes: dict[str, Any] = {"max_batch_size": batch, "num_kv_blocks": batch * _blocks_each(workload)}
    engines = {
        name: Engine(model, deterministic=name == "invariant", **sizes) for name in ("fast", "invariant")
    }
    runs = whole_runs(workload, engines, repeats)
    return {"cost": 1 - runs["invariant"]["tok_s"] / runs["fast"]["tok_s"], **runs}


def final_logits(
    engine: Engine,
    prompt: list[int],
    new_tokens: int,
    other_prompts: list[list[int]] | None = None,
    chunk: int | None = None,
    preempted_after: int | None = None,
) -> Tensor:
    """Return the logits ``[V]`` from which the last of ``new_tokens`` greedy tokens was chosen.

    other_prompts: prompts of other requests in the batch.
    chunk: number of tokens per prefill chunk of the prompt; None prefills it whole.
    preempted_after: number of generated tokens after which the request is preempted and prefilled again; None
        for no preemption.
    """
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    others = [engine.make_sequence(other, params) for other in other_prompts or []]
    probe = engine.make_sequence(prompt, params)
    if others:
        engine.prefill(others)
    _prefill(engine, probe, chunk)
    while not probe.is_finished:
        if probe.n_output == preempted_after:
            preempted_after = None
            engine.release(probe)
            probe.num_cached_tokens = 0
            _prefill(engine, probe, chunk)
        else:
            engine.decode([probe, *(s for s in others if not s.is_finished)])
    logits = engine.step.last_logits()[0].clone()
    for sequence in (probe, *others):
        engine.release(sequence)
    return logits


def _prefill(engine: Engine, sequence: Sequence, chunk: int | None) -> None:
    while not engine.begin_prefill([sequence], None if chunk is None else [chunk]):
        pass
    for _ in engine.step.collect():
        pass


def invariance(
    model: Transformer, batches: list[int], prompt_tokens: int = 150, new_tokens: int = 24
) -> dict[str, dict[str, int]]:
    """Count how many logits of a request change bitwise when it is run in other ways than alone.

    batches: batch sizes in which the request is run.

    Returns mode ("fast", or "invariant" for ``deterministic``) → way in which the request is run → number of
    its final logits that differ from those when it runs alone.
    """
    prompts = make_prompts(max(batches), prompt_tokens, model.config.vocab_size)
    figures = {}
    for name in ("fast", "invariant"):
        options: dict[str, Any] = {"max_batch_size": max(batches), "deterministic": name == "invariant"}
        blocks = max(batches) * blocks_for(prompt_tokens + new_tokens, 64) + 8
        engine = Engine(model, num_kv_blocks=blocks, prefix_cache=False, **options)
        caching = Engine(model, num_kv_blocks=blocks, prefix_cache=True, warm_up=False, **options)
        alone = final_logits(engine, prompts[0], new_tokens)
        final_logits(caching, prompts[0], new_tokens)
        found = {f"{n} together": final_logits(engine, prompts[0], new_tokens, prompts[1:n]) for n in batches}
        found |= {
            "prompt in chunks of 64": final_logits(engine, prompts[0], new_tokens, chunk=64),
            "prefix from the cache": final_logits(caching, prompts[0], new_tokens),
            "preempted": final_logits(engine, prompts[0], new_tokens, preempted_after=new_tokens // 2),
        }
        figures[name] = {how: bits_changed(alone, logits) for how, logits in found.items()}
    return figures


def bits_changed(a: Tensor, b: Tensor) -> int:
    """Return how many elements of ``a`` and ``b``, of equal shape and dtype, differ in any bit."""
    kind = BITS[a.dtype.itemsize]
    return int((a.contiguous().view(kind) != b.contiguous().view(kind)).sum())


def kv_pressure(asked: Asked) -> dict:
    """Measure throughput with as many KV blocks as all requests need, and with a quarter of them."""
    names = each("kv_pressure", ("W6", "W7"))
    return {name: tight_pool(asked.gpt, asked.workload(name)) for name in names}


def determinism(asked: Asked) -> dict:
    """Measure the cost of batch invariance, and how many logits change with the batch without it."""
    batches = asked.size.batches(1, 2, 8, 9, 16, 17, 32, 64, 65, 128, 129, 256)
    return {
        "cost": {
            name: determinism_cost(asked.gpt, asked.workload(name))
            for name in each("determinism, cost", ("W0", "W1", "W2", "W3", "W6", "W7"))
        },
        "bits": {
            dtype: invariance(get_model(asked.model, asked.device, dtype, asked.load_format), batches)
            for dtype in each("determinism, bits", ("float16", "bfloat16", "float32"))
        },
    }


EXPERIMENTS = [
    table("kv_pressure", kv_pressure, workloads=["W6", "W7"]),
    table("determinism", determinism, workloads=list(WORKLOADS)),
]
