"""Benchmark commands: parse options, measure, print a summary, write a record."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rosellm.bench import options as shared
from rosellm.bench.job import Job, Run, choose_recipe, make_job, write_trace
from rosellm.bench.record import engine_facts, mode_result, new_record, write_record
from rosellm.models.loading import AnyTokenizer
from rosellm.models.model import Transformer
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.tensor_parallel import Load, load_ranks

# Per unit: the factor that a figure is multiplied by, and the number of decimals printed.
UNITS = {"s": (1.0, 6), "ms": (1e3, 2), "ms/token": (1e3, 2), "tokens/s": (1.0, 2), "requests/s": (1.0, 2)}
Line = tuple[str, list[str], str]  # title, names of figures such as "medians.ttft_p50_s", unit


@dataclass(frozen=True)
class Benchmark:
    """A command that serves the same requests repeatedly, in one or several modes.

    form: the command's name in workloads and records.
    doc: the docstring of the command's module, which becomes the help.
    add_options: adds the options that only this command has.
    runs: maps each requested mode's name to a function that serves the requests once; raises for incompatible
        options.
    lines: returns the lines to print about the result of a mode.
    """

    form: str
    doc: str
    add_options: Callable[[ArgumentParser], None]
    runs: Callable[[Namespace], dict[str, Run]]
    lines: Callable[[dict[str, Any]], list[Line]]

    def parse_options(self, argv: list[str] | None = None) -> Namespace:
        """Parse this command's options; None reads the command line."""
        parser = shared.command_parser(f"benchmark_{self.form}", self.doc, details=shared.DETAILS)
        shared.add_model_options(parser)
        shared.add_device_options(parser)
        shared.add_serving_options(parser)
        shared.add_run_options(parser)
        shared.add_record_option(parser)
        self.add_options(parser)
        return shared.parse(parser, argv, self.form)

    def measure(
        self,
        options: Namespace,
        gpt: Transformer,
        tokenizer: AnyTokenizer,
        build: Callable[..., Engine] = Engine,
    ) -> dict[str, Any]:
        """Measure, print the summaries, and return the record.

        gpt: the model, which several measurements may share.
        build: constructs the engine.

        The record is written, if requested, before the summaries and the trace, so that an error in printing
        or tracing loses no measurement.
        """
        runs = self.runs(options)  # raises for incompatible options
        job = make_job(options, gpt, tokenizer, build)
        results = {mode: _repeated(mode, run, job, options) for mode, run in runs.items()}
        facts = shared.request_facts(options) | {"not_comparable": shared.departures(options, job.engine)}
        facts |= engine_facts(job.engine)
        record = new_record(self.form, job.engine.device, **facts, results=results)
        if options.json:
            write_record(options.json, record)
        for result in results.values():
            print_summary(result, self.lines(result))
        if options.profile:
            mode, run = list(runs.items())[-1]
            together = 1 if mode == "naive" else job.engine.max_batch_size
            write_trace(run, job.shortened(together, shared.PROFILED_STEPS + 1), options.profile)
        return record

    def run(self, argv: list[str] | None) -> None:
        """Parse the options, load the model and measure."""
        options = self.parse_options(argv)
        recipe = choose_recipe(options)  # raises before the model is loaded
        load = Load(options.hf_model_id, options.device, options.dtype, options.load_format)
        loaded = load_ranks(options.tensor_parallel_size, load, recipe, options.deterministic)
        self.measure(options, loaded.model, loaded.tokenizer, loaded.build)


def _repeated(mode: str, run: Run, job: Job, options: Namespace) -> dict[str, Any]:
    for _ in range(options.warmup_runs):
        run(job)
    return mode_result(mode, options.warmup_runs, [run(job) for _ in range(options.repeat_runs)])


def print_summary(result: dict[str, Any], lines: Iterable[Line]) -> None:
    """Print a mode's result, each line as ``title: a/b/c unit``; a missing figure is printed as "none"."""
    print(f"=== {result['mode']} summary ===")
    print(f"Warmup runs: {result['warmup_runs']}")
    print(f"Measured runs: {result['repeat_runs']}")
    for title, names, unit in lines:
        scale, decimals = UNITS[unit]
        figures = (result[part].get(name) for part, name in (path.split(".") for path in names))
        numbers = ("none" if figure is None else f"{figure * scale:.{decimals}f}" for figure in figures)
        print(f"{title}: {'/'.join(numbers)} {unit}")
    sys.stdout.flush()
