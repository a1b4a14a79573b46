"""One side of a comparison of versions: serves a benchmark's requests on demand.

Run as a file with a benchmark's form and options, so that ``rosellm`` is the version on PYTHONPATH, which may
be older than this file: everything imported must exist in both. Serves the requests once and prints the
engine's facts; each line in is a number of seconds to run for at least, each line out its figures, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import rosellm
from rosellm.errors import RoseError
from rosellm.models.loading import load_parts
from rosellm.roseinfer.engine import Engine


def _module(name: str) -> Any:
    """Import the module ``name`` of ``rosellm.bench``, or of the package in which older versions have it."""
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
    """Run at least once, and until the runs took ``seconds`` in total; return their figures.

    ``tok_s`` is over all runs; ``tokens_sha256`` contains the distinct digests of the generated tokens.
    """
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


def answers(form: str, argv: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the lines to print: the engine's facts, then a sample for each line of standard input.

    form, argv: the benchmark's form and options.

    After a ``RoseError``, yields its text as ``error`` and ends.
    """
    try:
        run, engine = prepare(form, argv)
        package = str(Path(rosellm.__file__).parent)
        yield {"package": package, "rung": engine.rung, "num_kv_blocks": engine.num_kv_blocks}
        for line in sys.stdin:
            yield sample(run, float(line))
    except RoseError as error:
        yield {"error": str(error)}


def main() -> None:
    """Print the answers until standard input ends; other output to standard output is discarded."""
    out = sys.stdout
    with redirect_stdout(StringIO()):
        for answer in answers(sys.argv[1], sys.argv[2:]):
            print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
