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
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

from rosellm.command_line import OneLineParser, command, whole_number
from rosellm.errors import PromptError, RoseError
from rosellm.lab.records.bench import get_model
from rosellm.lab.records.measured_model import add_model_options, settle
from rosellm.lab.records.recordings import EXPERIMENTS, NEEDS_GPU, check_rung, runnable
from rosellm.lab.records.sizes import positions_needed
from rosellm.models.loading import load_parts, resolve_device
from rosellm.roseinfer import benchmark_kv_append, benchmark_scheduler, benchmark_streaming
from rosellm.roseinfer.bench.job import check_positions
from rosellm.roseinfer.bench.prompts import encode_prompts, make_prompts
from rosellm.roseinfer.bench.record import new_record, write_record
from rosellm.roseinfer.bench.workloads import WORKLOADS
from rosellm.roseinfer.recipe import LADDER

BENCHMARKS = {"scheduler": benchmark_scheduler.BENCHMARK, "streaming": benchmark_streaming.BENCHMARK}
KV_APPEND = "kv_append"


def benchmark_arguments(name: str, rung: str, arguments: argparse.Namespace) -> list[str]:
    """The options of a workload's benchmark command."""
    options = arguments.size.options(WORKLOADS[name]) | {
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
    return settle(_parser().parse_args(argv), WORKLOADS["W1"])


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="python -m rosellm.lab.records.measure", description=__doc__)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder for the records; made if missing")
    add("--workloads", default="W0,W1,W2,W3,W4,W5", help="comma-separated; '' for none")
    add("--rungs", help="comma-separated; default: all that can run here")
    add("--experiments", help="comma-separated; '' for none; default: all that can run here")
    add_model_options(parser)
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
    rungs = runnable(arguments) if arguments.rungs is None else _listed("rung", arguments.rungs, LADDER)
    names = here if arguments.experiments is None else _listed("experiment", arguments.experiments, known)
    for name in names:
        if name not in here:
            raise RoseError(f"experiment {name!r} needs a GPU")
    for rung in rungs:
        check_rung(rung, arguments.device)
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


if __name__ == "__main__":
    raise SystemExit(main())
