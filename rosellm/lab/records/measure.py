"""Makes the committed records of a GPU: ``python -m rosellm.lab.records.measure --output FOLDER``.

Every workload on every rung through the benchmark commands themselves, then the counted, compared and
microbenchmarked figures that the notebooks draw. One JSON file each; a run that is cut off has lost only the
file it was at.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch

from rosellm.command_line import OneLineParser, command, whole_number
from rosellm.errors import RoseError
from rosellm.lab.records import experiments, robustness
from rosellm.lab.records.bench import get_model
from rosellm.models.loading import LOAD_FORMATS, resolve_device
from rosellm.models.model import GPT
from rosellm.roseinfer import benchmark_kv_append, benchmark_scheduler, benchmark_streaming
from rosellm.roseinfer.bench.record import new_record, write_record
from rosellm.roseinfer.bench.workloads import WORKLOADS, Workload
from rosellm.roseinfer.recipe import LADDER, get_rung

LEDGER_WORKLOADS = ("W0", "W1", "W2", "W3")
COMMANDS = {"scheduler": benchmark_scheduler.main, "streaming": benchmark_streaming.main}


def measure_workload(workload: str, rung: str, arguments: argparse.Namespace) -> None:
    """One benchmark command, its record kept as ``WORKLOAD-RUNG.json``."""
    target = arguments.output / f"{workload}-{rung}.json"
    options = {
        "--workload": workload,
        "--rung": rung,
        "--hf-model-id": arguments.model,
        "--load-format": arguments.load_format,
        "--device": arguments.device,
        "--warmup-runs": "1",
        "--repeat-runs": str(arguments.repeats),
        "--json": str(target),
    }
    status = COMMANDS[WORKLOADS[workload].form]([text for pair in options.items() for text in pair])
    if status:  # the benchmark has told why
        raise SystemExit(status)


def counts(arguments: argparse.Namespace) -> dict:
    """Kernels, copies, bytes and allocations of one decode step, by batch size and rung.

    "mixed": prompts of unequal lengths.
    """
    model, rungs = _model(arguments), list(LADDER)
    equal = {str(batch): experiments.counted_rungs(model, rungs, batch, 32) for batch in (8, 64, 256)}
    return equal | {"256 mixed": experiments.counted_rungs(model, rungs, 256, 32, lengths=[2, 8])}


def equality(arguments: argparse.Namespace) -> dict:
    """Tokens and logits of every rung against ``dense``, in fp32, fp16 and bf16, on the shipped model."""
    lengths = [1, 2, 5, 63, 64, 65, 130]
    return {
        dtype: experiments.equality(
            get_model("rose-tiny", arguments.device, dtype), list(LADDER), lengths, 14, 64
        )
        for dtype in ("float32", "float16", "bfloat16")
    }


def context(arguments: argparse.Namespace) -> dict:
    """Step time against the cached context."""
    rungs, contexts = ["dense", "paged", "no_mask", "reused_index_buffers"], [16, 64, 128, 256, 512, 768, 960]
    return {
        str(batch): experiments.step_by_context(_model(arguments), rungs, batch, contexts)
        for batch in (8, 64)
    }


def autotune(arguments: argparse.Namespace) -> dict:
    """What an autotuned launch costs and what tuning beforehand brings."""
    model = _model(arguments)
    launches = [
        experiments.launch_costs(model, batch, length)
        for batch, length in ((8, 128), (64, 256), (64, 960), (256, 64))
    ]
    warps, stages = launches[1]["chosen"]
    return {
        "launches": launches,
        "step_ms": experiments.offline_tuned_step_ms(model, 64, 256, 64, warps, stages),
    }


def bookkeeping(arguments: argparse.Namespace) -> dict:
    """Nanoseconds of Python a reserved token."""
    return {str(batch): experiments.bookkeeping_cost(batch, 12, 128) for batch in (8, 256)}


def ledger(arguments: argparse.Namespace) -> dict:
    """Where a decode step's time goes, at the batch sizes of four workloads and half their context."""
    model = _model(arguments)
    return {
        str(w.max_batch_size): experiments.ledgers(
            model, list(LADDER), w.max_batch_size, w.max_new_tokens // 2
        )
        for w in (WORKLOADS[name] for name in LEDGER_WORKLOADS)
    }


def ledger_w6(arguments: argparse.Namespace) -> dict:
    """The same of the largest workload, on the best rung."""
    w = WORKLOADS["W6"]
    context = _prompt_length(w) + w.max_new_tokens // 2
    return experiments.ledgers(_model(arguments), [_best_rung(arguments)], w.max_batch_size, context)


def grid(arguments: argparse.Namespace) -> dict:
    """Step time of the best rung over batch size and context; where keys may be split, with and without."""
    model, contexts = _model(arguments), [64, 256, 512, 1000]
    best, few = _best_rung(arguments), ([1, 2, 4, 8], [256, 512, 768, 1000])
    return {
        "rung": best,
        "rows": experiments.step_grid(model, best, [1, 4, 16, 64, 256, 1024], contexts),
        "few": {rung: experiments.step_grid(model, rung, *few) for rung in (best, "split_kv")},
    }


def cold_start(arguments: argparse.Namespace) -> dict:
    """Time to the first tokens of a fresh process."""
    best = _best_rung(arguments)
    seconds = experiments.cold_start(arguments.model, arguments.load_format, arguments.device, best)
    return {"rung": best, "seconds": seconds}


def kv_pressure(arguments: argparse.Namespace) -> dict:
    """Throughput with a quarter of the KV blocks that all requests need, and with all of them."""
    workloads = [WORKLOADS[name] for name in ("W6", "W7")]
    return {
        w.id: robustness.kv_pressure(_model(arguments), w.num_requests, _prompt_length(w), w.max_new_tokens)
        for w in workloads
    }


def determinism(arguments: argparse.Namespace) -> dict:
    """What batch invariance costs, and what changes without it."""
    model = _model(arguments)
    return {
        "cost": {
            name: robustness.determinism_cost(model, WORKLOADS[name])
            for name in ("W0", "W1", "W2", "W3", "W6", "W7")
        },
        "bits": {
            dtype: robustness.invariance(
                get_model(arguments.model, arguments.device, dtype, arguments.load_format),
                [1, 2, 8, 9, 16, 17, 32, 64, 65, 128, 129, 256],
            )
            for dtype in ("float16", "bfloat16", "float32")
        },
    }


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
}


def measure_experiment(name: str, arguments: argparse.Namespace) -> None:
    """One experiment, its record kept as ``NAME.json``."""
    figures = EXPERIMENTS[name](arguments)
    record = new_record(name, resolve_device(arguments.device), model=arguments.model, figures=figures)
    write_record(arguments.output / f"{name}.json", record)


def measure_kv_append(_name: str, arguments: argparse.Namespace) -> None:
    """The append microbenchmark, its record kept as ``kv_append.json``."""
    status = benchmark_kv_append.main(
        ["--device", arguments.device, "--json", str(arguments.output / "kv_append.json")]
    )
    if status:  # as above
        raise SystemExit(status)


@command
def main(argv: list[str] | None = None) -> None:
    """Check everything that is asked for, then measure it job by job."""
    arguments = _parser().parse_args(argv)
    jobs = _jobs(arguments)
    resolve_device(arguments.device)
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, job in jobs:
        start = time.perf_counter()
        job()
        _free_memory()
        print(f"[{time.perf_counter() - start:6.1f} s] {name}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="python -m rosellm.lab.records.measure", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for the records; made if missing")
    parser.add_argument(
        "--workloads", default="W0,W1,W2,W3,W4,W5", help="comma-separated; '' for none (default %(default)s)"
    )
    parser.add_argument(
        "--rungs", default=",".join(LADDER), help="comma-separated (default: the whole ladder)"
    )
    parser.add_argument(
        "--experiments",
        default=",".join([*EXPERIMENTS, "kv_append"]),
        help="comma-separated; '' for none (default %(default)s)",
    )
    parser.add_argument("--model", default="gpt2", help="shape of the model (default %(default)s)")
    parser.add_argument("--load-format", choices=LOAD_FORMATS, default="dummy", help="default %(default)s")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default %(default)s")
    parser.add_argument(
        "--repeats",
        type=whole_number(1),
        default=3,
        help="measured runs of each benchmark (default %(default)s)",
    )
    return parser


def _free_memory() -> None:
    """So that one job's engines do not crowd the next one's KV cache."""
    get_model.cache_clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _jobs(arguments: argparse.Namespace) -> list[tuple[str, Callable[[], None]]]:
    """Everything asked for, checked before anything runs."""
    workloads = _listed("workload", arguments.workloads, WORKLOADS)
    rungs = _listed("rung", arguments.rungs, LADDER)
    names = _listed("experiment", arguments.experiments, [*EXPERIMENTS, "kv_append"])
    jobs: list[tuple[str, Callable[[], None]]] = []
    for name in names:
        job = measure_kv_append if name == "kv_append" else measure_experiment
        jobs.append((name, partial(job, name, arguments)))
    return jobs + [
        (f"{workload} {rung}", partial(measure_workload, workload, rung, arguments))
        for workload in workloads
        for rung in rungs
    ]


def _listed(what: str, text: str, known: Iterable[str]) -> list[str]:
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise RoseError(f"{what} {unknown[0]!r} is unknown; use {', '.join(known)}")
    return names


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
