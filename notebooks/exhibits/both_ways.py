"""Serve the same requests with prompts apart from the decode steps and joined with them."""

from __future__ import annotations

from argparse import Namespace
from time import perf_counter
from typing import Any, NamedTuple

import torch

from rosellm.bench.benchmark_streaming import BENCHMARK as STREAMING
from rosellm.bench.job import make_engine, scheduler_config
from rosellm.bench.prompts import make_prompts, request_params
from rosellm.bench.workloads import Workload
from rosellm.lab.records.arrivals import streaming_options
from rosellm.models.model import Transformer
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.recipe import RECIPES, Recipe, best_rung
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.scheduler import OfflineScheduler

_passes = load_exhibit("passes")
Pass, passes_of = _passes.Pass, _passes.passes_of


def ways_of(device: torch.device) -> dict[str, Recipe]:
    """Return the device's best recipe, and the one whose prompts join the decode step."""
    return {"apart": RECIPES[best_rung(device)], "joined": RECIPES["one_pass"]}


class LiveRun(NamedTuple):
    """A run's passes, each request's new tokens, and its duration."""

    passes: list[Pass]
    tokens: list[list[int]]
    seconds: float


def both_ways(gpt: Transformer, workload: Workload) -> dict[str, LiveRun]:
    """Serve a workload's requests both ways, one after the other, each after a warm-up run."""
    typed = streaming_options(workload, workload.num_requests)
    options = STREAMING.parse_options(typed)
    prompts, params = make_prompts(options, gpt.config.vocab_size), request_params(options)
    sizes = gpt, None, max(map(len, prompts)) + options.max_new_tokens
    engines = {way: make_engine(options, one, *sizes) for way, one in ways_of(gpt.device).items()}
    return {way: _live_run(engine, options, prompts, params) for way, engine in engines.items()}


def _live_run(engine: Engine, options: Namespace, prompts: Any, params: list[SamplingParams]) -> LiveRun:
    def serve() -> list[list[int]]:
        outputs = OfflineScheduler(engine, scheduler_config(options)).run(prompts, params)
        return [output.token_ids for output in outputs]

    tokens = serve()
    start = perf_counter()
    passes = passes_of(engine, serve)
    return LiveRun(passes, tokens, perf_counter() - start)
