"""Measure the same workloads on one GPU and on two, in alternation: with tensor parallelism or replicas.

On a CPU, processes that share the cores replace the GPUs. The engines of both sides exist at the same time;
after a warm-up of each, their runs alternate. The records are MODEL/tensor_parallel-WORKLOAD.json and
MODEL/replicas-WORKLOAD.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any

import torch

from rosellm.bench.benchmark_scheduler import BENCHMARK
from rosellm.bench.job import Job, check_served, choose_recipe, make_job
from rosellm.bench.prompts import make_prompts, request_params
from rosellm.bench.record import engine_facts, run_figures
from rosellm.bench.workloads import ALL_WORKLOADS
from rosellm.cluster.runtime import import_ray
from rosellm.errors import DeviceError
from rosellm.lab.records.all_reduce import two_gpus
from rosellm.lab.records.experiment import Asked, Experiment, Record
from rosellm.lab.records.records import Results
from rosellm.lab.records.turns import runs_in_turns
from rosellm.models.families.table import write_arch
from rosellm.roseinfer.cache.kv_blocks import blocks_for
from rosellm.roseinfer.llm import LLM
from rosellm.roseinfer.tensor_parallel import Load, check_ranks, load_ranks

NAME = "two_gpus"
TENSOR_PARALLEL, REPLICAS = "tensor_parallel", "replicas"
SUMS = {"cuda": ("library", "one_shot"), "cpu": ("library",)}
BLOCK_SIZE = 64
SPARE_KV_BLOCKS = 8


def recorded(results: Results, kind: str) -> dict[str, dict[str, Record]]:
    """Return model → workload → its record on two GPUs of the same type as the GPU of ``results``.

    kind: one of ``KINDS``, or another measurement of two GPUs, such as ``rank_steps.NAME``.

    Language models without such a record are omitted.
    """
    found = {}
    for folder in sorted(two_gpus(results).folder.glob("*/")):
        own = Results(folder)
        names = {workload: f"{kind}-{workload}" for workload in ALL_WORKLOADS}
        found[folder.name] = {w: own.load(name) for w, name in names.items() if name in own.names()}
    return {model: records for model, records in found.items() if records}


def recorded_runs(results: Results, kind: str) -> dict[str, dict[str, Any]]:
    """Return model → workload → side → figures, from the records of :func:`recorded`."""
    return {
        model: {workload: record["figures"] for workload, record in records.items()}
        for model, records in recorded(results, kind).items()
    }


def measure(asked: Asked, kind: str, workload: str) -> Iterator[Record]:
    """Measure a workload on one GPU and on two; yield the record and print the medians.

    kind: one of ``KINDS``.
    """
    figures = KINDS[kind](asked, workload)
    facts = {"model": asked.model, "model_shape": write_arch(asked.arch), "workload": workload}
    yield asked.record(NAME, **facts, flags=asked.workload(workload).flags(), figures=figures)
    print(told(kind, workload, figures), flush=True)


def tensor_parallel(asked: Asked, workload: str) -> dict[str, Any]:
    """Measure whole runs on one rank, and on two ranks with each way to all-reduce."""
    jobs = {"1": _job(asked, workload, 1)}
    for way in asked["all_reduce"] or SUMS[asked.device]:
        jobs[f"2 {way}"] = _job(asked, workload, 2, "--all-reduce", way)
    figures: dict[str, Any] = runs_in_turns(
        {side: partial(run, job) for side, (run, job) in jobs.items()}, asked["repeats"]
    )
    for side, (_, job) in jobs.items():
        figures[side]["engine"] = engine_facts(job.engine)
    return figures


def _job(
    asked: Asked, workload: str, n_ranks: int, *options_of_ranks: str
) -> tuple[Callable[[Job], dict[str, Any]], Job]:
    """Return a function that runs the job of a workload once, and the job."""
    more = "--mode", "offline", "--tensor-parallel-size", n_ranks, *options_of_ranks
    options = BENCHMARK.parse_options(asked.benchmark_options(workload, *more))
    loaded = load_ranks(n_ranks, load_of(asked), choose_recipe(options))
    (run,) = BENCHMARK.runs(options).values()
    return run, make_job(options, loaded.model, loaded.tokenizer, loaded.build)


def replicas(asked: Asked, workload: str) -> dict[str, Any]:
    """Measure ``LLM.generate`` with one engine in this process, and with two engines as Ray actors."""
    options = BENCHMARK.parse_options(asked.benchmark_options(workload))
    prompts, params = make_prompts(options, asked.arch.vocab_size), request_params(options)
    lengths = [len(prompt) + (own.max_tokens or 0) for prompt, own in zip(prompts, params, strict=True)]
    llms = {
        str(n): LLM(
            asked.model,
            data_parallel_size=n,
            device=asked.device,
            load_format=asked.load_format,
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
        check_served(outputs, params)
        return run_figures([one.outputs[0].token_ids for one in outputs], seconds, None)

    return runs_in_turns({side: partial(generate, llm) for side, llm in llms.items()}, asked["repeats"])


def _kv_blocks(lengths: list[int], together: int) -> int:
    """Return the number of KV blocks with which the ``together`` longest requests can run at once.

    It is limited because the engines of both sides share a GPU's memory.

    lengths: tokens of each request.
    """
    longest = sorted(lengths)[-together:]
    return sum(blocks_for(length, BLOCK_SIZE) for length in longest) + SPARE_KV_BLOCKS


KINDS = {TENSOR_PARALLEL: tensor_parallel, REPLICAS: replicas}


def speeds(figures: dict[str, Any]) -> dict[str, float]:
    """Return side → median new tokens per second; the first side is "1", a single GPU."""
    return {side: one["medians"]["total_throughput_tok_s"] for side, one in figures.items()}


def told(kind: str, name: str, figures: dict[str, Any]) -> str:
    """Describe the medians of a workload's runs in one line."""
    rates = speeds(figures)
    each = (f"{side}: {rate:,.0f} tok/s ({rate / rates['1']:.2f} ×)" for side, rate in rates.items())
    return f"{kind} {name}: {', '.join(each)}"


def load_of(asked: Asked) -> Load:
    """Return how every rank loads its part of the model."""
    return Load(asked.model, asked.device, "auto", asked.load_format)


def refuse(asked: Asked, kind: str) -> None:
    """Raise ``RoseError`` if this machine or the model cannot run ``kind``, one of ``KINDS``."""
    if asked.device == "cuda" and torch.cuda.device_count() < 2:
        raise DeviceError(f"two GPUs are needed; this machine has {torch.cuda.device_count()}")
    if kind == TENSOR_PARALLEL:
        check_ranks(2, load_of(asked), None)
    else:
        import_ray()


EXPERIMENTS = [
    Experiment(
        f"{kind}-{name}",
        partial(measure, kind=kind, workload=name),
        {"repeats": 3} | ({"all_reduce": ()} if kind == TENSOR_PARALLEL else {}),
        own_folder=True,
        workloads=[name],
        refuse=partial(refuse, kind=kind),
    )
    for kind in KINDS
    for name, workload in ALL_WORKLOADS.items()
    if workload.form == "scheduler" and workload.prompt_tokens is not None
]
