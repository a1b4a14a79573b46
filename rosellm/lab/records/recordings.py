"""The experiments that ``measure`` records, by name, each at the size that its options select."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch
from tqdm import tqdm

from rosellm.bench.workloads import WORKLOADS, Workload
from rosellm.errors import RoseError
from rosellm.lab.records import experiments, robustness, step_records
from rosellm.lab.records.bench import get_model
from rosellm.lab.records.floors import measure_ceilings
from rosellm.lab.records.lengths import BATCHES, MEAN, TIMES, length_steps
from rosellm.lab.records.model_ledgers import workload_ledger
from rosellm.lab.records.rungs import runnable
from rosellm.lab.records.sizes import GRID_CONTEXTS, LEDGER_WORKLOADS, LONGEST_TUNED
from rosellm.lab.records.step_records import STEP_WORKLOADS
from rosellm.lab.records.timelines import TIMELINES, timeline
from rosellm.models.checkpoint import SHIPPED
from rosellm.models.loading import arch_of, resolve_device
from rosellm.models.model import Transformer
from rosellm.roseinfer.recipe import get_rung

NEEDS_GPU = ("autotune", "ceilings", *(f"lengths-{batch}" for batch in BATCHES))

T = TypeVar("T")


def each(name: str, parts: Iterable[T]) -> Iterator[T]:
    """Yield the parts of an experiment, with a progress bar."""
    with tqdm(list(parts), leave=False) as bar:
        for part in bar:
            bar.set_description(f"{name}: {part}")
            yield part


def counts(arguments: argparse.Namespace) -> dict:
    """Count kernels, copies, bytes and allocations of one decode step, by batch size and rung.

    "mixed": prompts of unequal lengths.
    """
    model, size = _model(arguments), arguments.size
    rungs = runnable(model.device, model.config)
    batches, tokens = size.batches(8, 64, 256), min(32, size.new_tokens)
    cases: dict[str, tuple[int, int | list[int]]] = {str(n): (n, 2) for n in batches}
    cases[f"{batches[-1]} mixed"] = batches[-1], [2, 8]
    return {
        case: _by_rung(f"counts, batch {case}", rungs, experiments.counted_rungs, model, n, tokens, lengths)
        for case, (n, lengths) in cases.items()
    }


def equality(arguments: argparse.Namespace) -> dict:
    """Compare every rung's tokens and logits with ``dense``, in fp32, fp16 and bf16, on the shipped model."""
    size, lengths = arguments.size, arguments.size.contexts(1, 2, 5, 63, 64, 65, 130)
    batch, tokens = min(14, size.rows), min(64, size.new_tokens)
    rungs = runnable(resolve_device(arguments.device), arch_of(SHIPPED))
    return {
        dtype: experiments.equality(
            get_model(SHIPPED, arguments.device, dtype), rungs, lengths, batch, tokens
        )
        for dtype in each("equality", ("float32", "float16", "bfloat16"))
    }


def ceilings(arguments: argparse.Namespace) -> dict:
    """Measure what the GPU sustains in reading, copying and multiplying, the basis of floors."""
    return measure_ceilings(torch.device(arguments.device), _model(arguments).dtype)


def timelines(arguments: argparse.Namespace) -> dict:
    """Trace a few decode steps of four rungs and of the rungs before them."""
    model, workload = _model(arguments), arguments.size.of(WORKLOADS["W1"])
    drawn = [rung for rung in TIMELINES if rung in runnable(model.device, model.config)]
    return {rung: timeline(model, rung, workload) for rung in each("timelines", drawn)}


def autotune(arguments: argparse.Namespace) -> dict:
    """Measure the cost of an autotuned launch against every fixed one."""
    model, size = _model(arguments), arguments.size
    launches = [
        experiments.launch_costs(model, min(batch, size.rows), min(length, size.prompt))
        for batch, length in each("autotune", ((8, 128), (64, 256), (64, LONGEST_TUNED), (256, 64)))
    ]
    return {"launches": launches}


def bookkeeping(arguments: argparse.Namespace) -> dict:
    """Measure nanoseconds of Python per reserved token."""
    return {
        str(batch): experiments.bookkeeping_cost(batch, 12, 128) for batch in each("bookkeeping", (8, 256))
    }


def ledger(arguments: argparse.Namespace) -> dict:
    """Account for a decode step's time, at the batch sizes of four workloads and half their context."""
    model = _model(arguments)
    rungs = runnable(model.device, model.config)
    sized = [arguments.size.of(WORKLOADS[name]) for name in LEDGER_WORKLOADS]
    context = {w.max_batch_size: w.max_new_tokens // 2 for w in sized}
    return {
        str(n): _by_rung(f"ledger, batch {n}", rungs, experiments.ledgers, model, n, tokens)
        for n, tokens in context.items()
    }


def ledger_w6(arguments: argparse.Namespace) -> dict:
    """Account for a step of the largest workload, on the best rung."""
    w = arguments.size.of(WORKLOADS["W6"])
    context = _prompt_length(w) + w.max_new_tokens // 2
    return experiments.ledgers(_model(arguments), [_best_rung(arguments)], w.max_batch_size, context)


def ledger_w8(arguments: argparse.Namespace) -> dict:
    """Account for unequal requests, greedy, with a temperature, and filtered, each at half its output."""
    model, rung = _model(arguments), _best_rung(arguments)
    sized = {name: arguments.size.of(WORKLOADS[name]) for name in ("W8", "W9", "W10")}
    return {
        name: workload_ledger(model, rung, sized[name]).as_dict() for name in each("ledger_w8", list(sized))
    }


def grid(arguments: argparse.Namespace) -> dict:
    """Time steps of the best rung over batch size and context; for few rows also with ``split_kv``."""
    model, size, best = _model(arguments), arguments.size, _best_rung(arguments)
    contexts, few = size.contexts(*GRID_CONTEXTS), size.contexts(256, 512, 768, 1000)

    def rows(rung: str, batches: Sequence[int], contexts: list[int]) -> list[dict]:
        made = (
            experiments.step_grid(model, rung, [n], contexts)
            for n in each(f"grid, {rung}, batch", size.batches(*batches))
        )
        return [row for part in made for row in part]

    return {
        "rung": best,
        "rows": rows(best, [1, 4, 16, 64, 256, 1024], contexts),
        "few": {rung: rows(rung, [1, 2, 4, 8], few) for rung in (best, "split_kv")},
    }


def lengths(arguments: argparse.Namespace, batch: int) -> dict:
    """Time steps with equal and unequal contexts of the same sum, rows whole and split."""
    size, model = arguments.size, _model(arguments)
    rows, mean = min(batch, size.rows), min(MEAN, size.prompt // TIMES)
    return step_records.figures_of(rows, mean, length_steps(model, rows, mean, **size.effort))


def cold_start(arguments: argparse.Namespace) -> dict:
    """Measure the time to the first tokens of a fresh process."""
    best = _best_rung(arguments)
    seconds = experiments.cold_start(arguments.model, arguments.load_format, arguments.device, best)
    return {"rung": best, "seconds": seconds}


def kv_pressure(arguments: argparse.Namespace) -> dict:
    """Measure throughput with a quarter of the KV blocks that all requests need, and with all of them."""
    sized = (arguments.size.of(WORKLOADS[name]) for name in each("kv_pressure", ("W6", "W7")))
    return {
        w.id: robustness.kv_pressure(_model(arguments), w.num_requests, _prompt_length(w), w.max_new_tokens)
        for w in sized
    }


def determinism(arguments: argparse.Namespace) -> dict:
    """Measure the cost of batch invariance, and what changes without it."""
    model, size = _model(arguments), arguments.size
    batches = size.batches(1, 2, 8, 9, 16, 17, 32, 64, 65, 128, 129, 256)
    return {
        "cost": {
            name: robustness.determinism_cost(model, size.of(WORKLOADS[name]))
            for name in each("determinism, cost", ("W0", "W1", "W2", "W3", "W6", "W7"))
        },
        "bits": {
            dtype: robustness.invariance(
                get_model(arguments.model, arguments.device, dtype, arguments.load_format), batches
            )
            for dtype in each("determinism, bits", ("float16", "bfloat16", "float32"))
        },
    }


def steps(arguments: argparse.Namespace, workload: str) -> dict:
    """Time a decode step on every rung, at a workload's batch size and mid-run context."""
    model, sized = _model(arguments), arguments.size.of(WORKLOADS[workload])
    rungs = runnable(model.device, model.config)
    return step_records.ladder_steps(model, rungs, sized, **arguments.size.effort)


def ablations(arguments: argparse.Namespace, workload: str) -> dict:
    """Time the variants between two rungs where one field changes several things."""
    model, sized = _model(arguments), arguments.size.of(WORKLOADS[workload])
    return {
        rung: step_records.ablation_steps(model, rung, sized, **arguments.size.effort)
        for rung in each(f"ablations-{workload}", step_records.ABLATED)
    }


def leave_one_out(arguments: argparse.Namespace, workload: str) -> dict:
    """Measure whole runs with each field of the best recipe alone reverted."""
    model, sized = _model(arguments), arguments.size.of(WORKLOADS[workload])
    seconds = arguments.size.effort["seconds"]
    return step_records.leave_one_out(model, sized, seconds=seconds, best=_best_rung(arguments))


def _of_workloads(
    experiment: Callable[..., dict], workloads: Iterable[str]
) -> dict[str, Callable[[argparse.Namespace], dict]]:
    return {f"{experiment.__name__}-{w}": partial(experiment, workload=w) for w in workloads}


def measured(name: str, arguments: argparse.Namespace) -> dict[str, str]:
    """Return the model and size of an experiment for its record; {} for pure-Python bookkeeping."""
    if name == "bookkeeping":
        return {}
    model = SHIPPED if name == "equality" else arguments.model
    return {"model": model, "size": arguments.size.name}


EXPERIMENTS: dict[str, Callable[[argparse.Namespace], dict]] = {
    "counts": counts,
    "equality": equality,
    "autotune": autotune,
    "ceilings": ceilings,
    "timelines": timelines,
    "bookkeeping": bookkeeping,
    "ledger": ledger,
    "ledger_w6": ledger_w6,
    "ledger_w8": ledger_w8,
    "grid": grid,
    "cold_start": cold_start,
    "kv_pressure": kv_pressure,
    "determinism": determinism,
    **{f"lengths-{batch}": partial(lengths, batch=batch) for batch in BATCHES},
    **_of_workloads(steps, STEP_WORKLOADS),
    **_of_workloads(ablations, STEP_WORKLOADS),
    **_of_workloads(leave_one_out, step_records.WHOLE_RUNS),
}


def _by_rung(
    name: str, rungs: list[str], experiment: Callable[..., dict], model: Transformer, *sizes: object
) -> dict[str, dict]:
    """Run an experiment rung by rung, so that progress is visible."""
    return {rung: experiment(model, [rung], *sizes)[rung] for rung in each(name, rungs)}


def _best_rung(arguments: argparse.Namespace) -> str:
    return get_rung(None, resolve_device(arguments.device))


def _prompt_length(workload: Workload) -> int:
    if workload.prompt_tokens is None:
        raise RoseError(f"workload {workload.id} has prompts of text; name one of random token ids")
    return workload.prompt_tokens


def _model(arguments: argparse.Namespace) -> Transformer:
    return get_model(arguments.model, arguments.device, "auto", arguments.load_format)
