"""Measure goodput against the budget of prefill chunks, at several loads, with prompts apart and joined.

Requests have workload W8's lengths, but every 16th has a prompt of 4,096 tokens. Capacity is the requests per
second that are served when all arrive at once, apart and without chunks. Each cell is one run at a share of
it. Apart, prompts run in steps of their own; joined, up to 1,024 prompt tokens share the decode step's pass
(``one_pass``), and more, as the larger chunks of a long prompt, run in their own step. All cells of a load
serve the same requests, which arrive at the same times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from rosellm.bench.arrivals import Arrival, poisson_times
from rosellm.bench.benchmark_streaming import serve
from rosellm.bench.job import Job
from rosellm.bench.record import distribution, engine_facts
from rosellm.bench.workloads import MODERN_MODEL, Workload
from rosellm.errors import PromptError
from rosellm.lab.records.arrivals import ROUNDS, WORKLOAD, arrivals_of, greedy_job, streaming_options
from rosellm.lab.records.experiment import Asked, Experiment, Record
from rosellm.lab.records.sizes import Size
from rosellm.lab.records.turns import each
from rosellm.roseinfer.cache.kv_blocks import blocks_for
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.request import RequestMetrics
from rosellm.roseinfer.serving.admission import SchedulerConfig

NAME = "chunk_budget"
SHARES, CHUNKS = (0.5, 0.8, 0.95), (None, 2048, 512, 128)  # of capacity; tokens
WAYS = {"apart": None, "joined": "one_pass"}  # rungs; None: the best
SECONDS = 7  # of arrivals in each cell
LONG_TOKENS, LONG_EVERY, BLOCK_SIZE = 4096, 16, 64
TTFT_LIMITS_S = 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0
ITL_LIMITS_S = 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.03, 0.05


def requests_of(workload: Workload, n: int, long_tokens: int) -> list[Arrival]:
    """Return ``n`` requests, of which the 2nd, 18th and so on have a long prompt."""
    drawn = arrivals_of(streaming_options(workload, n))
    drawn[1::LONG_EVERY] = [one._replace(prompt_tokens=long_tokens) for one in drawn[1::LONG_EVERY]]
    return drawn


def run_cell(job: Job, times: list[float]) -> dict[str, Any]:
    """Serve the job's requests once, and return :func:`figures_of` them."""
    outputs, lags, start = serve(job, times)
    return figures_of([output.metrics for output in outputs], lags, start)


def figures_of(requests: Sequence[RequestMetrics], lags: Sequence[float], start: float) -> dict[str, Any]:
    """Return the figures of served requests.

    lags: seconds from when each was due to its arrival.
    start: when the run began.

    TTFT runs from when a request was due. ``good[i][j]`` is the number of requests with a TTFT of at most
    ``TTFT_LIMITS_S[i]`` and no gap between two tokens above ``ITL_LIMITS_S[j]``.
    """
    seconds = max(one.token_times[-1] for one in requests) - start
    pairs = zip(requests, lags, strict=True)
    ttft = np.array([one.token_times[0] - one.arrival + lag for one, lag in pairs])
    gap = np.array([max(one.itl, default=0.0) for one in requests])
    return {
        "requests": len(requests),
        "total_time_s": seconds,
        "total_throughput_tok_s": sum(len(one.token_times) for one in requests) / seconds,
        "preemptions": sum(one.preemptions for one in requests),
        **distribution("ttft", ttft, (50, 99)),
        **distribution("itl", (own for one in requests for own in one.itl), (50, 99)),
        "good": [[int(((ttft <= i) & (gap <= j)).sum()) for j in ITL_LIMITS_S] for i in TTFT_LIMITS_S],
    }


def goodput(cell: Mapping[str, Any], ttft_s: float, itl_s: float) -> float:
    """Return the requests per second of a cell that kept two of the recorded limits."""
    return cell["good"][TTFT_LIMITS_S.index(ttft_s)][ITL_LIMITS_S.index(itl_s)] / cell["total_time_s"]


def record(asked: Asked) -> Iterator[Record]:
    """Measure the capacity, and then every cell on the same two engines."""
    workload, long_tokens = asked.workload(WORKLOAD.id), _long_tokens(asked.size)
    most = workload.max_batch_size
    at_once, config = requests_of(workload, ROUNDS * most, long_tokens), SchedulerConfig(max_batch_size=most)
    engines = _engines(asked, at_once[:most], long_tokens + workload.max_new_tokens)
    for engine in engines.values():
        serve(greedy_job(engine, at_once[:most], config))  # warm-up
    whole = run_cell(greedy_job(engines["apart"], at_once, config), [0.0] * len(at_once))
    capacity, cells = len(at_once) / whole["total_time_s"], []
    for share, chunk, way in each(NAME, product(SHARES, CHUNKS, WAYS)):
        rate = share * capacity
        requests = requests_of(workload, max(1, min(asked.size.requests, round(SECONDS * rate))), long_tokens)
        job = greedy_job(engines[way], requests, replace(config, prefill_chunk=chunk))
        figures = run_cell(job, poisson_times(rate, len(requests), seed=0))
        cells.append({"share": share, "rate": rate, "chunk": chunk, "way": way, **figures})
    facts = {"model": asked.model, "size": asked.size.name, "lengths_of": WORKLOAD.id}
    facts |= {"long_tokens": long_tokens, "long_every": LONG_EVERY, **engine_facts(engines["apart"])}
    figures = {"capacity_req_s": capacity, "at_once": whole, "cells": cells}
    yield asked.record(NAME, **facts, ttft_limits_s=TTFT_LIMITS_S, itl_limits_s=ITL_LIMITS_S, figures=figures)


def _engines(asked: Asked, requests: list[Arrival], max_model_len: int) -> dict[str, Engine]:
    """Return way → engine, with KV blocks for one and a half times a full batch, ``requests``."""
    blocks = 3 * sum(blocks_for(one.prompt_tokens + one.new_tokens, BLOCK_SIZE) for one in requests) // 2
    sizes = {"max_batch_size": len(requests), "max_model_len": max_model_len, "num_kv_blocks": blocks}
    return {way: Engine(asked.gpt, asked.tokenizer, recipe=rung, **sizes) for way, rung in WAYS.items()}


def _long_tokens(size: Size) -> int:
    return min(LONG_TOKENS, 4 * size.prompt)


def _refuse(asked: Asked) -> None:
    needed = _long_tokens(asked.size) + asked.workload(WORKLOAD.id).max_new_tokens
    if needed > (there := asked.arch.n_positions):
        raise PromptError(f"{NAME} needs {needed} positions; the model has {there}")


EXPERIMENTS = [Experiment(NAME, record, model=MODERN_MODEL, own_folder=True, refuse=_refuse)]
