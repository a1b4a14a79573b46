"""The time of a decode step for each number of rows: ``python -m rosellm.bench steps --rows 1,2,8``.

Greedy steps of one engine after prompts of equal length. All numbers of rows take turns; a turn's figure is
the median of its steps.
"""

from __future__ import annotations

import random
from argparse import ArgumentParser, Namespace
from pathlib import Path
from statistics import median
from typing import Any

from rosellm.bench.options import add_common_options, count, counts
from rosellm.bench.record import check_writable, engine_facts, new_record, write_record
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.sampling import SamplingParams

ROWS, TURNS, STEPS, SKIPPED = (1, 2, 4, 8, 16, 32, 64), 5, 32, 4


def add_to(parser: ArgumentParser) -> None:
    """Add this benchmark's options, and :func:`run` as the parser's default ``run``."""
    add = add_common_options(parser, __doc__, run)
    add("--rows", **counts(ROWS, 1024), help="sequences that decode together")
    add("--prompt-tokens", **count(64), help="length of every prompt, random ids")
    add("--turns", **count(TURNS), help="turns of each number of rows")


def run(given: Namespace) -> None:
    """Measure, print a table, and write the record if asked for."""
    if given.json:
        check_writable(given.json)
    length = given.prompt_tokens + STEPS + 1
    sizes = {"max_batch_size": max(given.rows), "max_model_len": length, "warm_up": False}
    source = {"device": given.device, "dtype": given.dtype, "load_format": given.load_format}
    engine = Engine.load(given.model, **source, **sizes)
    turns = measure(engine, given.rows, given.prompt_tokens, given.turns)
    figures = {rows: figures_of(engine, rows, given.prompt_tokens, us) for rows, us in turns.items()}
    first = figures[min(figures)]["median_us"]
    for rows, one in figures.items():
        us, speed = one["median_us"], one["read_TB_s"]
        print(f"{rows:4} rows {us:10.1f} µs, {us / first:5.2f} × the first, reads {speed:.2f} TB/s")
    if given.json:
        facts = {"model": Path(given.model).name, "load_format": given.load_format}
        facts |= {"prompt_tokens": given.prompt_tokens, "engine": engine_facts(engine), "figures": figures}
        write_record(given.json, new_record("steps_by_rows", engine.device, **facts))


def measure(
    engine: Engine, numbers: tuple[int, ...], prompt_tokens: int, turns: int
) -> dict[int, list[float]]:
    """Return number of rows → µs per step, the median of each turn; the numbers of rows take turns."""
    for rows in numbers:
        engine.warm_up(rows)
        median_step_us(engine, rows, prompt_tokens)
    found: dict[int, list[float]] = {rows: [] for rows in numbers}
    for _ in range(turns):
        for rows, us in found.items():
            us.append(median_step_us(engine, rows, prompt_tokens))
    return found


def median_step_us(engine: Engine, rows: int, prompt_tokens: int) -> float:
    """Return the median µs of decode steps after the first ``SKIPPED``, for prompts of random ids."""
    draw, vocab = random.Random(0), engine.config.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=STEPS + 1, ignore_eos=True)
    prompts = [[draw.randrange(vocab) for _ in range(prompt_tokens)] for _ in range(rows)]
    sequences = [engine.make_sequence(prompt, params) for prompt in prompts]
    engine.prefill(sequences)
    seconds = []
    for _ in range(STEPS):
        engine.begin_decode(sequences)
        seconds += [done.seconds for done in engine.step.collect(leave=engine.step.run_ahead)]
    seconds += [done.seconds for done in engine.step.collect()]
    for sequence in sequences:
        engine.release(sequence)
    return median(seconds[-STEPS + SKIPPED :]) * 1e6


def figures_of(engine: Engine, rows: int, prompt_tokens: int, turns_us: list[float]) -> dict[str, Any]:
    """Return the median of the turns, every turn, and the speed at which weights and keys are read once."""
    config, itemsize = engine.config, engine.model.dtype.itemsize
    context = min(prompt_tokens + STEPS // 2, config.window or prompt_tokens + STEPS // 2)
    n_bytes = config.n_step_parameters * itemsize + rows * context * config.kv_bytes_per_token(itemsize)
    us = median(turns_us)
    return {"median_us": us, "read_bytes": n_bytes, "read_TB_s": n_bytes / us / 1e6, "turns_us": turns_us}
