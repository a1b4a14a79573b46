"""What drafting gains on three texts: ``python -m rosellm.bench drafts --model rose-tiny``.

Requests continue an edited function, a test class and a licence, greedily; engines without drafts, with
drafts from the text and, if there is one, with a draft model take turns. Of each text, the record also holds
how many tokens every step gave, if all steps draft.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from rosellm.bench.options import add_common_options, count, counts
from rosellm.bench.record import check_writable, engine_facts, new_record, write_record
from rosellm.errors import OptionError
from rosellm.models.checkpoint import DRAFT_OF
from rosellm.models.loading import arch_of
from rosellm.roseinfer.engine import MOST_DRAFTS, Engine
from rosellm.roseinfer.outputs import Done
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.scheduler import OfflineScheduler
from rosellm.roseinfer.steps.pace import Always
from rosellm.roseinfer.steps.speculative import SpeculativeStep
from rosellm.roseinfer.tensor_parallel import load_engine

_COPY = '''def copyfileobj(fsrc, fdst, length=0):
    """copy data from file-like object fsrc to file-like object fdst"""
    if not length:
        length = COPY_BUFSIZE
    fsrc_read = fsrc.read
    fdst_write = fdst.write
    while buf := fsrc_read(length):
        fdst_write(buf)


'''
_RENAMED = _COPY.replace("length", "size")
TEXTS = {
    "edit": _COPY + "".join(_RENAMED.splitlines(keepends=True)[:4]),
    "completion": "import unittest\n\n\nclass TestStack(unittest.TestCase):\n    def test_push(self):\n",
    "prose": "Permission is hereby granted, free of charge, to any person obtaining a copy of this software",
}
WARM_UPS, ROOM = 2, 512  # runs of each kind before those measured; tokens of a text, at most


class CountingScheduler(OfflineScheduler):
    """A scheduler that keeps how many tokens each request gets in each decode step."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.counts: list[list[int]] = []

    def record_step(self, done: Done, n_tokens: int) -> None:
        super().record_step(done, n_tokens)
        if done.kind == "decode" and n_tokens:
            self.counts.append(done.counts or [1] * len(done.sequences))


def add_to(parser: ArgumentParser) -> None:
    """Add this benchmark's options, and :func:`run` as the parser's default ``run``."""
    add = add_common_options(parser, __doc__, run)
    add("--rows", **counts((1, 8, 64), 256), help="requests that run together")
    add("--new-tokens", **count(128), help="tokens of every answer")
    add("--drafts", **count(7, high=MOST_DRAFTS), help="drafted per step and request, at most")
    add("--turns", **count(5), help="measured runs of each engine")
    add("--draft-model", metavar="MODEL", help="default: the shipped model's own; none for other models")


def run(given: Namespace) -> None:
    """Measure, print a table, and write the record if asked for."""
    if given.json:
        check_writable(given.json)
    engines = _engines(given)
    figures: dict[str, Any] = {}
    for name, text in TEXTS.items():
        traces = {
            way: trace(engine, text, given.new_tokens) for way, engine in engines.items() if way != "plain"
        }
        figures[name] = {"tokens of every step": traces, "seconds": {}}
        for rows in given.rows:
            prompts = [f"# {i}\n{text}" for i in range(rows)]
            seconds = in_turns(engines, prompts, given.new_tokens, given.turns)
            figures[name]["seconds"][rows] = seconds
            speeds = {way: rows * given.new_tokens / median(own) for way, own in seconds.items()}
            line = [f"{way} {speed:9.0f} ({speed / speeds['plain']:.2f})" for way, speed in speeds.items()]
            print(f"{name:10} × {rows:3}: tok/s {', '.join(line)}", flush=True)
        for way, counts_of_steps in traces.items():
            each = sum(counts_of_steps) / len(counts_of_steps)
            print(f"{name:10} {way}: {each:.2f} tokens per step that drafts")
    if given.json:
        facts = {"model": Path(given.model).name, "load_format": given.load_format}
        facts |= {"new_tokens": given.new_tokens, "drafts": given.drafts}
        facts |= {"engine": engine_facts(engines["plain"]), "figures": figures}
        write_record(given.json, new_record("drafts", engines["plain"].device, **facts))


def _engines(given: Namespace) -> dict[str, Engine]:
    """Return the engines by how they draft; "plain" does not."""
    source = {"device": given.device, "dtype": given.dtype, "load_format": given.load_format}
    room = arch_of(given.model, given.load_format).n_positions
    source |= {"max_batch_size": max(given.rows), "max_model_len": min(room, ROOM + given.new_tokens)}
    drafts = {"speculative_tokens": given.drafts}
    ways: dict[str, dict[str, Any]] = {"plain": {}, "ngram": {"speculation": "ngram"} | drafts}
    if given.draft_model is not None or given.model in DRAFT_OF:
        ways["draft"] = {"speculation": "draft", "draft_model": given.draft_model} | drafts
    engines = {way: load_engine(given.model, **source, **own) for way, own in ways.items()}
    longest = max(len(ids) for ids in engines["plain"].encode_many(list(TEXTS.values()))) + 8
    if longest + given.new_tokens > engines["plain"].max_model_len:
        most = engines["plain"].max_model_len - longest
        raise OptionError(f"new_tokens is {given.new_tokens}; the longest text leaves room for {most}")
    return engines


def trace(engine: Engine, text: str, new_tokens: int) -> list[int]:
    """Return how many tokens each step gives one request, if all steps draft."""
    assert isinstance(engine.step, SpeculativeStep)
    pace, engine.step.pace = engine.step.pace, Always()
    scheduler = CountingScheduler(engine)
    scheduler.run(engine.encode_many([text]), _params(new_tokens))
    engine.step.pace = pace
    return [n for (n,) in scheduler.counts]


def in_turns(
    engines: dict[str, Engine], prompts: Sequence[str], new_tokens: int, turns: int
) -> dict[str, list[float]]:
    """Return the seconds of every measured run of each engine, from token ids to token ids."""
    seconds: dict[str, list[float]] = {way: [] for way in engines}
    ids = next(iter(engines.values())).encode_many(prompts)
    for turn in range(WARM_UPS + turns):
        for way, engine in engines.items():
            start = perf_counter()
            OfflineScheduler(engine).run(ids, _params(new_tokens))
            if turn >= WARM_UPS:
                seconds[way].append(perf_counter() - start)
    return seconds


def _params(new_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
