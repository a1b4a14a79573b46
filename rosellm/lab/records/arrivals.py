"""Measure requests that arrive over time: runs at fractions of the engine's capacity, and step times.

- ``arrivals``: capacity is the requests per second that a streaming engine serves when requests of workload
  W8's lengths all arrive at once. Each run at a fraction of it is one of ``benchmark_streaming
  --request-rate``, and all use the same engine.
- ``long_prompt``: the inter-token latency of running requests while a prompt of 16,000 tokens is prefilled,
  whole and in chunks of one or several sizes.
- ``long_prompt_joined``: the same, with prompts joined with decode steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from rosellm.bench.arrivals import Arrival, poisson_times
from rosellm.bench.benchmark_streaming import BENCHMARK
from rosellm.bench.job import Job, choose_recipe, make_engine, scheduler_config
from rosellm.bench.prompts import make_prompts, new_tokens, request_params
from rosellm.bench.record import engine_facts
from rosellm.bench.workloads import WORKLOADS, Workload
from rosellm.errors import PromptError
from rosellm.lab.records.experiment import Asked, Experiment, Record
from rosellm.lab.records.records import Results
from rosellm.lab.records.serving_times import ServingTimes, fit_serving_times, measure_serving_times
from rosellm.lab.records.watched_step import Begun, watched
from rosellm.models.loading import AnyTokenizer
from rosellm.models.model import Transformer
from rosellm.roseinfer.cache.kv_blocks import blocks_for
from rosellm.roseinfer.engine import Engine

WORKLOAD = WORKLOADS["W8"]
SIZES = ("prompt_tokens", "min_prompt_tokens", "max_new_tokens", "min_new_tokens", "max_batch_size")
SWITCHES = ("--no-prefix-cache", "--no-stop-on-eos", "--pretok")
BEST = ("--paged-attn", "--cuda-graph")  # selects the device's best rung
SHARES = (0.5, 0.8, 0.95)
SECONDS = 5  # of arrivals at each rate
LIMITS_S = 0.1, 0.02  # goodput's limits on TTFT and ITL
ROUNDS = 4  # requests per slot in the capacity run
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)  # batch sizes whose steps are timed
FEW_PLACES = 16
LONG_TOKENS, LONG_CHUNK, LONG_AFTER_MS, BLOCK_SIZE = 16_000, 512, 200, 64
LONG_RUNNING = Workload("long", 32, 256, max_batch_size=33, prompt_tokens=64)  # runs during the long prompt
LONG_RECORDS = {"long_prompt": None, "long_prompt_joined": "one_pass"}  # rungs; None: the best


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


def live_run(engine: Engine, options: Sequence[str], limits_s: tuple[float, float]) -> dict[str, Any]:
    """Run ``benchmark_streaming`` once on ``engine``, and return its figures.

    options: as from :func:`streaming_options`.
    limits_s: goodput's limits on TTFT and ITL in seconds; infinity for no limit.
    """
    limits = zip(("--ttft-limit-ms", "--itl-limit-ms"), limits_s, strict=True)
    own = [f"{name}={seconds * 1e3}" for name, seconds in limits if seconds < math.inf]
    asked = BENCHMARK.parse_options([*options, *own])
    (run,) = BENCHMARK.runs(asked).values()
    prompts = make_prompts(asked, engine.config.vocab_size)
    return run(Job(engine, prompts, request_params(asked), scheduler_config(asked)))


def watched_run(
    engine: Engine, options: Sequence[str], limits_s: tuple[float, float]
) -> tuple[dict[str, Any], list[Begun]]:
    """Return the figures of :func:`live_run`, and the steps that the engine ran."""
    with watched(engine) as steps:
        return live_run(engine, options, limits_s), steps


def times_of(engine: Engine, *runs: list[Begun]) -> ServingTimes:
    """Fit step times to the steps of watched runs.

    With at most ``FEW_PLACES`` slots, fits at every batch size, otherwise at those in ``BATCHES``.
    """
    most = engine.max_batch_size
    return fit_serving_times(engine, runs, range(1, most + 1) if most <= FEW_PLACES else batches_to(most))


def batches_to(most: int) -> list[int]:
    """Return the batch sizes in ``BATCHES`` up to ``most``."""
    return [rows for rows in BATCHES if rows <= most]


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
