"""What drafting gains on texts of three kinds: ``python -m rosellm.bench drafts --model rose-tiny``.

Requests continue edited functions, new code and prose greedily, and prose also at temperature 1. Prompts of
random ids are continued with random ids. Engines without drafts, with drafts from the text and, if there is
one, with a draft model take turns. A single request continues one text of a kind after the other; several
requests continue several at once. Of each kind, the record also holds how many tokens every step gave a
single request, if all steps draft.
"""

from __future__ import annotations

import fnmatch
import glob
import inspect
import random
import re
import shlex
import statistics
import string
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from textwrap import dedent
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


def _edited(source: str, old: str, new: str) -> str:
    """Return a function, and the first lines of the same function with a variable renamed."""
    renamed = re.sub(rf"\b{old}\b", new, source)
    return source + "".join(renamed.splitlines(keepends=True)[:4])


def _library(function: Callable[..., Any]) -> str:
    return dedent(inspect.getsource(function)) + "\n\n"


TEXTS = {  # several of each kind
    "edit": (
        _edited(_COPY, "length", "size"),
        _edited(_library(textwrap.indent), "prefix", "start"),
        _edited(_library(random.Random.shuffle), "randbelow", "below"),
        _edited(_library(statistics.median_low), "data", "values"),
        _edited(_library(string.capwords), "sep", "mark"),
        _edited(_library(fnmatch.fnmatch), "pat", "pattern"),
        _edited(_library(glob.escape), "pathname", "path"),
        _edited(_library(shlex.join), "split_command", "words"),
    ),
    "completion": (
        "import unittest\n\n\nclass TestStack(unittest.TestCase):\n    def test_push(self):\n",
        "def read_config(path):\n    with open(path) as file:\n",
        "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser()\n",
        "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n",
        "import socket\n\n\ndef connect(host, port):\n",
        "def fibonacci(n):\n    a, b = 0, 1\n    for i in range(n):\n",
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
        "import os\n\n\ndef walk(top):\n    for name in os.listdir(top):\n",
    ),
    "prose": (
        "Permission is hereby granted, free of charge, to any person obtaining a copy of this software",
        "How do I open a file in Python and read it line by line?",
        "This module has functions for dates and times.",
        "The following example shows how to sort a list of names.",
        "If the argument is omitted, the default value is used.",
        "Thank you for the report. The server closes the connection because",
        "Note that this method raises an exception when the file does not exist.",
        "What is the difference between a list and a tuple?",
    ),
}
SAMPLED, RANDOM = "sampled", "random"  # prose; ids without repetition
KINDS = *TEXTS, SAMPLED, RANDOM
TEMPERATURES = {SAMPLED: 1.0, RANDOM: 100.0}  # at 100, all ids are about equally likely
N_RANDOM = 64  # ids of such a prompt
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
    add("--texts", nargs="+", choices=KINDS, default=KINDS, help="kinds of texts; default: all")
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
    for kind in given.texts:
        texts = _encoded(engines["plain"], kind)
        temperature = TEMPERATURES.get(kind, 0.0)
        drafting = {way: engine for way, engine in engines.items() if way != "plain"}
        traces = {way: trace(one, texts, given.new_tokens, temperature) for way, one in drafting.items()}
        figures[kind] = {"tokens of every step": traces, "seconds": {}}
        for rows in given.rows:
            batches = [[text] for text in texts] if rows == 1 else [_several(texts, rows)]
            seconds = in_turns(engines, batches, given.new_tokens, temperature, given.turns)
            figures[kind]["seconds"][rows] = seconds
            n_tokens = sum(map(len, batches)) * given.new_tokens
            speeds = {way: n_tokens / median(own) for way, own in seconds.items()}
            line = [f"{way} {speed:9.0f} ({speed / speeds['plain']:.2f})" for way, speed in speeds.items()]
            print(f"{kind:10} × {rows:3}: tok/s {', '.join(line)}", flush=True)
        for way, counts_of_steps in traces.items():
            each = sum(counts_of_steps) / len(counts_of_steps)
            print(f"{kind:10} {way}: {each:.2f} tokens per step that drafts")
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
    longest = max(len(ids) for kind in given.texts for ids in _encoded(engines["plain"], kind))
    if longest + given.new_tokens > engines["plain"].max_model_len:
        most = engines["plain"].max_model_len - longest
        raise OptionError(f"new_tokens is {given.new_tokens}; the longest text leaves room for {most}")
    return engines


def _encoded(engine: Engine, kind: str) -> list[list[int]]:
    """Return the token ids of each text of a kind."""
    if kind != RANDOM:
        return engine.encode_many(list(TEXTS["prose" if kind == SAMPLED else kind]))
    draw, vocab = random.Random(0), engine.config.vocab_size
    return [[draw.randrange(vocab) for _ in range(N_RANDOM)] for _ in range(8)]


def _several(texts: list[list[int]], rows: int) -> list[list[int]]:
    """Return as many prompts as rows: those that repeat a text lack some of its first tokens."""
    return [texts[i % len(texts)][i // len(texts) :] for i in range(rows)]


def trace(engine: Engine, texts: list[list[int]], new_tokens: int, temperature: float) -> list[int]:
    """Return how many tokens each step gives a single request, if all steps draft, for all texts."""
    assert isinstance(engine.step, SpeculativeStep)
    pace, engine.step.pace = engine.step.pace, Always()
    scheduler = CountingScheduler(engine)
    for text in texts:
        scheduler.run([text], _params(1, new_tokens, temperature))
    engine.step.pace = pace
    return [n for (n,) in scheduler.counts]


def in_turns(
    engines: dict[str, Engine],
    batches: Sequence[list[list[int]]],
    new_tokens: int,
    temperature: float,
    turns: int,
) -> dict[str, list[float]]:
    """Return the seconds of every measured run of each engine, from token ids to token ids.

    batches: prompts that run together; a run takes one batch after the other.
    """
    seconds: dict[str, list[float]] = {way: [] for way in engines}
    for turn in range(WARM_UPS + turns):
        for way, engine in engines.items():
            params = [_params(len(prompts), new_tokens, temperature) for prompts in batches]
            start = perf_counter()
            for prompts, own in zip(batches, params, strict=True):
                OfflineScheduler(engine).run(prompts, own)
            if turn >= WARM_UPS:
                seconds[way].append(perf_counter() - start)
    return seconds


def _params(rows: int, new_tokens: int, temperature: float) -> list[SamplingParams]:
    options: dict[str, Any] = {"temperature": temperature, "max_tokens": new_tokens, "ignore_eos": True}
    return [SamplingParams(seed=i, **options) for i in range(rows)]
