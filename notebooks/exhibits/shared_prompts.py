"""Measure what the prefix cache saves for prompts that begin alike: first tokens, and whole batches.

A prompt is a number of shared tokens and ``own`` tokens of its own. All ways run in alternation on one
engine: "cold" computes whole prompts, "filled" finds the shared tokens cached by an earlier request, and
"empty" begins with an empty cache, which the batch's first request fills. The workload PFX of vLLM's
comparison is one of the batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from rosellm.bench.job import check_served, prepare_run
from rosellm.bench.workloads import MODERN_MODEL
from rosellm.lab.records.bench import make_prompts
from rosellm.lab.records.experiment import Asked, Experiment, Record
from rosellm.lab.records.records import number
from rosellm.lab.records.turns import in_turns
from rosellm.roseinfer.cache.kv_blocks import blocks_for
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.scheduler import OfflineScheduler

NAME = "prefix_cache"
SHARED = (0, 256, 512, 1024, 2048, 4096, 8192)  # tokens
OWN, NEW = 64, 64  # tokens of each request: after the shared ones, and generated
BATCH = 32  # requests, at each number of shared tokens
PFX_REQUESTS, PFX_SHARED = 256, 1024
COLD, EMPTY, FILLED = "cold", "empty", "filled"
BLOCK_SIZE, TURNS = 64, 7

Run = dict[str, float]
Figures = dict[str, dict[str, list[float]]]


class Prompts:
    """Prompts that begin with the same tokens: every call makes as many new ones as asked."""

    def __init__(self, shared: int, own: int, vocab_size: int) -> None:
        (self.prefix,) = make_prompts(1, shared, vocab_size)
        self.own, self.vocab_size, self._made = own, vocab_size, 0

    def __call__(self, n: int) -> list[list[int]]:
        self._made += 1
        return [self.prefix + own for own in make_prompts(n, self.own, self.vocab_size, seed=self._made)]


def serve(engine: Engine, prompts: list[list[int]], new_tokens: int) -> Run:
    """Serve all prompts at once; return the run's seconds, tokens per second, and cached prompt tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    start = perf_counter()
    outputs = OfflineScheduler(engine).run(prompts, params)
    seconds = perf_counter() - start
    check_served(outputs, params)
    cached = sum(output.num_cached_tokens for output in outputs)
    return {"seconds": seconds, "tok_s": len(prompts) * new_tokens / seconds, "cached_tokens": cached}


def run_way(engine: Engine, prompts: Prompts, n: int, new_tokens: int, way: str) -> Run:
    """Serve ``n`` new prompts in one of the ways; only their own run is timed."""
    prepare_run(engine)
    if way == FILLED:
        serve(engine, prompts(1), 1)
    with without_cache(engine) if way == COLD else nullcontext():
        return serve(engine, prompts(n), new_tokens)


@contextmanager
def without_cache(engine: Engine) -> Iterator[None]:
    """Let an engine, whose cache is empty, neither keep nor find prompts."""
    cache, engine.prefix_cache = engine.prefix_cache, None
    try:
        yield
    finally:
        engine.prefix_cache = cache


def compare_ways(
    engine: Engine, prompts: Prompts, n: int, new_tokens: int, ways: tuple[str, ...], turns: int
) -> Figures:
    """Serve ``n`` prompts in each of the ways, in alternation, after a warm-up turn.

    Returns way → figure → its value in each turn.
    """
    sides = {way: partial(run_way, engine, prompts, n, new_tokens, way) for way in ways}
    found = in_turns(sides, turns)
    return {way: {name: [run[name] for run in runs] for name in runs[0]} for way, runs in found.items()}


def first_tokens(engine: Engine, shared: list[int], own: int, turns: int) -> dict[str, Figures]:
    """Time single requests until their first token: shared tokens → way → figures of each turn."""
    made = {n: Prompts(n, own, engine.config.vocab_size) for n in shared}
    return {str(n): compare_ways(engine, made[n], 1, 1, (COLD, FILLED), turns) for n in shared}


def batches(
    engine: Engine, requests: int, shared: list[int], own: int, new_tokens: int, turns: int
) -> dict[str, Figures]:
    """Serve batches of requests that arrive at once: shared tokens → way → figures of each turn."""
    made = {n: Prompts(n, own, engine.config.vocab_size) for n in shared}
    ways = COLD, EMPTY, FILLED
    return {str(n): compare_ways(engine, made[n], requests, new_tokens, ways, turns) for n in shared}


def middle(figures: Figures, figure: str = "seconds") -> dict[str, float]:
    """Return way → median of one figure over the turns."""
    return {way: median(found[figure]) for way, found in figures.items()}


def measure(asked: Asked) -> Iterator[Record]:
    """Measure all figures on one engine; yield the record so far after each part."""
    size, turns = asked.size, asked["repeats"]
    own, new = min(OWN, size.prompt), min(NEW, size.new_tokens)
    most = asked.gpt.config.n_positions - own - new
    shared = sorted({min(n, size.prompt, most) for n in SHARED})
    requests, of_pfx = min(BATCH, size.requests), min(PFX_REQUESTS, size.requests)
    pfx = min(PFX_SHARED, shared[-1])
    longest = blocks_for(shared[-1] + own + new, BLOCK_SIZE)
    engine = Engine(
        asked.gpt,
        max_batch_size=max(requests, of_pfx),
        max_model_len=shared[-1] + own + new,
        block_size=BLOCK_SIZE,
        num_kv_blocks=max(requests * longest, of_pfx * blocks_for(pfx + own + new, BLOCK_SIZE)) + longest,
        prefix_cache=True,
    )
    figures: dict[str, Any] = {
        "rung": engine.rung,
        "block_size": BLOCK_SIZE,
        "num_kv_blocks": engine.num_kv_blocks,
        "own_tokens": own,
        "new_tokens": new,
        "requests": requests,
    }
    facts = {"model": asked.model, "load_format": asked.load_format, "size": size.name}
    facts["dtype"] = str(asked.gpt.dtype).removeprefix("torch.")
    record = asked.record(NAME, **facts, figures=figures)
    figures["first_token"] = first_tokens(engine, shared, own, turns)
    yield record
    figures["batch"] = batches(engine, requests, shared, own, new, turns)
    yield record
    runs = batches(engine, of_pfx, [pfx], own, new, turns)
    figures["PFX"] = {"requests": of_pfx, "shared": pfx, "runs": runs[str(pfx)]}
    yield record
    for n, ways in figures["first_token"].items():
        print(f"{n} shared tokens, first token, ms: {_told(ways, 'seconds', 1e3)}")
    for n, ways in figures["batch"].items():
        print(f"{n} shared tokens, {requests} requests, tok/s: {_told(ways, 'tok_s')}")
    print(f"PFX, tok/s: {_told(figures['PFX']['runs'], 'tok_s')}")


def _told(figures: Figures, figure: str, scale: float = 1) -> str:
    return " · ".join(f"{way} {number(scale * value)}" for way, value in middle(figures, figure).items())


EXPERIMENTS = [Experiment(NAME, measure, {"repeats": TURNS}, model=MODERN_MODEL)]
