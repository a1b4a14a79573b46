"""Time each part of a fresh process and the first runs of its engine; print one JSON object.

Takes the options of the scheduler's benchmark, --no-warm-up, and when the process was started.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from rosellm.bench.benchmark_scheduler import BENCHMARK
from rosellm.bench.job import check_positions, choose_recipe, scheduler_config
from rosellm.bench.prompts import make_prompts, request_params
from rosellm.bench.record import engine_facts, tokens_sha256
from rosellm.bench.runs import check_served
from rosellm.command_line import command
from rosellm.models.loading import load_parts
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.serving.scheduler import OfflineScheduler

RUNS = 3

T = TypeVar("T")


def first_figures(options: Namespace, warm_up: bool, started: float) -> dict[str, Any]:
    """Return the seconds of each part before the first request and of the first runs, and the graph count.

    started: ``time.time()`` when the process was started. The engine is built as by ``LLM``: all its parts,
    then, with ``warm_up``, ``Engine.warm_up``.
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
    """Serve the options' requests, all known upfront; return seconds, throughput, and late captures."""
    prompts, params = make_prompts(options, engine.config.vocab_size), request_params(options)
    ids = engine.encode_many(prompts)
    check_positions(options, max(map(len, ids)), engine.config.n_positions)
    before, start = engine.late_captures, time.perf_counter()
    outputs = OfflineScheduler(engine, scheduler_config(options)).run(ids, params)
    seconds = time.perf_counter() - start
    check_served(outputs)
    tokens = [output.token_ids for output in outputs]
    return {
        "seconds": seconds,
        "first_token_s": min(output.metrics.token_times[0] for output in outputs) - start,
        "throughput_tok_s": sum(map(len, tokens)) / seconds,
        "late_captures": engine.late_captures - before,
        "tokens_sha256": tokens_sha256(tokens),
    }


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """Return the result of ``call`` and its seconds, including GPU work that it launched."""
    start = time.perf_counter()
    made = call()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return made, time.perf_counter() - start


@command
def main(argv: list[str] | None = None) -> None:
    """Print the figures of this process."""
    now = time.time()
    parser = ArgumentParser(add_help=False)
    parser.add_argument("--started", type=float, default=now)
    parser.add_argument("--warm-up", action=BooleanOptionalAction, default=True)
    own, rest = parser.parse_known_args(argv)
    print(json.dumps(first_figures(BENCHMARK.parse_options(rest), own.warm_up, own.started)))


if __name__ == "__main__":
    sys.exit(main())
