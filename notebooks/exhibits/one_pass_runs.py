"""Compare prompts that are joined with the decode step with prompts in separate passes, in alternation.

Both ways use the device's best recipe. Measures whole runs of workload W8; the time of a decode step plus a
prompt, by batch size and prompt length; and the inter-token latency of running requests while a long prompt
is prefilled, in chunks and whole.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from rosellm.bench.benchmark_scheduler import BENCHMARK as SCHEDULER
from rosellm.bench.benchmark_streaming import BENCHMARK as STREAMING
from rosellm.bench.job import Job, make_job
from rosellm.bench.record import mode_result
from rosellm.lab.records.arrivals import BEST, WORKLOAD
from rosellm.lab.records.bench import free_memory, make_prompts
from rosellm.lab.records.experiment import Asked, Experiment, Record
from rosellm.lab.records.sizes import Size
from rosellm.lab.records.turns import in_turns
from rosellm.models.loading import AnyTokenizer
from rosellm.models.model import Transformer
from rosellm.roseinfer.cache.kv_blocks import blocks_for
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.recipe import RECIPES, Recipe, best_rung
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import SamplingParams

arrival_runs, passes = load_exhibit("arrival_runs"), load_exhibit("passes")
NAME, JOINED = "one_pass", passes.JOINED
APART = "apart"
ROWS = (8, 64, 256)
CONTEXT, IN_FLIGHT = 256, 6  # cached tokens per sequence; steps in flight
LONG_CHUNK = 128  # for a long prompt of fewer than FEW_TOKENS tokens
FEW_TOKENS = 4096
SOON_MS = 30  # arrival of such a prompt on a GPU, where the running requests take less than 100 ms

Ways = dict[str, Recipe]


def ways_of(device: torch.device) -> Ways:
    """Return the device's best recipe with prompts in separate passes, and with prompts joined."""
    best = RECIPES[best_rung(device)]
    return {APART: best, JOINED: replace(best, exhibit="one_pass")}


def _jobs(options: Namespace, gpt: Transformer, tokenizer: AnyTokenizer, ways: Ways) -> dict[str, Job]:
    """Return a job for each way, each with a separate engine."""

    def build(recipe: Recipe) -> Callable[..., Engine]:
        return lambda *model, **sizes: Engine(*model, **sizes | {"recipe": recipe})

    return {way: make_job(options, gpt, tokenizer, build(recipe)) for way, recipe in ways.items()}


def measure_runs(options: Namespace, jobs: dict[str, Job], turns: int) -> dict[str, dict[str, Any]]:
    """Measure whole runs as ``benchmark_scheduler`` does, and count the passes over the weights of one run.

    turns: number of measured runs of each way.

    Returns way → figures.
    """
    (run,) = SCHEDULER.runs(options).values()
    once = {way: partial(run, job) for way, job in jobs.items()}
    taken = {way: passes.passes_of(job.engine, once[way]) for way, job in jobs.items()}  # also warms up
    found = in_turns(once, turns, warm_up=False)
    return {
        way: {"passes": passes.counted(taken[way]), **mode_result("online", 1, found[way])} for way in jobs
    }


def beside_seconds(engine: Engine, rows: int, context: int, tokens: int, repeats: int) -> list[float]:
    """Time a decode step together with the prefill of one prompt: return the seconds of each repeat.

    rows: number of decoding sequences.
    context: cached tokens per decoding sequence at the beginning.
    tokens: length of the prompt.

    Steps are launched ahead of their results, so that the device does not wait for the host.
    """
    vocabulary, n = engine.config.vocab_size, repeats + IN_FLIGHT
    running = _sequences(engine, make_prompts(rows, context, vocabulary), n + 2)
    engine.prefill(running)
    prompts = _sequences(engine, make_prompts(n, tokens, vocabulary), 1)
    seconds: list[float] = []
    for prompt in prompts:
        engine.begin_decode(running)
        engine.begin_prefill([prompt])
        seconds += [done.seconds for done in engine.step.collect(IN_FLIGHT)]
        for ended in [one for one in prompts if one.is_finished and one.block_ids]:
            engine.release(ended)
    seconds += [done.seconds for done in engine.step.collect()]
    for sequence in running + prompts:
        engine.release(sequence)
    pairs = zip(seconds[::2], seconds[1::2], strict=True)
    return [decode + prefill for decode, prefill in pairs][IN_FLIGHT:]


def _sequences(engine: Engine, prompts: list[list[int]], max_tokens: int) -> list[Sequence]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [engine.make_sequence(prompt, params) for prompt in prompts]


def measure_beside(
    gpt: Transformer, ways: Ways, size: Size, turns: int, repeats: int = 20
) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Time a decode step plus a prompt, for several batch sizes and prompt lengths.

    turns: alternations of the two ways.
    repeats: measurements per turn.

    Returns batch size → prompt tokens → way → the median µs of each turn.
    """
    batches, lengths = size.batches(*ROWS), size.contexts(*load_exhibit("one_pass").JOINED_TOKENS)
    positions = gpt.config.n_positions
    context = min(CONTEXT, size.prompt, positions - repeats - IN_FLIGHT - 3)
    lengths = sorted({min(n, positions - 1) for n in lengths})
    options: dict[str, Any] = {
        "max_batch_size": max(batches) + 2 * IN_FLIGHT,
        "num_kv_blocks": max(batches) * blocks_for(context + repeats + IN_FLIGHT + 2, 64)
        + 2 * IN_FLIGHT * blocks_for(lengths[-1] + 1, 64),
    }
    engines = {way: Engine(gpt, recipe=recipe, **options) for way, recipe in ways.items()}
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for rows in batches:
        for tokens in lengths:
            steps = {
                way: partial(beside_seconds, engine, rows, context, tokens, repeats)
                for way, engine in engines.items()
            }
            own = in_turns(steps, turns, warm_up=False)
            us = {way: [round(median(seconds) * 1e6, 3) for seconds in all_s] for way, all_s in own.items()}
            found.setdefault(str(rows), {})[str(tokens)] = us
    return found


def measure_long_prompt(
    options: Namespace, jobs: dict[str, Job], turns: int
) -> dict[str, dict[str, dict[str, Any]]]:
    """Measure the running requests while a long prompt is prefilled.

    options: parsed options of ``benchmark_streaming``.
    turns: number of measured runs of each way.

    Returns way → "chunked" or "whole" → figures.
    """
    runs = STREAMING.runs(options)
    once = {(way, kind): partial(run, job) for way, job in jobs.items() for kind, run in runs.items()}
    found = in_turns(once, turns)
    return {way: {kind: mode_result(kind, 1, found[way, kind]) for kind in runs} for way in jobs}


def long_prompt_options(gpt: Transformer, size: Size) -> list[str]:
    """Return options for ``benchmark_streaming`` with a long prompt that fits the model's positions."""
    few = min(arrival_runs.LONG_RUNNING.num_requests, size.requests)
    running = replace(arrival_runs.LONG_RUNNING, num_requests=few, max_batch_size=few + 1)
    tokens = min(arrival_runs.LONG_TOKENS, gpt.config.n_positions - running.max_new_tokens)
    chunk = LONG_CHUNK if tokens < FEW_TOKENS else arrival_runs.LONG_CHUNK
    soon = tokens < FEW_TOKENS and gpt.device.type == "cuda"
    after_ms = SOON_MS if soon else arrival_runs.LONG_AFTER_MS
    return arrival_runs.long_prompt_options(tokens, (chunk,), running, after_ms)


def measure(asked: Asked) -> Iterator[Record]:
    """Measure all figures, and yield the complete record."""
    gpt, tokenizer, turns = asked.gpt, asked.tokenizer, asked["repeats"]
    ways = ways_of(gpt.device)
    options = SCHEDULER.parse_options(asked.benchmark_options(WORKLOAD.id, *BEST))
    runs = measure_runs(options, _jobs(options, gpt, tokenizer, ways), turns)
    free_memory()
    beside = measure_beside(gpt, ways, asked.size, turns)
    free_memory()
    of_model = "--hf-model-id", asked.model, "--device", asked.device, "--load-format", asked.load_format
    given = long_prompt_options(gpt, asked.size)
    options = STREAMING.parse_options([*given, *of_model])
    long = measure_long_prompt(options, _jobs(options, gpt, tokenizer, ways), turns)
    facts = {"model": asked.model, "size": asked.size.name, "workload": WORKLOAD.id}
    figures = {
        "ways": {way: recipe.as_dict() for way, recipe in ways.items()},
        "runs": runs,
        "beside_us": beside,
        "long_prompt": {"options": given, **long},
    }
    yield asked.record(NAME, **facts, dtype=str(gpt.dtype).removeprefix("torch."), figures=figures)


EXPERIMENTS = [Experiment("one_pass", measure, {"repeats": 3})]
