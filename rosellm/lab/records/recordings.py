"""The experiments behind the figures of the notebooks.

Most functions take the settings of a measurement and return the figures of the record that has their name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from rosellm.bench import benchmark_kv_append
from rosellm.bench.workloads import ALL_WORKLOADS, MODEL_WORKLOADS, MODERN_MODEL, Workload
from rosellm.errors import RoseError, describe
from rosellm.lab.records import ablations as between_rungs
from rosellm.lab.records.bench import Bench, equality, get_model, make_prompts, run_recipe
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
from rosellm.lab.records.model_ledgers import workload_ledger
from rosellm.lab.records.runs import runnable
from rosellm.lab.records.step_time import STEP_WORKLOADS, ladder_steps, step_shape
from rosellm.lab.records.trace import Trace, record_trace
from rosellm.lab.records.turns import each
from rosellm.ladder.dense import H2D_RANGE
from rosellm.models.checkpoint import SHIPPED
from rosellm.models.model import Transformer
from rosellm.roseinfer.recipe import BEFORE
from rosellm.roseinfer.steps.step import STEP_RANGE

APPEND_RANGE = f"{STEP_RANGE}.kv_append"
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
        return count_step(run_recipe(model, rung, prompts, tokens).trace, model.config.n_layers)

    return {
        case: {rung: counted(rung, n, lengths) for rung in each(f"counts, batch {case}", rungs)}
        for case, (n, lengths) in cases.items()
    }


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


def tokens_and_logits(asked: Asked) -> dict:
    """Compare the tokens and logits of every rung with those of ``dense``.

    Uses the shipped model in fp32, fp16 and bf16.
    """
    size, lengths = asked.size, asked.size.contexts(1, 2, 5, 63, 64, 65, 130)
    batch, tokens = min(14, size.rows), min(64, size.new_tokens)
    figures = {}
    for dtype in each("equality", ("float32", "float16", "bfloat16")):
        model = get_model(SHIPPED, asked.device, dtype)
        rungs = runnable(model.device, model.config)
        figures[dtype] = equality(model, rungs, lengths, batch, tokens)
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


def ledger_w8(asked: Asked) -> dict:
    """Make the ledgers of workloads with unequal requests: greedy, with a temperature, and filtered."""
    model, rung = asked.gpt, asked.best
    sized = {name: asked.workload(name) for name in ("W8", "W9", "W10")}
    return {
        name: workload_ledger(model, rung, sized[name]).as_dict() for name in each("ledger_w8", list(sized))
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
    table("equality", tokens_and_logits, model=None),
    table("ceilings", ceilings, needs_gpu=True),
    table("timelines", timelines, workloads=["W1"]),
    Experiment("kv_append", kv_append, model=None),
    table("ledger", ledger, workloads=STEP_WORKLOADS),
    table("ledger_w8", ledger_w8, workloads=["W8"]),
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
