"""Measure how long the device takes to prefill prompts, on an engine as users get it.

Prompts of random tokens, in fresh sequences each time, are prefilled together, get their first tokens and are
released. By CUDA events a prefill lasts from the copy of its inputs to the choice of first tokens: two
replays, or of more tokens than are captured every kernel. A GPU is kept busy until the host has submitted all
of that, so the host's time is no part of it; on a CPU it is. Shapes take turns. The record is
DIR/prefill_times.json, of another model than GPT-2 in DIR/MODEL.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rosellm.command_line import OneLineParser, command, whole_number
from rosellm.errors import PromptError, RoseError
from rosellm.lab.records.aims import Verdict, aims_of
from rosellm.lab.records.bench import make_prompts
from rosellm.lab.records.measured_model import add_model_options, folder_of, settle
from rosellm.lab.records.parameters import model_path
from rosellm.lab.records.records import Results, number
from rosellm.lab.records.sizes import LONGEST_PREFILL, Size
from rosellm.lab.records.turns import in_turns
from rosellm.models.loading import arch_of
from rosellm.roseinfer.bench.record import check_writable, engine_facts, new_record, write_record
from rosellm.roseinfer.bench.workloads import WORKLOADS
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.sampling import SamplingParams

NAME = "prefill_times"
WORKLOAD = WORKLOADS["W8"]
WARM_UPS = 3  # of each shape: clocks, staging memory, modules that load at their first launch
BUSY_CYCLES = [60_000_000 * 4**n for n in range(4)]  # from about 30 ms of a GPU to 2 s
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


class Shape(NamedTuple):
    """So many prompts of so many tokens each, prefilled together."""

    prompts: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.prompts}x{self.tokens}"


AIMS_MS = {Shape(1, 64): 0.30, Shape(1, 512): 0.50, Shape(4, 256): 0.70, Shape(16, LONGEST_PREFILL): 5.0}


def shapes_of(size: Size) -> list[Shape]:
    """Those that have aims, no larger than ``size``."""
    fitting = (Shape(min(one.prompts, size.rows), min(one.tokens, size.prompt)) for one in AIMS_MS)
    return list(dict.fromkeys(fitting))


def keep_busy(device: torch.device, cycles: int) -> Callable[[], bool]:
    """Let a GPU spin, and tell whether it is still at it; a CPU has nothing to be kept from."""
    if device.type != "cuda":
        return lambda: True
    torch.cuda._sleep(cycles)
    ended = torch.cuda.Event()
    ended.record()
    return lambda: not ended.query()


def timed_prefill(engine: Engine, prompts: list[list[int]]) -> dict[str, float]:
    """Milliseconds of one prefill of fresh sequences, which are then released, and the tokens it cached.

    A prefill for which the device has waited is repeated, with more time for the host to submit it. Raises
    ``RoseError`` if the device has waited however long that was, or a prompt has got no first token.
    """
    for cycles in BUSY_CYCLES:
        figures, waited = _timed_once(engine, prompts, cycles)
        if not waited:
            return figures
    raise RoseError("the host took longer to submit a prefill than the device was kept busy")


def _timed_once(engine: Engine, prompts: list[list[int]], cycles: int) -> tuple[dict[str, float], bool]:
    """The figures of a prefill, and whether the device has waited for it."""
    sequences = [engine.make_sequence(prompt, ONE_TOKEN) for prompt in prompts]
    is_busy = keep_busy(engine.device, cycles)
    engine.begin_prefill(sequences)
    waited = not is_busy()
    done = list(engine.step.collect())
    tokens = sum(sequence.n_cached for sequence in sequences)
    if [one.sequences for one in done] != [sequences] or tokens != sum(map(len, prompts)):
        raise RoseError(f"{len(prompts)} prompts of {sum(map(len, prompts))} tokens were not all prefilled")
    for sequence in sequences:
        engine.release(sequence)
    return {"ms": done[0].seconds * 1e3, "tokens": tokens}, waited


def measure(engine: Engine, shapes: Iterable[Shape], repeats: int) -> dict[str, dict[str, Any]]:
    """Shape → every repeat's figures, with medians and means."""
    prompts = {str(shape): make_prompts(*shape, engine.config.vocab_size) for shape in shapes}
    for own in WARM_UPS * list(prompts.values()):
        _prefill(engine, own)
    return in_turns({shape: partial(timed_prefill, engine, own) for shape, own in prompts.items()}, repeats)


def _prefill(engine: Engine, prompts: list[list[int]]) -> None:
    sequences = [engine.make_sequence(prompt, ONE_TOKEN) for prompt in prompts]
    engine.prefill(sequences)
    for sequence in sequences:
        engine.release(sequence)


def recorded(results: Results) -> dict[str, dict[str, Any]]:
    """Model → the recorded figures; GPT-2's first."""
    paths = [*results.folder.glob(f"{NAME}.json"), *sorted(results.folder.glob(f"*/{NAME}.json"))]
    folders = [results if path.parent == results.folder else Results(path.parent) for path in paths]
    records = [folder.load(NAME) for folder in folders]
    return {Path(record["model"]).name: record["figures"] for record in records}


def verdicts(figures: Mapping[str, Any]) -> list[Verdict]:
    """What came of a record's aims, if it has any: medians of the repeats."""
    return [
        Verdict(f"prefill of {shape}", aim, figures["shapes"][shape]["medians"]["ms"], "ms")
        for shape, aim in figures["aims_ms"].items()
    ]


def told(shape: str, measured: Mapping[str, Any]) -> str:
    """A shape's median and range in one line."""
    ms = [one["ms"] for one in measured["repeats"]]
    return f"{shape}: {number(measured['medians']['ms'])} ms ({number(min(ms))} to {number(max(ms))})"


def _check_positions(arguments: Namespace, shapes: Iterable[Shape]) -> None:
    """Raises ``PromptError`` if the model has too few."""
    there = arch_of(model_path(arguments.model), arguments.load_format).n_positions
    if (needed := max(shape.tokens for shape in shapes) + 1) > there:
        raise PromptError(f"a prompt and its token need {needed} positions; the model has {there}")


def _parser() -> OneLineParser:
    parser = OneLineParser(prog=f"python -m rosellm.lab.records.{NAME}", description=__doc__)
    add_model_options(parser)
    add = parser.add_argument
    add("--repeats", type=whole_number(1), default=50, metavar="N", help="measured prefills of each shape")
    add("--output", type=Path, required=True, metavar="DIR", help="folder of the records")
    return parser


@command
def main(argv: list[str] | None = None) -> None:
    """Measure and write the record."""
    arguments = settle(_parser().parse_args(argv), WORKLOAD)
    shapes = shapes_of(arguments.size)
    _check_positions(arguments, shapes)
    path = check_writable(folder_of(arguments.output, arguments.model, WORKLOAD) / f"{NAME}.json")
    own = {"device": arguments.device, "load_format": arguments.load_format}
    engine = Engine.load(model_path(arguments.model), **own)  # as an LLM makes it
    found = measure(engine, shapes, arguments.repeats)
    facts = {"model": arguments.model, "load_format": arguments.load_format, "size": arguments.size.name}
    figures: dict[str, Any] = {
        "aims_ms": aims_of(AIMS_MS, arguments.model, arguments.size.name),
        "engine": engine_facts(engine) | {"late_captures": engine.late_captures},
        "shapes": found,
    }
    write_record(path, new_record(NAME, engine.device, **facts, figures=figures))
    print("\n".join(told(*one) for one in found.items()))


if __name__ == "__main__":
    sys.exit(main())
