"""The records that a machine can produce: one job each, all checked before any runs."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rosellm.bench import benchmark_kv_append, benchmark_scheduler, benchmark_streaming
from rosellm.bench.job import check_positions
from rosellm.bench.prompts import encode_prompts, make_prompts
from rosellm.bench.record import new_record, write_record
from rosellm.bench.workloads import WORKLOADS
from rosellm.errors import PromptError, RoseError
from rosellm.lab.records.bench import get_model
from rosellm.lab.records.measured_model import place_of, settle
from rosellm.lab.records.recordings import EXPERIMENTS, NEEDS_GPU, measured
from rosellm.lab.records.records import FULL_SIZE
from rosellm.lab.records.rungs import check_rung, runnable
from rosellm.lab.records.sizes import positions_needed
from rosellm.models.loading import arch_of, load_parts, resolve_device
from rosellm.roseinfer.recipe import LADDER

BENCHMARKS = {"scheduler": benchmark_scheduler.BENCHMARK, "streaming": benchmark_streaming.BENCHMARK}
KV_APPEND = "kv_append"
APPENDED = 128, 256, 512, 1024, 2048  # tokens per call

Job = Callable[[argparse.Namespace], None]  # writes its record to the folder ``arguments.output``


def benchmark_arguments(name: str, rung: str, arguments: argparse.Namespace) -> list[str]:
    """Return the options of a workload's benchmark command."""
    options = arguments.size.options(WORKLOADS[name]) | {
        "--rung": rung,
        "--hf-model-id": arguments.model,
        "--load-format": arguments.load_format,
        "--device": arguments.device,
        "--warmup-runs": 1,
        "--repeat-runs": arguments.repeats,
    }
    return [str(text) for pair in options.items() for text in pair]


def plan(arguments: argparse.Namespace) -> tuple[argparse.Namespace, dict[str, Job]]:
    """Complete ``arguments`` for this machine, and return the requested jobs by record name.

    At full size, records of a model other than GPT-2 go to a folder of its name in ``output``, so that
    GPT-2's may be there too. Raises ``RoseError`` for anything that cannot run here.
    """
    workload = WORKLOADS["W1"]
    arguments = settle(arguments, workload)
    if arguments.size.name == FULL_SIZE:
        arguments.output = place_of(arguments.output, arguments.model, workload)
    return arguments, _jobs(arguments)


def make_record(name: str, job: Job, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the record that ``job`` would write, with the name of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        job(argparse.Namespace(**vars(arguments) | {"output": Path(folder)}))
        record = json.loads((Path(folder) / f"{name}.json").read_text(encoding="utf-8"))
    free_memory()
    record["environment"]["machine"] = platform.node()
    return record


def free_memory() -> None:
    """Free cached models and device memory, so that the next job has room for its KV cache."""
    get_model.cache_clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure_workload(workload: str, rung: str, arguments: argparse.Namespace) -> None:
    """Run one benchmark command and write ``WORKLOAD-RUNG.json``."""
    benchmark, target = BENCHMARKS[WORKLOADS[workload].form], arguments.output / f"{workload}-{rung}.json"
    benchmark.run([*benchmark_arguments(workload, rung, arguments), "--json", str(target)])


def measure_experiment(name: str, arguments: argparse.Namespace) -> None:
    """Run one experiment and write ``NAME.json``."""
    figures, where = EXPERIMENTS[name](arguments), resolve_device(arguments.device)
    record = new_record(name, where, **measured(name, arguments), figures=figures)
    write_record(arguments.output / f"{name}.json", record)


def measure_kv_append(arguments: argparse.Namespace) -> None:
    """Run the append microbenchmark and write ``kv_append.json``."""
    target = str(arguments.output / f"{KV_APPEND}.json")
    sizes = ",".join(map(str, arguments.size.batches(*APPENDED)))
    benchmark_kv_append.run(["--device", arguments.device, "--batch-sizes", sizes, "--json", target])


def experiment(name: str) -> Job:
    """Return the job that records an experiment."""
    return measure_kv_append if name == KV_APPEND else partial(measure_experiment, name)


def _jobs(arguments: argparse.Namespace) -> dict[str, Job]:
    on_gpu, known = arguments.device == "cuda", [*EXPERIMENTS, KV_APPEND]
    here = [name for name in known if on_gpu or name not in NEEDS_GPU]
    workloads = _listed("workload", arguments.workloads, WORKLOADS)
    names = here if arguments.experiments is None else _listed("experiment", arguments.experiments, known)
    for name in names:
        if name not in here:
            raise RoseError(f"experiment {name!r} needs a GPU")
    rungs = _rungs(arguments)
    _check_positions(names, workloads, arguments)
    return {name: experiment(name) for name in names} | {
        f"{workload}-{rung}": partial(measure_workload, workload, rung)
        for workload in workloads
        for rung in rungs
    }


def _rungs(arguments: argparse.Namespace) -> list[str]:
    """Return the requested rungs, by default all that can run. Raises ``RoseError`` for one that cannot."""
    asked = [] if arguments.rungs is None else _listed("rung", arguments.rungs, LADDER)
    device, shape = torch.device(arguments.device), arch_of(arguments.model, arguments.load_format)
    for rung in asked:
        check_rung(rung, device, shape)
    return runnable(device, shape) if arguments.rungs is None else asked


def _check_positions(names: list[str], workloads: list[str], arguments: argparse.Namespace) -> None:
    """Load the model, and raise ``PromptError`` unless it has enough positions for all jobs."""
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
