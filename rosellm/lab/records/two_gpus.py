"""Measure the same workloads on one GPU and on two, alternating: tensor parallelism, and a replica on each.

On a CPU, processes and cores replace the GPUs. Engines of both sides exist at once; each side is warmed up,
then they alternate. A workload that needs more positions than the model has is skipped. The records are
DIR/MODEL/tensor_parallel-WORKLOAD.json and DIR/MODEL/replicas-WORKLOAD.json.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from rosellm.bench.benchmark_scheduler import BENCHMARK
from rosellm.bench.job import Job, choose_recipe, make_job
from rosellm.bench.prompts import make_prompts, request_params
from rosellm.bench.record import check_writable, engine_facts, new_record, write_record
from rosellm.bench.runs import check_served, run_figures
from rosellm.bench.workloads import ALL_WORKLOADS, WORKLOADS, Workload
from rosellm.cluster.runtime import import_ray
from rosellm.command_line import OneLineParser, command, whole_number
from rosellm.errors import DeviceError, RoseError
from rosellm.lab.records.all_reduce import two_gpus
from rosellm.lab.records.measured_model import add_model_options, settle
from rosellm.lab.records.model_runs import short_name
from rosellm.lab.records.records import Results
from rosellm.lab.records.step_time import free_memory
from rosellm.lab.records.turns import in_turns
from rosellm.models.families.table import write_arch
from rosellm.models.loading import arch_of
from rosellm.roseinfer.cache.kv_blocks import blocks_for
from rosellm.roseinfer.llm import LLM
from rosellm.roseinfer.recipe import recipe_choices
from rosellm.roseinfer.tensor_parallel import Load, check_ranks, load_ranks

NAME = "two_gpus"
TENSOR_PARALLEL, REPLICAS = "tensor_parallel", "replicas"
TOGETHER, APART = "D1,D64,L8K", "W8,MIX"
SUMS = {"cuda": "library,one_shot", "cpu": "library"}
BLOCK_SIZE = 64
SPARE_KV_BLOCKS = 8


def recorded_models(results: Results) -> list[str]:
    """Return the short names of the models recorded on two such GPUs."""
    found = (path.parent.name for kind in KINDS for path in two_gpus(results).folder.glob(f"*/{kind}-*.json"))
    return sorted(set(found))


def recorded(results: Results, model: str) -> dict[str, Any]:
    """Return the records of ``model``, by its short name, on two such GPUs; empty if there are none.

    ``model_shape``; ``workloads``, by their flags; ``figures``: kind → workload → side → figures.
    """
    folder = two_gpus(results).folder / model
    records = {kind: _records(folder, kind) for kind in KINDS}
    every = [record for found in records.values() for record in found]
    if not every:
        return {}
    return {
        "model_shape": every[0]["model_shape"],
        "workloads": {record["workload"]: record["flags"] for record in every},
        "figures": {
            kind: {one["workload"]: one["figures"] for one in found} for kind, found in records.items()
        },
    }


def recorded_runs(results: Results, kind: str) -> dict[str, dict[str, Any]]:
    """Return model → workload → side → figures of one of ``KINDS``, for the models that have any."""
    found = {model: recorded(results, model)["figures"][kind] for model in recorded_models(results)}
    return {model: runs for model, runs in found.items() if runs}


def _records(folder: Path, kind: str) -> list[dict[str, Any]]:
    names = [f"{kind}-{workload}" for workload in ALL_WORKLOADS]
    return [Results(folder).load(name) for name in names if (folder / f"{name}.json").is_file()]


def measure(arguments: Namespace) -> None:
    """Record each requested workload on both sides."""
    arch = arch_of(arguments.model, arguments.load_format)
    shape = write_arch(arch)
    asked = {TENSOR_PARALLEL: arguments.workloads, REPLICAS: arguments.replica_workloads}
    for kind, workloads in asked.items():
        for workload in workloads:
            needed = (workload.prompt_tokens or 1) + workload.max_new_tokens
            if needed > arch.n_positions:
                print(f"{workload.id}: left out, the model has {arch.n_positions} positions of {needed}")
                continue
            figures = KINDS[kind](arguments, workload)
            facts = {"model": arguments.model, "model_shape": shape, "workload": workload.id}
            facts |= {"flags": workload.flags(), "figures": figures}
            record = new_record(NAME, torch.device(arguments.device), **facts)
            folder = arguments.output / short_name(arguments.model)
            folder.mkdir(exist_ok=True)
            write_record(folder / f"{kind}-{workload.id}.json", record)
            print(told(kind, workload.id, figures), flush=True)
            free_memory()


def tensor_parallel(arguments: Namespace, workload: Workload) -> dict[str, Any]:
    """Measure whole runs on one rank, and on two for each all-reduce."""
    jobs = {"1": _job(arguments, workload, 1, "library")}
    jobs |= {f"2 {way}": _job(arguments, workload, 2, way) for way in arguments.all_reduce}
    runs = {side: partial(run, job) for side, (run, job) in jobs.items()}
    figures: dict[str, Any] = in_turns(runs, arguments.repeats)
    for side, (_, job) in jobs.items():
        figures[side]["engine"] = engine_facts(job.engine)
    return figures


def _job(
    arguments: Namespace, workload: Workload, n_ranks: int, way: str
) -> tuple[Callable[[Job], dict[str, Any]], Job]:
    """Return the function that runs a job once, and the job."""
    given = {
        **arguments.size.options(ALL_WORKLOADS[workload.id]),
        "--hf-model-id": arguments.model,
        "--load-format": arguments.load_format,
        "--device": arguments.device,
        "--mode": "offline",
        "--tensor-parallel-size": n_ranks,
        "--all-reduce": way,
    }
    options = BENCHMARK.parse_options([str(text) for pair in given.items() for text in pair])
    load = Load(arguments.model, arguments.device, "auto", arguments.load_format)
    loaded = load_ranks(n_ranks, load, choose_recipe(options))
    (run,) = BENCHMARK.runs(options).values()
    return run, make_job(options, loaded.model, loaded.tokenizer, loaded.build)


def replicas(arguments: Namespace, workload: Workload) -> dict[str, Any]:
    """Measure ``LLM.generate`` with one engine in this process, and with two as Ray actors."""
    sized = arguments.size.options(ALL_WORKLOADS[workload.id])
    options = BENCHMARK.parse_options([str(text) for pair in sized.items() for text in pair])
    prompts = make_prompts(options, arch_of(arguments.model, arguments.load_format).vocab_size)
    params = request_params(options)
    lengths = [len(prompt) + own.max_tokens for prompt, own in zip(prompts, params, strict=True)]
    llms = {
        str(n): LLM(
            arguments.model,
            data_parallel_size=n,
            device=arguments.device,
            load_format=arguments.load_format,
            max_batch_size=options.max_batch_size,
            max_model_len=max(lengths),
            num_kv_blocks=_kv_blocks(lengths, options.max_batch_size),
            block_size=BLOCK_SIZE,
        )
        for n in (1, 2)
    }

    def generate(llm: LLM) -> dict[str, Any]:
        start = perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = perf_counter() - start
        check_served(outputs)
        return run_figures([one.outputs[0].token_ids for one in outputs], seconds, None)

    return in_turns({side: partial(generate, llm) for side, llm in llms.items()}, arguments.repeats)


def _kv_blocks(lengths: list[int], together: int) -> int:
    """Return KV blocks for the longest requests to run together; both sides share a GPU's memory."""
    longest = sorted(lengths)[-together:]
    return sum(blocks_for(length, BLOCK_SIZE) for length in longest) + SPARE_KV_BLOCKS


KINDS = {TENSOR_PARALLEL: tensor_parallel, REPLICAS: replicas}


def speeds(figures: dict[str, Any]) -> dict[str, float]:
    """Return side ("1", a single GPU, first) → median new tokens per second of a workload's runs."""
    return {side: one["medians"]["total_throughput_tok_s"] for side, one in figures.items()}


def told(kind: str, name: str, figures: dict[str, Any]) -> str:
    """Describe a workload's medians in one line."""
    rates = speeds(figures)
    each = (f"{side}: {rate:,.0f} tok/s ({rate / rates['1']:.2f} ×)" for side, rate in rates.items())
    return f"{kind} {name}: {', '.join(each)}"


def _parser() -> OneLineParser:
    parser = OneLineParser(prog=f"python -m rosellm.lab.records.{NAME}", description=__doc__)
    add_model_options(parser)
    add = parser.add_argument
    add("--workloads", default=TOGETHER, metavar="ID,ID", help="run with tensor parallelism; may be empty")
    add("--replica-workloads", default=APART, metavar="ID,ID", help="run on two replicas; may be empty")
    told = f"all-reduces on two GPUs, any of {', '.join(recipe_choices()['all_reduce'])}; default: "
    add("--all-reduce", metavar="NAME,NAME", help=f"{told}{SUMS['cuda']}; on a CPU {SUMS['cpu']}")
    add("--repeats", type=whole_number(1), default=3, metavar="N", help="measured runs of each side")
    add("--output", type=Path, required=True, metavar="DIR", help="folder of the record")
    return parser


def _workloads(text: str, arguments: Namespace) -> list[Workload]:
    names = list(filter(None, text.split(",")))
    known = [w.id for w in ALL_WORKLOADS.values() if w.form == "scheduler" and w.prompt_tokens is not None]
    if unknown := [name for name in names if name not in known]:
        raise RoseError(f"workload {unknown[0]!r} is unknown; use {', '.join(known)}")
    return [arguments.size.of(ALL_WORKLOADS[name]) for name in names]


def _check(arguments: Namespace) -> None:
    """Check the arguments before anything is loaded."""
    if unknown := [way for way in arguments.all_reduce if way not in recipe_choices()["all_reduce"]]:
        ways = ", ".join(recipe_choices()["all_reduce"])
        raise RoseError(f"all-reduce {unknown[0]!r} is unknown; use {ways}")
    if arguments.device == "cuda" and torch.cuda.device_count() < 2:
        raise DeviceError(f"two GPUs are needed; this machine has {torch.cuda.device_count()}")
    load = Load(arguments.model, arguments.device, "auto", arguments.load_format)
    if arguments.workloads:
        check_ranks(2, load, None)
    if arguments.replica_workloads:
        import_ray()


@command
def main(argv: list[str] | None = None) -> None:
    """Check the arguments, then measure."""
    arguments = settle(_parser().parse_args(argv), WORKLOADS["W8"])
    arguments.all_reduce = (arguments.all_reduce or SUMS[arguments.device]).split(",")
    arguments.workloads = _workloads(arguments.workloads, arguments)
    arguments.replica_workloads = _workloads(arguments.replica_workloads, arguments)
    _check(arguments)
    arguments.output.mkdir(parents=True, exist_ok=True)
    check_writable(arguments.output / f"{NAME}.json")
    measure(arguments)


if __name__ == "__main__":
    sys.exit(main())
