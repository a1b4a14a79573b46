"""Measure requests that arrive over time: runs at fractions of the engine's capacity, and step times.

- ``arrivals``: capacity is the requests per second that a streaming engine serves when requests of workload
  W8's lengths all arrive at once. Each run at a fraction of it is one of ``benchmark_streaming
  --request-rate``, and all use the same engine.
- ``long_prompt``: the inter-token latency of running requests while a prompt of 16,000 tokens is prefilled,
  whole and in chunks of one or several sizes.
- ``long_prompt_joined``: the same, with prompts joined with decode steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rosellm.bench.arrivals import Arrival
from rosellm.bench.benchmark_streaming import BENCHMARK, run_streaming
from rosellm.bench.record import engine_facts
from rosellm.bench.workloads import Workload
from rosellm.errors import PromptError
from rosellm.lab.records.arrivals import (
    ROUNDS,
    WORKLOAD,
    arrivals_of,
    batches_to,
    greedy_job,
    live_run,
    streaming_engine,
    streaming_options,
)
from rosellm.lab.records.experiment import Asked, Experiment, Record
from rosellm.lab.records.records import Results
from rosellm.lab.records.serving_times import ServingTimes, fit_serving_times
from rosellm.lab.records.watched_step import watched
from rosellm.roseinfer.cache.kv_blocks import blocks_for
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.serving.admission import SchedulerConfig

SHARES = (0.5, 0.8, 0.95)
SECONDS = 5  # of arrivals at each rate
TIMED_ROUNDS = 3  # requests per slot of the batch whose steps are timed
LIMITS_S = 0.1, 0.02  # goodput's limits on TTFT and ITL
LONG_TOKENS, LONG_CHUNK, LONG_AFTER_MS, BLOCK_SIZE = 16_000, 512, 200, 64
LONG_RUNNING = Workload("long", 32, 256, max_batch_size=33, prompt_tokens=64)  # runs during the long prompt
LONG_RECORDS = {"long_prompt": None, "long_prompt_joined": "one_pass"}  # rungs; None: the best


def recorded_servers(results: Results) -> dict[str, dict[str, Any]]:
    """Return model → the figures of its record ``arrivals``, with the engine's ``max_batch_size`` added."""
    records = results.by_model("arrivals")
    return {
        model: {"max_batch_size": one["max_batch_size"], **one["figures"]} for model, one in records.items()
    }


def recorded_long_prompt(results: Results) -> dict[str, dict[str, Any]]:
    """Return model → way to prefill → medians of its recorded runs with a long prompt.

    Ways: ``chunked``, other chunk sizes if recorded (``chunks of 128``), and ``whole``. The prefix
    ``joined,`` means that prompt tokens shared the decode step's passes over the weights.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, joined in zip(LONG_RECORDS, ("", "joined, "), strict=True):
        for model, record in results.by_model(name).items():
            own = {f"{joined}{way}": result["medians"] for way, result in record["results"].items()}
            found.setdefault(model, {}).update(own)
    return found


def long_prompt_options(
    tokens: int = LONG_TOKENS,
    chunks: Sequence[int] = (LONG_CHUNK,),
    running: Workload | None = None,
    after_ms: int | None = None,
    rung: str | None = None,
) -> list[str]:
    """Return options for ``benchmark_streaming`` in which a long prompt arrives while others generate.

    tokens: length of the long prompt.
    chunks: chunk sizes in tokens to measure.
    running: the other requests; None for ``LONG_RUNNING``. They generate one extra token per chunk of the
        smallest size, so that they still run during the last chunk.
    after_ms: arrival of the long prompt in ms; None for ``LONG_AFTER_MS``.
    rung: None for the device's best.
    """
    running = running or LONG_RUNNING
    running = replace(running, max_new_tokens=running.max_new_tokens + -(-tokens // min(chunks)))
    longest = running.max_new_tokens + (running.prompt_tokens or 1)
    blocks = blocks_for(tokens + 1, BLOCK_SIZE) + 2 * running.num_requests * blocks_for(longest, BLOCK_SIZE)
    given: dict[str, Any] = {
        "--long-prompt-tokens": tokens,
        "--long-prompt-after-ms": LONG_AFTER_MS if after_ms is None else after_ms,
        "--prefill-chunk": chunks[0],
        "--num-kv-blocks": blocks,
        "--warmup-runs": 1,
        "--repeat-runs": 2,
    }
    if chunks[1:]:
        given["--long-prompt-chunks"] = ",".join(map(str, chunks[1:]))
    own = [str(text) for pair in given.items() for text in pair]
    return streaming_options(running, running.num_requests, rung=rung) + own


def measure_serving_times(
    engine: Engine, requests: Sequence[Arrival], batches: Sequence[int]
) -> ServingTimes:
    """Serve greedy requests at each batch size in turn, and fit the durations of the engine's steps.

    engine: must be idle.
    requests: prompt and output lengths, through which the served requests cycle; all arrive at once.
    batches: the batch sizes.
    """
    runs = []
    for rows in batches:
        several = [requests[i % len(requests)] for i in range(TIMED_ROUNDS * rows)]
        job = greedy_job(engine, several, SchedulerConfig(max_batch_size=rows))
        with watched(engine) as steps:
            run_streaming(job)
        runs.append(steps)
    return fit_serving_times(engine, runs, batches)


def record(asked: Asked) -> Iterator[Record]:
    """Measure the engine's capacity, a run at each fraction of it in ``SHARES``, and its step times."""
    workload = asked.workload(WORKLOAD.id)
    most = workload.max_batch_size
    few, many = (streaming_options(workload, n) for n in (most, ROUNDS * most))
    engine = streaming_engine(asked.gpt, asked.tokenizer, few)
    live_run(engine, few, LIMITS_S)  # warm-up
    at_once = live_run(engine, many, LIMITS_S)
    capacity, runs = ROUNDS * most / at_once["total_time_s"], []
    for share in SHARES:
        rate = share * capacity
        options = streaming_options(workload, max(1, round(SECONDS * rate)), rate)
        run = live_run(engine, options, LIMITS_S)
        runs.append({"share": share, "rate": rate, "options": options, **run})
        ttft, itl = (run[name] * 1e3 for name in ("ttft_p99_s", "itl_p99_s"))
        print(f"{share:.0%} of capacity: p99 of TTFT {ttft:.2f} ms, of ITL {itl:.2f} ms", flush=True)
    times = measure_serving_times(engine, arrivals_of(few), batches_to(most))
    figures = {
        "capacity_req_s": capacity,
        "at_once": at_once,
        "limits_s": LIMITS_S,
        "runs": runs,
        "times": times.as_dict(),
    }
    facts = {"model": asked.model, "size": asked.size.name, "lengths_of": WORKLOAD.id}
    yield asked.record("arrivals", **facts, **engine_facts(engine), figures=figures)


def record_long_prompt(asked: Asked, rung: str | None) -> Iterator[Record]:
    """Run ``benchmark_streaming`` with a long prompt on a rung, or on the device's best if it is None."""
    given = long_prompt_options(chunks=asked["chunks"], rung=rung)
    of_model = "--hf-model-id", asked.model, "--load-format", asked.load_format, "--device", asked.device
    yield BENCHMARK.measure(BENCHMARK.parse_options([*given, *of_model]), asked.gpt, asked.tokenizer)


def _refuse(asked: Asked) -> None:
    options = BENCHMARK.parse_options(long_prompt_options())
    needed = max(one.prompt_tokens + one.new_tokens for one in options.trace)
    if needed > (there := asked.arch.n_positions):
        raise PromptError(f"a long prompt needs {needed} positions; the model has {there}")


EXPERIMENTS = [
    Experiment("arrivals", record),
    *(
        Experiment(name, partial(record_long_prompt, rung=rung), {"chunks": (LONG_CHUNK,)}, refuse=_refuse)
        for name, rung in LONG_RECORDS.items()
    ),
]
