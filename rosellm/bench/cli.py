"""Benchmark commands: parse options, measure, print a summary, write a record."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rosellm.bench import options as shared
from rosellm.bench.job import Job, Run, choose_recipe, make_job
from rosellm.bench.record import engine_facts, mode_result, new_record, write_record
from rosellm.models.loading import AnyTokenizer
from rosellm.models.model import Transformer
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.tensor_parallel import Load, load_ranks


@dataclass(frozen=True)
class Benchmark:
    """A command that serves the same requests repeatedly, in one or several modes.

    form: the command's name in workloads and records.
    doc: the docstring of the command's module, which becomes the help.
    add_options: adds the options that only this command has.
    runs: maps each requested mode's name to a function that serves the requests once; raises for incompatible
        options.
    """

    form: str
    doc: str
    add_options: Callable[[ArgumentParser], None]
    runs: Callable[[Namespace], dict[str, Run]]

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

        The record is written, if requested, before the summaries, so that an error in printing loses no
        measurement.
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
            print_summary(result)
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


def print_summary(result: dict[str, Any]) -> None:
    """Print the medians, over a mode's measured runs, of all figures, by their names in the record."""
    runs = f"{result['repeat_runs']} runs after {result['warmup_runs']} for warm-up"
    print(f"=== {result['mode']}: medians of {runs} ===")
    for name, median in result["medians"].items():
        print(f"{name:<26}{median:>14.6g}")
    sys.stdout.flush()
