"""Tune the GEMMs of a model's decode steps: ``python -m rosellm.bench tune --model Qwen/Qwen3-0.6B``.

Candidates are timed in whole steps on this GPU, for 1, 2, 4 and so on to 256 rows.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from statistics import median
from typing import Any

from rosellm.bench.options import add_common_options, count
from rosellm.bench.record import check_writable, engine_facts, new_record, write_record
from rosellm.errors import RoseError, describe
from rosellm.models.quantized import QUANTIZATION, WEIGHT_FORMS
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.tuning import CONTEXT, tune


def add_to(parser: ArgumentParser) -> None:
    """Add this benchmark's options, and :func:`run` as the parser's default ``run``."""
    add = add_common_options(parser, __doc__, run)
    add("--max-batch-size", **count(256, high=1024), help="the largest number of rows")
    add("--quantization", choices=WEIGHT_FORMS, help=QUANTIZATION)


def run(given: Namespace) -> None:
    """Tune, print each number of rows before and after, and write or extend the record if asked for."""
    runs = {}
    if given.json:
        check_writable(given.json)
        runs = _models_in(given.json)
    source = {"device": given.device, "dtype": given.dtype, "load_format": given.load_format}
    source |= {"quantization": given.quantization}
    sizes = {"max_batch_size": given.max_batch_size, "max_model_len": 2 * CONTEXT, "warm_up": False}
    engine = Engine.load(given.model, **source, **sizes)
    found = tune(engine.step, engine.model)
    for rows, turns in found["steps"].items():
        before, after = median(turns["before"]), median(turns["after"])
        print(f"{rows:>4} rows {before:10.1f} µs before, {after:10.1f} µs after: {after / before:.3f} ×")
    if given.json:
        model = " ".join(filter(None, (Path(given.model).name, given.quantization)))
        runs |= {model: {**found, "load_format": given.load_format, "engine": engine_facts(engine)}}
        write_record(given.json, new_record("tuned", engine.device, models=runs))


def _models_in(path: Path) -> dict[str, Any]:
    """Return the models of an earlier record, {} if there is none."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["models"]) if path.exists() else {}
    except (ValueError, LookupError, TypeError) as error:
        raise RoseError(f"{path} is no record of tuned models: {describe(error)}") from error
