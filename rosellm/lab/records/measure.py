"""Makes the committed records of a GPU: ``python -m rosellm.lab.records.measure --output FOLDER``.

Every workload on every rung through the benchmark commands themselves, then the counted, compared and
microbenchmarked figures that the notebooks draw. One JSON file each; a run that is cut off has lost only the
file it was at. On a CPU everything is small: the shipped model, few rows, few tokens.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

from rosellm.command_line import OneLineParser, command, whole_number
from rosellm.errors import PromptError, RecipeError, RoseError
from rosellm.lab.records import experiments, robustness, step_records
from rosellm.lab.records.bench import get_model
from rosellm.lab.records.sizes import (
    CONTEXTS,
    GRID_CONTEXTS,
    LEDGER_WORKLOADS,
    LONGEST_TUNED,
    SIZES,
    positions_needed,
)
from rosellm.lab.records.step_records import STEP_WORKLOADS
from rosellm.models.loading import LOAD_FORMATS, load_parts, resolve_device
from rosellm.models.model import GPT
from rosellm.models.weights import SHIPPED
from rosellm.roseinfer import benchmark_kv_append, benchmark_scheduler, benchmark_streaming
from rosellm.roseinfer.bench.job import check_positions
from rosellm.roseinfer.bench.prompts import encode_prompts, make_prompts
from rosellm.roseinfer.bench.record import new_record, write_record
from rosellm.roseinfer.bench.workloads import MODEL, WORKLOADS, Workload
from rosellm.roseinfer.recipe import LADDER, check_launch, get_rung

BENCHMARKS = {"scheduler": benchmark_scheduler.BENCHMARK, "streaming": benchmark_streaming.BENCHMARK}
KV_APPEND, NEEDS_GPU = "kv_append", ("autotune",)

T = TypeVar("T")


def each(name: str, parts: Iterable[T]) -> Iterator[T]:
    """The parts of an experiment, with a line of progress."""
    with tqdm(list(parts), leave=False) as bar:
        for part in bar:
            bar.set_description(f"{name}: {part}")
            yield part


def benchmark_arguments(name: str, rung: str, arguments: argparse.Namespace) -> list[str]:
    """The options of a workload's benchmark command."""
    whole, sized = WORKLOADS[name].flags(), arguments.size.of(WORKLOADS[name]).flags()
    smaller = {key: value for key, value in sized.items() if value != whole[key]}
    options = {f"--{key.replace('_', '-')}": value for key, value in smaller.items()} | {
        "--workload": name,
        "--rung": rung,
        "--hf-model-id": arguments.model,
        "--load-format": arguments.load_format,
        "--device": arguments.device,
        "--warmup-runs": 1,
        "--repeat-runs": arguments.repeats,
    }
    return [str(text) for pair in options.items() for text in pair]


def measure_workload(workload: str, rung: str, arguments: argparse.Namespace) -> None:
    """One benchmark command, its record kept as ``WORKLOAD-RUNG.json``."""
    benchmark, target = BENCHMARKS[WORKLOADS[workload].form], arguments.output / f"{workload}-{rung}.json"
    status = benchmark.main([*benchmark_arguments(workload, rung, arguments), "--json", str(target)])
    if status:  # the benchmark has told why
        raise SystemExit(status)


def counts(arguments: argparse.Namespace) -> dict:
    """Kernels, copies, bytes and allocations of one decode step, by batch size and rung.

    "mixed": prompts of unequal lengths.
    """
    model, size, rungs = _model(arguments), arguments.size, _runnable(arguments)
    batches, tokens = size.batches(8, 64, 256), min(32, size.new_tokens)
    cases: dict[str, tuple[int, int | list[int]]] = {str(n): (n, 2) for n in batches}
    cases[f"{batches[-1]} mixed"] = batches[-1], [2, 8]
    return {
        case: _by_rung(f"counts, batch {case}", rungs, experiments.counted_rungs, model, n, tokens, lengths)
        for case, (n, lengths) in cases.items()
    }


def equality(arguments: argparse.Namespace) -> dict:
    """Tokens and logits of every rung against ``dense``, in fp32, fp16 and bf16, on the shipped model."""
    size, lengths = arguments.size, arguments.size.contexts(1, 2, 5, 63, 64, 65, 130)
    batch, tokens = min(14, size.rows), min(64, size.new_tokens)
    return {
        dtype: experiments.equality(
            get_model(SHIPPED, arguments.device, dtype), _runnable(arguments), lengths, batch, tokens
        )
        for dtype in each("equality", ("float32", "float16", "bfloat16"))
    }


def context(arguments: argparse.Namespace) -> dict:
    """Step time against the cached context."""
    rungs, size = ["dense", "paged", "no_mask", "reused_index_buffers"], arguments.size
    contexts = size.contexts(*CONTEXTS)
    return {
        str(batch): experiments.step_by_context(_model(arguments), rungs, batch, contexts)
        for batch in each("context, batch", size.batches(8, 64))
    }


def autotune(arguments: argparse.Namespace) -> dict:
    """What an autotuned launch costs and what tuning beforehand brings."""
    model, size = _model(arguments), arguments.size
    launches = [
        experiments.launch_costs(model, min(batch, size.rows), min(length, size.prompt))
        for batch, length in each("autotune", ((8, 128), (64, 256), (64, LONGEST_TUNED), (256, 64)))
    ]
    warps, stages = launches[1]["chosen"]
    rows, context, steps = min(64, size.rows), min(256, size.prompt), min(64, size.new_tokens)
    return {
        "launches": launches,
        "step_ms": experiments.offline_tuned_step_ms(model, rows, context, steps, warps, stages),
    }


def bookkeeping(arguments: argparse.Namespace) -> dict:
    """Nanoseconds of Python a reserved token."""
    return {
        str(batch): experiments.bookkeeping_cost(batch, 12, 128) for batch in each("bookkeeping", (8, 256))
    }


def ledger(arguments: argparse.Namespace) -> dict:
    """Where a decode step's time goes, at the batch sizes of four workloads and half their context."""
    model, rungs = _model(arguments), _runnable(arguments)
    sized = [arguments.size.of(WORKLOADS[name]) for name in LEDGER_WORKLOADS]
    context = {w.max_batch_size: w.max_new_tokens // 2 for w in sized}
    return {
        str(n): _by_rung(f"ledger, batch {n}", rungs, experiments.ledgers, model, n, tokens)
        for n, tokens in context.items()
    }


def ledger_w6(arguments: argparse.Namespace) -> dict:
    """The same of the largest workload, on the best rung."""
    w = arguments.size.of(WORKLOADS["W6"])
    context = _prompt_length(w) + w.max_new_tokens // 2
    return experiments.ledgers(_model(arguments), [_best_rung(arguments)], w.max_batch_size, context)


def grid(arguments: argparse.Namespace) -> dict:
    """Step time of the best rung over batch size and context; where keys may be split, with and without."""
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


def cold_start(arguments: argparse.Namespace) -> dict:
    """Time to the first tokens of a fresh process."""
    best = _best_rung(arguments)
    seconds = experiments.cold_start(arguments.model, arguments.load_format, arguments.device, best)
    return {"rung": best, "seconds": seconds}


def kv_pressure(arguments: argparse.Namespace) -> dict:
    """Throughput with a quarter of the KV blocks that all requests need, and with all of them."""
    sized = (arguments.size.of(WORKLOADS[name]) for name in each("kv_pressure", ("W6", "W7")))
    return {
        w.id: robustness.kv_pressure(_model(arguments), w.num_requests, _prompt_length(w), w.max_new_tokens)
        for w in sized
    }


def determinism(arguments: argparse.Namespace) -> dict:
    """What batch invariance costs, and what changes without it."""
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
    """The time of a decode step on every rung, at a workload's batch size and mid-run context."""
    sized = arguments.size.of(WORKLOADS[workload])
    return step_records.ladder_steps(_model(arguments), _runnable(arguments), sized, **arguments.size.effort)


def ablations(arguments: argparse.Namespace, workload: str) -> dict:
    """The same of what lies between two rungs, where one field changes several things."""
    model, sized = _model(arguments), arguments.size.of(WORKLOADS[workload])
    return {
        rung: step_records.ablation_steps(model, rung, sized, **arguments.size.effort)
        for rung in each(f"ablations-{workload}", step_records.ABLATED)
    }


def leave_one_out(arguments: argparse.Namespace, workload: str) -> dict:
    """What each field of the best recipe is worth now: whole runs with that field alone set back."""
    model, sized = _model(arguments), arguments.size.of(WORKLOADS[workload])
    seconds = arguments.size.effort["seconds"]
    return step_records.leave_one_out(model, sized, seconds=seconds, best=_best_rung(arguments))


def _of_workloads(
    experiment: Callable[..., dict], workloads: Iterable[str]
) -> dict[str, Callable[[argparse.Namespace], dict]]:
    return {f"{experiment.__name__}-{w}": partial(experiment, workload=w) for w in workloads}


EXPERIMENTS: dict[str, Callable[[argparse.Namespace], dict]] = {
    "counts": counts,
    "equality": equality,
    "context": context,
    "autotune": autotune,
    "bookkeeping": bookkeeping,
    "ledger": ledger,
    "ledger_w6": ledger_w6,
    "grid": grid,
    "cold_start": cold_start,
    "kv_pressure": kv_pressure,
    "determinism": determinism,
    **_of_workloads(steps, STEP_WORKLOADS),
    **_of_workloads(ablations, STEP_WORKLOADS),
    **_of_workloads(leave_one_out, step_records.WHOLE_RUNS),
}


def measure_experiment(name: str, arguments: argparse.Namespace) -> None:
    """One experiment, its record kept as ``NAME.json``."""
    figures = EXPERIMENTS[name](arguments)
    record = new_record(name, resolve_device(arguments.device), model=arguments.model, figures=figures)
    write_record(arguments.output / f"{name}.json", record)


def measure_kv_append(_name: str, arguments: argparse.Namespace) -> None:
    """The append microbenchmark, its record kept as ``kv_append.json``."""
    target = str(arguments.output / f"{KV_APPEND}.json")
    sizes = ",".join(map(str, arguments.size.batches(128, 256, 512, 1024, 2048)))
    status = benchmark_kv_append.main(
        ["--device", arguments.device, "--batch-sizes", sizes, "--json", target]
    )
    if status:  # as above
        raise SystemExit(status)


@command
def main(argv: list[str] | None = None) -> None:
    """Check everything that is asked for, then measure it job by job."""
    arguments = _arguments(argv)
    jobs = _jobs(arguments)
    arguments.output.mkdir(parents=True, exist_ok=True)
    with redirect_stdout(DummyTqdmFile(sys.stdout)), tqdm(jobs, unit="job") as bar:  # type: ignore[type-var]
        for name, job in bar:
            bar.set_postfix_str(name)
            start = time.perf_counter()
            job()
            _free_memory()
            tqdm.write(f"[{time.perf_counter() - start:6.1f} s] {name}")


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    """The options; what depends on the device is chosen, its model by the size."""
    arguments = _parser().parse_args(argv)
    arguments.device = resolve_device(arguments.device).type
    size = arguments.size or ("full" if arguments.device == "cuda" else "small")
    arguments.size = SIZES[size]
    if arguments.model is None:
        arguments.model = MODEL["hf_model_id"] if size == "full" else SHIPPED
    if arguments.load_format is None:
        arguments.load_format = "auto" if arguments.model == SHIPPED else MODEL["load_format"]
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="python -m rosellm.lab.records.measure", description=__doc__)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder for the records; made if missing")
    add("--workloads", default="W0,W1,W2,W3,W4,W5", help="comma-separated; '' for none")
    add("--rungs", help="comma-separated; default: all that can run here")
    add("--experiments", help="comma-separated; '' for none; default: all that can run here")
    add("--model", help="shape of the model; default: gpt2, of a small size the shipped one")
    add("--load-format", choices=LOAD_FORMATS, help="default: dummy, of the shipped model auto")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: cuda if there is one")
    add("--size", choices=tuple(SIZES), help="default: full on a GPU, small on a CPU")
    add("--repeats", type=whole_number(1), default=3, help="measured runs of each benchmark")
    return parser


def _free_memory() -> None:
    """So that one job's engines do not crowd the next one's KV cache."""
    get_model.cache_clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _jobs(arguments: argparse.Namespace) -> list[tuple[str, Callable[[], None]]]:
    """Everything asked for, checked by name before anything runs."""
    on_gpu, known = arguments.device == "cuda", [*EXPERIMENTS, KV_APPEND]
    here = [name for name in known if on_gpu or name not in NEEDS_GPU]
    workloads = _listed("workload", arguments.workloads, WORKLOADS)
    rungs = _runnable(arguments) if arguments.rungs is None else _listed("rung", arguments.rungs, LADDER)
    names = here if arguments.experiments is None else _listed("experiment", arguments.experiments, known)
    for name in names:
        if name not in here:
            raise RoseError(f"experiment {name!r} needs a GPU")
    for rung in rungs:
        _check_rung(rung, arguments.device)
    _check_positions(names, workloads, arguments)
    jobs: list[tuple[str, Callable[[], None]]] = []
    for name in names:
        job = measure_kv_append if name == KV_APPEND else measure_experiment
        jobs.append((name, partial(job, name, arguments)))
    return jobs + [
        (f"{workload} {rung}", partial(measure_workload, workload, rung, arguments))
        for workload in workloads
        for rung in rungs
    ]


def _check_positions(names: list[str], workloads: list[str], arguments: argparse.Namespace) -> None:
    """Raises ``PromptError`` unless the model, which is loaded for that, has the positions for all jobs."""
    gpt, tokenizer = load_parts(arguments.model, arguments.device, "auto", arguments.load_format)
    there, needed = gpt.config.n_positions, positions_needed(arguments.size)
    for name in names:
        if needed.get(name, 0) > there:
            raise PromptError(f"{name} needs {needed[name]} positions; the model has {there}")
    for name in workloads:
        given = benchmark_arguments(name, "dense", arguments)
        options = BENCHMARKS[WORKLOADS[name].form].parse_options(given)
        encoded = encode_prompts(make_prompts(options, gpt.config.vocab_size), tokenizer)
        check_positions(options, max(map(len, encoded)), there)


def _listed(what: str, text: str, known: Iterable[str]) -> list[str]:
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise RoseError(f"{what} {unknown[0]!r} is unknown; use {', '.join(known)}")
    return names


def _check_rung(rung: str, device: str) -> None:
    """Raises ``RecipeError`` for a rung that the device cannot run."""
    recipe = LADDER[rung]
    if recipe.launch == "autotuned" and device == "cpu":
        raise RecipeError(f"rung {rung!r} needs a GPU: a CPU has no launch to tune")
    check_launch(recipe, torch.device(device))


def _runnable(arguments: argparse.Namespace) -> list[str]:
    def can_run(rung: str) -> bool:
        try:
            _check_rung(rung, arguments.device)
        except RecipeError:
            return False
        return True

    return [rung for rung in LADDER if can_run(rung)]


def _by_rung(
    name: str, rungs: list[str], experiment: Callable[..., dict], model: GPT, *sizes: object
) -> dict[str, dict]:
    """An experiment of several rungs, one after the other, so that progress shows."""
    return {rung: experiment(model, [rung], *sizes)[rung] for rung in each(name, rungs)}


def _best_rung(arguments: argparse.Namespace) -> str:
    return get_rung(None, resolve_device(arguments.device))


def _prompt_length(workload: Workload) -> int:
    if workload.prompt_tokens is None:
        raise RoseError(f"workload {workload.id} has prompts of text; name one of random token ids")
    return workload.prompt_tokens


def _model(arguments: argparse.Namespace) -> GPT:
    return get_model(arguments.model, arguments.device, "auto", arguments.load_format)


if __name__ == "__main__":
    raise SystemExit(main())
