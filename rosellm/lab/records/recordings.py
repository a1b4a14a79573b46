"""The experiments behind the figures of the notebooks.

Most functions take the settings of a measurement and return the figures of the record that has their name.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from rosellm.bench import benchmark_kv_append
from rosellm.bench.workloads import ALL_WORKLOADS, MODEL_WORKLOADS, MODERN_MODEL, WORKLOADS, Workload
from rosellm.errors import RoseError, describe
from rosellm.lab.records import ablations as between_rungs, experiments, robustness
from rosellm.lab.records.bench import Bench, get_model, make_prompts, run_recipe
from rosellm.lab.records.experiment import Asked, Experiment, Record, in_parts, table
from rosellm.lab.records.floors import measure_ceilings
from rosellm.lab.records.ledger import (
    WARM_UP_STEPS,
    Ledger,
    drive,
    step_ledger,
    tokens_before_profile,
    tokens_needed,
)
from rosellm.lab.records.lengths import BATCHES, MEAN, TIMES, length_steps
from rosellm.lab.records.model_ledgers import workload_ledger
from rosellm.lab.records.runs import runnable
from rosellm.lab.records.step_time import STEP_WORKLOADS, figures_of, ladder_steps, step_shape
from rosellm.lab.records.trace import record_trace
from rosellm.lab.records.turns import each
from rosellm.models.checkpoint import SHIPPED
from rosellm.models.model import Transformer
from rosellm.roseinfer.recipe import BEFORE

TIMELINES = ("cuda_graph", "reused_index_buffers", "resident_step", "dependent_launch")
STEPS = 2  # of a timeline
APPENDED = 128, 256, 512, 1024, 2048  # tokens per call of the append microbenchmark


def counts(asked: Asked) -> dict:
    """Count kernels, copies, bytes and allocations of one decode step, by batch size and rung.

    The case "N mixed" has N prompts of unequal lengths.
    """
    model, size = asked.gpt, asked.size
    rungs = runnable(model.device, model.config)
    batches, tokens = size.batches(8, 64, 256), min(32, size.new_tokens)
    cases: dict[str, tuple[int, int | list[int]]] = {str(n): (n, 2) for n in batches}
    cases[f"{batches[-1]} mixed"] = batches[-1], [2, 8]

    def counted(rung: str, batch: int, lengths: int | list[int]) -> dict[str, Any]:
        prompts = make_prompts(batch, lengths, model.config.vocab_size)
        return experiments.count_step(run_recipe(model, rung, prompts, tokens).trace, model.config.n_layers)

    return {
        case: {rung: counted(rung, n, lengths) for rung in each(f"counts, batch {case}", rungs)}
        for case, (n, lengths) in cases.items()
    }


def equality(asked: Asked) -> dict:
    """Compare the tokens and logits of every rung with those of ``dense``.

    Uses the shipped model in fp32, fp16 and bf16.
    """
    size, lengths = asked.size, asked.size.contexts(1, 2, 5, 63, 64, 65, 130)
    batch, tokens = min(14, size.rows), min(64, size.new_tokens)
    figures = {}
    for dtype in each("equality", ("float32", "float16", "bfloat16")):
        model = get_model(SHIPPED, asked.device, dtype)
        rungs = runnable(model.device, model.config)
        figures[dtype] = experiments.equality(model, rungs, lengths, batch, tokens)
    return figures


def ceilings(asked: Asked) -> dict:
    """Measure the rates at which the GPU reads, copies and multiplies, on which lower bounds are based."""
    return measure_ceilings(torch.device(asked.device), asked.gpt.dtype)


def timeline(model: Transformer, rung: str, workload: Workload) -> dict[str, Any]:
    """Trace ``STEPS`` decode steps of ``rung`` and of the rung before it.

    workload: determines batch size and context, as in ``step_shape``.

    Steps are launched as by a scheduler.
    """
    batch, context = step_shape(workload)
    room = WARM_UP_STEPS + 2 * STEPS
    prompts = make_prompts(batch, max(1, context - room), model.config.vocab_size)
    figures: dict[str, Any] = {"batch": batch, "context": context}
    for name in (BEFORE[rung], rung):
        bench = Bench(model, name, prompts, room + 1)
        drive(bench, WARM_UP_STEPS)
        figures[name] = record_trace(partial(drive, bench, STEPS)).as_dict()
    return figures


def timelines(asked: Asked) -> dict:
    """Trace a few decode steps of each rung in ``TIMELINES`` and of the rung before it."""
    model, workload = asked.gpt, asked.workload("W1")
    drawn = [rung for rung in TIMELINES if rung in runnable(model.device, model.config)]
    return {rung: timeline(model, rung, workload) for rung in each("timelines", drawn)}


def autotune(asked: Asked) -> dict:
    """Time paged attention autotuned and in every fixed launch configuration, at several sizes."""
    model, size = asked.gpt, asked.size
    launches = [
        experiments.launch_costs(model, min(batch, size.rows), min(length, size.prompt))
        for batch, length in each("autotune", ((8, 128), (64, 256), (64, 960), (256, 64)))
    ]
    return {"launches": launches}


def bookkeeping(asked: Asked) -> Iterator[Record]:
    """Measure the nanoseconds of Python code per cache slot reserved, for two kinds of metadata."""
    batches = each("bookkeeping", (8, 256))
    figures = {str(batch): experiments.bookkeeping_cost(batch, 12, 128) for batch in batches}
    yield asked.record("bookkeeping", figures=figures)


def kv_append(asked: Asked) -> Iterator[Record]:
    """Run the microbenchmark of the kernel that appends keys and values to the cache."""
    sizes = ",".join(map(str, asked.size.batches(*APPENDED)))
    given = ["--device", asked.device, "--batch-sizes", sizes]
    yield benchmark_kv_append.measure(benchmark_kv_append.parse_options(given))


def ledger(asked: Asked) -> dict:
    """Make the ledger of every rung's decode step, at the batch sizes of four workloads.

    Sequences have about half of the workload's new tokens cached.
    """
    model = asked.gpt
    rungs = runnable(model.device, model.config)
    sized = [asked.workload(name) for name in STEP_WORKLOADS]
    context = {w.max_batch_size: w.max_new_tokens // 2 for w in sized}
    return {
        str(n): {rung: ledger_at(model, rung, n, tokens) for rung in each(f"ledger, batch {n}", rungs)}
        for n, tokens in context.items()
    }


def ledger_at(model: Transformer, rung: str, batch: int, context: int, steps: int = 8) -> dict[str, Any]:
    """Return the ledger of a decode step of ``batch`` sequences with about ``context`` cached tokens each."""
    length, room = max(1, context - tokens_before_profile(steps)), tokens_needed(steps) + 1
    prompts = make_prompts(batch, length, model.config.vocab_size)
    return step_ledger(Bench(model, rung, prompts, room), steps).as_dict()


def ledger_w6(asked: Asked) -> dict:
    """Make the ledger of a decode step of workload W6, the largest batch, on the best rung."""
    batch, context = step_shape(asked.workload("W6"))
    return {asked.best: ledger_at(asked.gpt, asked.best, batch, context + 1)}


def ledger_w8(asked: Asked) -> dict:
    """Make the ledgers of workloads with unequal requests: greedy, with a temperature, and filtered."""
    model, rung = asked.gpt, asked.best
    sized = {name: asked.workload(name) for name in ("W8", "W9", "W10")}
    return {
        name: workload_ledger(model, rung, sized[name]).as_dict() for name in each("ledger_w8", list(sized))
    }


def grid(asked: Asked) -> dict:
    """Time decode steps of the best rung over batch size and context.

    ``few``: up to 8 sequences, also on the rung ``split_kv``.
    """
    model, size, best = asked.gpt, asked.size, asked.best
    contexts, few = size.contexts(64, 256, 512, 1000), size.contexts(256, 512, 768, 1000)

    def rows(rung: str, batches: Sequence[int], contexts: list[int]) -> list[dict]:
        sizes = each(f"grid, {rung}, batch", size.batches(*batches))
        return [_grid_row(model, rung, n, context) for n in sizes for context in contexts]

    return {
        "rung": best,
        "rows": rows(best, [1, 4, 16, 64, 256, 1024], contexts),
        "few": {rung: rows(rung, [1, 2, 4, 8], few) for rung in (best, "split_kv")},
    }


def _grid_row(model: Transformer, rung: str, batch: int, context: int, steps: int = 12) -> dict[str, Any]:
    """Return the device µs of decode steps, their median, and the bytes of keys and values that a step reads.

    Steps are launched as far ahead of their results as the rung allows.
    """
    prompts = make_prompts(batch, context, model.config.vocab_size)
    bench = Bench(model, rung, prompts, steps + 2)
    if model.device.type == "cuda":
        _raise_clocks(bench, steps)
    steps_us = [seconds * 1e6 for seconds in bench.run_ahead(steps)]
    read = min(context + steps / 2, model.config.window or math.inf)
    kv_bytes = batch * read * model.config.kv_bytes_per_token(model.dtype.itemsize)
    times = {"step_us": median(steps_us[2:]), "steps_us": steps_us}
    return {"batch": batch, "context": context, **times, "kv_bytes": kv_bytes}


def _raise_clocks(bench: Bench, steps: int, seconds: float = 1.0) -> None:
    """Run decode steps for ``seconds``, so that the clocks of an idle GPU reach full speed."""
    end = perf_counter() + seconds
    while perf_counter() < end:
        bench.run_ahead(steps)
        bench.restart()


def lengths(asked: Asked, batch: int) -> dict:
    """Time decode steps with equal and unequal contexts of the same sum, attention whole and cut."""
    size, model = asked.size, asked.gpt
    rows, mean = min(batch, size.rows), min(MEAN, size.prompt // TIMES)
    return figures_of(rows, mean, length_steps(model, rows, mean, **size.effort))


FIRST_TOKENS = """
import sys
from rosellm import LLM, SamplingParams
model, load_format, device, rung = sys.argv[1:]
llm = LLM(model, rung=rung, device=device, load_format=load_format, max_batch_size=8)
llm.generate([[1]], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True), use_tqdm=False)
"""


def cold_start(asked: Asked) -> dict:
    """Time whole processes that build an engine for up to 8 sequences and generate two tokens.

    All graphs of the engine are captured first; the second token takes a decode step. Seconds are grouped by
    the cache of compiled Triton kernels:
    compiled anew: the cache is empty at the start.
    compiled before: the cache was filled by the process before.
    """
    command = [sys.executable, "-c", FIRST_TOKENS, asked.model, asked.load_format, asked.device, asked.best]
    seconds: dict[str, list[float]] = {"compiled anew": [], "compiled before": []}
    for _ in range(2):
        with TemporaryDirectory() as cache:
            for name in seconds:
                start = perf_counter()
                subprocess.run(command, env=os.environ | {"TRITON_CACHE_DIR": cache}, check=True)
                seconds[name].append(perf_counter() - start)
    return {"rung": asked.best, "seconds": seconds}


def kv_pressure(asked: Asked) -> dict:
    """Measure throughput with as many KV blocks as all requests need, and with a quarter of them."""
    return {
        name: robustness.kv_pressure(asked.gpt, asked.workload(name))
        for name in each("kv_pressure", ("W6", "W7"))
    }


def determinism(asked: Asked) -> dict:
    """Measure the cost of batch invariance, and how many logits change with the batch without it."""
    model, size = asked.gpt, asked.size
    batches = size.batches(1, 2, 8, 9, 16, 17, 32, 64, 65, 128, 129, 256)
    return {
        "cost": {
            name: robustness.determinism_cost(model, asked.workload(name))
            for name in each("determinism, cost", ("W0", "W1", "W2", "W3", "W6", "W7"))
        },
        "bits": {
            dtype: robustness.invariance(
                get_model(asked.model, asked.device, dtype, asked.load_format), batches
            )
            for dtype in each("determinism, bits", ("float16", "bfloat16", "float32"))
        },
    }


def steps(asked: Asked, workload: str, **effort: Any) -> dict:
    """Time a decode step on every rung that can run the model.

    workload: determines batch size and context, as in ``step_shape``.
    effort: keyword arguments of ``measure_steps``; by default those of the size.
    """
    rungs, sized = runnable(asked.where, asked.arch), asked.workload(workload)
    return ladder_steps(asked.gpt, rungs, sized, **effort or asked.size.effort)


def ledgers(asked: Asked) -> Iterator[Record]:
    """Make the ledgers of a modern model's workloads on the best rung.

    If a workload fails, the error is printed, the remaining workloads are measured, and ``RoseError`` is
    raised at the end.
    """
    failed: list[str] = []

    def account(name: str) -> dict[str, Any] | None:
        try:
            return workload_ledger(asked.gpt, asked.best, asked.workload(name)).as_dict()
        except Exception as error:  # kernel, profiler or memory errors need not affect the other ledgers
            failed.append(name)
            print(f"{name}: no ledger: {describe(error).splitlines()[0]}", flush=True)
            return None

    def told(name: str, figures: dict[str, Any]) -> str:
        ledger = Ledger.from_dict(figures)
        return f"{name}: {ledger.step_us:,.0f} µs. {ledger.cross_check}"

    parts = {name: partial(account, name) for name in asked["workloads"]}
    begun = asked.record("ledgers", model=asked.model, figures={})
    yield from in_parts(asked, begun, parts, told, order=list(ALL_WORKLOADS).index)
    if failed:
        raise RoseError(f"no ledger of {', '.join(failed)}; the lines above say why")


def ablations(asked: Asked, workload: str) -> dict:
    """Time the variants between a rung and the previous rung, for each rung in ``BETWEEN``."""
    model, sized = asked.gpt, asked.workload(workload)
    return {
        rung: between_rungs.ablation_steps(model, rung, sized, **asked.size.effort)
        for rung in each(f"ablations-{workload}", between_rungs.BETWEEN)
    }


def leave_one_out(asked: Asked, workload: str) -> dict:
    """Measure whole runs of the best recipe, and of variants that each revert one of its fields."""
    return between_rungs.leave_one_out(asked.gpt, asked.workload(workload), best=asked.best)


def _of_workloads(kind: Callable[..., dict], names: Sequence[str], **places: Any) -> list[Experiment]:
    return [
        table(f"{kind.__name__}-{name}", partial(kind, workload=name), workloads=[name], **places)
        for name in names
    ]


LEDGERS = ("D1", "D8", "D64", "L8K", "L32K", "PRE")
MODERN: dict[str, Any] = {"model": MODERN_MODEL, "own_folder": True}
EXPERIMENTS = [
    table("counts", counts),
    table("equality", equality, model=None),
    table("autotune", autotune, needs_gpu=True),
    table("ceilings", ceilings, needs_gpu=True),
    table("timelines", timelines, workloads=["W1"]),
    Experiment("bookkeeping", bookkeeping, model=None),
    Experiment("kv_append", kv_append, model=None),
    table("ledger", ledger, workloads=STEP_WORKLOADS),
    table("ledger_w6", ledger_w6, workloads=["W6"]),
    table("ledger_w8", ledger_w8, workloads=["W8"]),
    table("grid", grid),
    table("cold_start", cold_start),
    table("kv_pressure", kv_pressure, workloads=["W6", "W7"]),
    table("determinism", determinism, workloads=list(WORKLOADS)),
    *(table(f"lengths-{batch}", partial(lengths, batch=batch), needs_gpu=True) for batch in BATCHES),
    *_of_workloads(steps, STEP_WORKLOADS),
    *_of_workloads(ablations, STEP_WORKLOADS),
    *_of_workloads(leave_one_out, ("W1", "W2", "W3")),
    *(
        table(
            f"steps-{name}",
            partial(steps, workload=name, engines=1, seconds=0.2, turns=2),
            workloads=[name],
            **MODERN,
        )
        for name in MODEL_WORKLOADS
    ),
    Experiment("ledgers", ledgers, {"workloads": LEDGERS}, **MODERN),
]
