"""Measure what the first request of a process waits for, with and without a warm-up.

Fresh processes load a model, build its engine and run workload W8 three times: first with an empty cache of
compiled Triton kernels, then with the cache so filled. Such a process runs ``main``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from rosellm.bench.benchmark_scheduler import BENCHMARK
from rosellm.bench.job import check_served, choose_recipe, scheduler_config
from rosellm.bench.prompts import make_prompts, request_params
from rosellm.bench.record import engine_facts, tokens_sha256
from rosellm.command_line import command
from rosellm.errors import RoseError
from rosellm.lab.records.arrivals import WORKLOAD
from rosellm.lab.records.experiment import Asked, Experiment, Record
from rosellm.lab.records.records import Results
from rosellm.models.loading import load_parts
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.serving.scheduler import OfflineScheduler

CODE = """
import sys
from rosellm.roseinfer.exhibits import load_exhibit
sys.exit(load_exhibit("first_request").main())
"""
RUNS = 3  # of a process

T = TypeVar("T")
CACHES = ("empty", "filled")  # state of the kernel cache at a process's start


def first_process(
    options: Sequence[str], warm_up: bool = True, kernel_cache: Path | None = None
) -> dict[str, Any]:
    """Run :func:`first_figures` in a new process, and return its result.

    options: command-line options of ``benchmark_scheduler``.
    warm_up: whether the engine is warmed up before the first request.
    kernel_cache: folder for Triton's compiled kernels; None for Triton's default.

    Raises ``RoseError`` with the last line of the process's standard error if it fails.
    """
    own = {} if kernel_cache is None else {"TRITON_CACHE_DIR": str(kernel_cache)}
    done = subprocess.run(
        [sys.executable, "-c", CODE, repr(time.time()), str(int(warm_up)), *options],
        env=os.environ | own,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise RoseError(f"the new process failed: {said[-1].removeprefix('error: ')}")
    return json.loads(done.stdout.splitlines()[-1])


def first_figures(options: Namespace, warm_up: bool, started: float) -> dict[str, Any]:
    """Build an engine as ``LLM`` does, run the benchmark's requests ``RUNS`` times, and time every part.

    options: parsed options of ``benchmark_scheduler``.
    warm_up: whether to call ``Engine.warm_up`` before the first request.
    started: ``time.time()`` when the process was started.

    Returns a dict:
    parts_s: seconds of each part before the first request.
    graphs: number of graphs captured by then.
    runs: the result of :func:`first_run` for each run.
    engine: facts about the engine.
    """
    parts = {"import": time.time() - started}
    load = partial(load_parts, options.hf_model_id, options.device, options.dtype, options.load_format)
    (gpt, tokenizer), parts["load"] = timed(load)
    sizes = {"max_batch_size": options.max_batch_size, "block_size": options.block_size}
    build = partial(Engine, gpt, tokenizer, recipe=choose_recipe(options), warm_up=False, **sizes)
    engine, parts["build"] = timed(build)
    parts["warm_up"] = timed(engine.warm_up)[1] if warm_up else 0.0
    graphs = engine.step.n_captured
    runs = [first_run(engine, options) for _ in range(RUNS)]
    return {"parts_s": parts, "graphs": graphs, "runs": runs, "engine": engine_facts(engine)}


def first_run(engine: Engine, options: Namespace) -> dict[str, Any]:
    """Serve the benchmark's requests, all submitted at once, and return the figures of this run.

    ``late_captures`` counts the graphs captured during the run.
    """
    prompts, params = make_prompts(options, engine.config.vocab_size), request_params(options)
    ids = engine.encode_many(prompts)
    before, start = engine.late_captures, time.perf_counter()
    outputs = OfflineScheduler(engine, scheduler_config(options)).run(ids, params)
    seconds = time.perf_counter() - start
    check_served(outputs, params)
    tokens = [output.token_ids for output in outputs]
    return {
        "seconds": seconds,
        "first_token_s": min(output.metrics.token_times[0] for output in outputs) - start,
        "throughput_tok_s": sum(map(len, tokens)) / seconds,
        "late_captures": engine.late_captures - before,
        "tokens_sha256": tokens_sha256(tokens),
    }


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """Return the result of ``call`` and its duration in seconds, including the GPU work that it launched."""
    start = time.perf_counter()
    made = call()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return made, time.perf_counter() - start


def construction_s(process: dict[str, Any]) -> float:
    """Return the seconds that ``LLM(...)`` takes: loading, building and warming up."""
    return sum(process["parts_s"][part] for part in ("load", "build", "warm_up"))


def recorded(results: Results) -> list[dict[str, Any]]:
    """Return the figures of each recorded process; raise ``RecordError`` if there are none."""
    return results.figures("first_request", "processes")


def run_ratio(process: dict[str, Any]) -> float:
    """Return the throughput of the first run divided by that of the third."""
    first, *_, third = process["runs"]
    return first["throughput_tok_s"] / third["throughput_tok_s"]


def told(process: dict[str, Any]) -> str:
    """Describe the figures of a process in one line."""
    runs = ", ".join(f"{run['throughput_tok_s']:,.0f}" for run in process["runs"])
    way = "warm-up" if process["warm_up"] else "no warm-up"
    return f"{way}, {process['cache']} cache: {construction_s(process):.1f} s to construct; {runs} tok/s"


def record(asked: Asked) -> Iterator[Record]:
    """Measure processes with and without a warm-up, each with an empty and with a filled kernel cache."""
    options, processes = asked.benchmark_options(WORKLOAD.id), []
    for warm_up in asked["repeats"] * (True, False):
        with tempfile.TemporaryDirectory(prefix="rosellm-kernels-") as folder:
            for cache in CACHES:
                found = first_process(options, warm_up, Path(folder))
                processes.append({"warm_up": warm_up, "cache": cache, **found})
                print(told(processes[-1]), flush=True)
    facts = {"model": asked.model, "workload": WORKLOAD.id, "options": options, "size": asked.size.name}
    yield asked.record("first_request", **facts, figures={"processes": processes})


EXPERIMENTS = [Experiment("first_request", record, {"repeats": 1})]


@command
def main(argv: list[str] | None = None) -> None:
    """Print the figures of this process as JSON.

    argv: when the process was started, 1 or 0 for a warm-up, and options of the scheduler's benchmark.
    """
    started, warm_up, *options = sys.argv[1:] if argv is None else argv
    figures = first_figures(BENCHMARK.parse_options(options), warm_up == "1", float(started))
    print(json.dumps(figures))
