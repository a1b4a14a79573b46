"""One side of a comparison of versions: serves a benchmark's requests on demand.

Run as a file, so that ``rosellm`` is the version on PYTHONPATH, which may be older than this file: everything
imported must exist in both. Each line in is a request, each line out its answer, both JSON. The form and
options of a :class:`Benchmark <rosellm.bench.cli.Benchmark>` build the engine and serve the
requests once; a number of seconds runs for at least that long and returns figures.
"""

from __future__ import annotations

import gc
import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import torch

import rosellm
from rosellm.errors import RoseError
from rosellm.models.loading import load_parts
from rosellm.roseinfer.engine import Engine


def _module(name: str) -> Any:
    """Import a module of ``rosellm.bench``, which older versions have in ``rosellm.roseinfer``."""
    for package in ("rosellm.bench", "rosellm.roseinfer.bench", "rosellm.roseinfer"):
        with suppress(ModuleNotFoundError):
            return import_module(f"{package}.{name}")
    raise ModuleNotFoundError(name)


BENCHMARKS = {form: _module(f"benchmark_{form}").BENCHMARK for form in ("scheduler", "streaming")}
make_job = _module("job").make_job

Run = Callable[[], dict[str, Any]]


def prepare(form: str, argv: list[str]) -> tuple[Run, Engine]:
    """Serve the benchmark's requests once; return a function that runs them again, and the engine."""
    options = BENCHMARKS[form].parse_options(argv)
    parts = load_parts(options.hf_model_id, options.device, options.dtype, options.load_format)
    job = make_job(options, *parts)
    (run,) = BENCHMARKS[form].runs(options).values()
    run(job)
    return partial(run, job), job.engine


def sample(run: Run, seconds: float) -> dict[str, Any]:
    """Return tokens per second over all runs, the completion tokens of each run, and the token digests."""
    runs = [run()]
    while sum(one["total_time_s"] for one in runs) < seconds:
        runs.append(run())
    tokens, total = ([one[name] for one in runs] for name in ("completion_tokens", "total_time_s"))
    return {
        "total_time_s": sum(total),
        "tok_s": sum(tokens) / sum(total),
        "completion_tokens": tokens,
        "tokens_sha256": sorted({one["tokens_sha256"] for one in runs}),
    }


def answer(asked: Any, held: list[Run]) -> dict[str, Any]:
    """Answer a request line; held: contains the run of the most recently prepared benchmark."""
    if not isinstance(asked, list):
        return sample(held[0], asked)
    held.clear()  # frees the engine, too
    gc.collect()
    torch.cuda.empty_cache()
    run, engine = prepare(*asked)
    held.append(run)
    return {
        "package": str(Path(rosellm.__file__).parent),
        "rung": engine.rung,
        "num_kv_blocks": engine.num_kv_blocks,
    }


def main(argv: list[str] | None = None) -> None:
    """Answer until standard input ends; nothing else is printed to standard output."""
    ArgumentParser(description=__doc__).parse_args(argv)
    answers, held = sys.stdout, list[Run]()
    with redirect_stdout(StringIO()):
        for line in sys.stdin:
            try:
                answered = answer(json.loads(line), held)
            except RoseError as error:
                answered = {"error": str(error)}
            print(json.dumps(answered), file=answers, flush=True)


if __name__ == "__main__":
    main()
