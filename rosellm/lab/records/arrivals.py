"""Requests that arrive over time: the options of ``benchmark_streaming``, its runs, and its step times."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from rosellm.bench.arrivals import Arrival, poisson_times
from rosellm.bench.benchmark_streaming import BENCHMARK
from rosellm.bench.job import Job, choose_recipe, make_engine, scheduler_config
from rosellm.bench.prompts import make_prompts, new_tokens, request_params
from rosellm.bench.workloads import WORKLOADS, Workload
from rosellm.lab.records.serving_times import ServingTimes, fit_serving_times
from rosellm.lab.records.watched_step import Begun, watched
from rosellm.models.loading import AnyTokenizer
from rosellm.models.model import Transformer
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig

WORKLOAD = WORKLOADS["W8"]
SIZES = ("prompt_tokens", "min_prompt_tokens", "max_new_tokens", "min_new_tokens", "max_batch_size")
SWITCHES = ("--no-prefix-cache", "--no-stop-on-eos", "--pretok")
BEST = ("--paged-attn", "--cuda-graph")  # selects the device's best rung
ROUNDS = 4  # requests per slot in the capacity run
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)  # batch sizes whose steps are timed
FEW_PLACES = 16


def streaming_options(
    workload: Workload, num_requests: int, rate: float | None = None, rung: str | None = None
) -> list[str]:
    """Return options for ``benchmark_streaming`` with requests of the workload's lengths.

    rate: mean requests per second; None for all at once.
    rung: None for the device's best.
    """
    sizes = {name: value for name, value in workload.flags().items() if name in SIZES and value is not None}
    sizes |= {"num_requests": num_requests, "request_rate": rate or "inf"}
    given = [(f"--{name.replace('_', '-')}", str(value)) for name, value in sizes.items()]
    return [*chain.from_iterable(given), *(BEST if rung is None else ("--rung", rung)), *SWITCHES]


def arrivals_of(options: Sequence[str]) -> list[Arrival]:
    """Return the requests that ``benchmark_streaming`` sends for these options; all at 0 without a rate."""
    asked = BENCHMARK.parse_options(list(options))
    n, rate = asked.num_requests, asked.request_rate
    times = [0.0] * n if rate is None else poisson_times(rate, n, asked.seed)
    prompts = make_prompts(asked, vocab_size=2)
    rows = zip(times, map(len, prompts), new_tokens(asked), strict=True)
    return [Arrival(*row) for row in rows]


def streaming_engine(gpt: Transformer, tokenizer: AnyTokenizer, options: Sequence[str]) -> Engine:
    """Build the engine that ``benchmark_streaming`` would build for these options."""
    asked = BENCHMARK.parse_options([*options, "--device", gpt.device.type])
    return make_engine(
        asked, choose_recipe(asked), gpt, tokenizer, asked.prompt_tokens + asked.max_new_tokens
    )


def greedy_job(engine: Engine, requests: Sequence[Arrival], config: SchedulerConfig) -> Job:
    """Return a job of greedy requests of these lengths, with seeded random prompts."""
    draw, vocab_size = np.random.default_rng(0), engine.config.vocab_size
    prompts = [draw.integers(vocab_size, size=one.prompt_tokens).tolist() for one in requests]
    params = [SamplingParams(temperature=0.0, max_tokens=one.new_tokens, ignore_eos=True) for one in requests]
    return Job(engine, prompts, params, config)


def live_run(engine: Engine, options: Sequence[str]) -> dict[str, Any]:
    """Run ``benchmark_streaming`` once on ``engine``, and return its figures.

    options: as from :func:`streaming_options`.
    """
    asked = BENCHMARK.parse_options(list(options))
    (run,) = BENCHMARK.runs(asked).values()
    prompts = make_prompts(asked, engine.config.vocab_size)
    return run(Job(engine, prompts, request_params(asked), scheduler_config(asked)))


def watched_run(engine: Engine, options: Sequence[str]) -> tuple[dict[str, Any], list[Begun]]:
    """Return the figures of :func:`live_run`, and the steps that the engine ran."""
    with watched(engine) as steps:
        return live_run(engine, options), steps


def times_of(engine: Engine, *runs: list[Begun]) -> ServingTimes:
    """Fit step times to the steps of watched runs.

    With at most ``FEW_PLACES`` slots, fits at every batch size, otherwise at those in ``BATCHES``.
    """
    most = engine.max_batch_size
    return fit_serving_times(engine, runs, range(1, most + 1) if most <= FEW_PLACES else batches_to(most))


def batches_to(most: int) -> list[int]:
    """Return the batch sizes in ``BATCHES`` up to ``most``."""
    return [rows for rows in BATCHES if rows <= most]
