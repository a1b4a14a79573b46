"""Prompts apart from the decode step and joined with it: a run here, tables of the record, its verdict."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from rosellm.bench.benchmark_streaming import BENCHMARK as STREAMING
from rosellm.bench.job import make_engine, scheduler_config
from rosellm.bench.prompts import make_prompts as requested_prompts, request_params
from rosellm.bench.workloads import Workload
from rosellm.lab.records.arrivals import streaming_options
from rosellm.lab.records.records import Results, percent_change
from rosellm.lab.records.verdicts import Verdict
from rosellm.models.model import Transformer
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.scheduler import OfflineScheduler

recording, _passes = load_exhibit("one_pass_runs"), load_exhibit("passes")
Pass, passes_of = _passes.Pass, _passes.passes_of
WAYS = recording.APART, recording.JOINED
BESIDE_HEADS = ["rows", "prompt tokens", "apart, µs", "joined, µs", "change"]
LONG_HEADS = ["a long prompt, ms", "", "others' ITL meanwhile, p50", "p99", "its TTFT"]
LONG_KEYS = "itl_beside_p50_s", "itl_beside_p99_s", "long_prompt_ttft_s"


def recorded(results: Results) -> dict[str, dict[str, Any]]:
    """Return model → the figures of its record ``one_pass``."""
    return {model: record["figures"] for model, record in results.by_model("one_pass").items()}


def beside_rows(figures: Mapping[str, Any]) -> list[list[Any]]:
    """Return rows for a decode step plus a prompt, by rows and prompt tokens: medians of the turns."""
    rows = []
    for batch, lengths in figures["beside_us"].items():
        for tokens, both in lengths.items():
            apart, joined = (median(both[way]) for way in WAYS)
            rows.append([int(batch), int(tokens), apart, joined, percent_change(apart, joined)])
    return rows


def long_rows(figures: Mapping[str, Any]) -> list[list[Any]]:
    """Return rows of latencies during a long prompt, medians of the turns."""
    both = figures["long_prompt"]
    return [
        [kind, way, *(both[way][kind]["medians"][key] * 1e3 for key in LONG_KEYS)]
        for kind in ("chunked", "whole")
        for way in WAYS
    ]


class LiveRun(NamedTuple):
    """A run's passes, each request's new tokens, and its duration."""

    passes: list[Pass]
    tokens: list[list[int]]
    seconds: float


def both_ways(gpt: Transformer, workload: Workload) -> dict[str, LiveRun]:
    """Serve a workload's requests both ways, one after the other, each after a warm-up run."""
    typed = streaming_options(workload, workload.num_requests)
    options = STREAMING.parse_options(typed)
    prompts, params = requested_prompts(options, gpt.config.vocab_size), request_params(options)
    sizes = gpt, None, max(map(len, prompts)) + options.max_new_tokens
    engines = {way: make_engine(options, one, *sizes) for way, one in recording.ways_of(gpt.device).items()}
    return {way: _live_run(engine, options, prompts, params) for way, engine in engines.items()}


def _live_run(engine: Engine, options: Namespace, prompts: Any, params: list[SamplingParams]) -> LiveRun:
    def serve() -> list[list[int]]:
        outputs = OfflineScheduler(engine, scheduler_config(options)).run(prompts, params)
        return [output.token_ids for output in outputs]

    tokens = serve()
    start = perf_counter()
    passes = passes_of(engine, serve)
    return LiveRun(passes, tokens, perf_counter() - start)


def told_verdict(model: str, figures: Mapping[str, Any], predicted: tuple[float, float]) -> str:
    """State the record's verdict, and whether the gain lies in the predicted range."""
    found, (least, most) = verdict_of(figures), predicted
    kept = {1: "kept", -1: "not kept", 0: "left aside"}[found.sign]
    inside = "as" if least <= found.ratio - 1 <= most else "not as"
    return (
        f"**{model}: {kept}.** Joined, {found.workload} changes by {found.change} ({found.word}), {inside} "
        f"predicted: +{least:.0%} to +{most:.0%}."
    )


def verdict_of(figures: Mapping[str, Any]) -> Verdict:
    """Return the verdict on whole runs, prompts apart versus joined, measured in turns in one process."""
    before, after = (
        [run["total_throughput_tok_s"] for run in figures["runs"][way]["repeats"]] for way in WAYS
    )
    return Verdict(recording.WORKLOAD.id, before, after)
