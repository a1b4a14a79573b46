"""Measure what sampling adds to a decode step: greedy, drawn, filtered, penalised, with logprobs.

A step is complete, as in ``step_time``: the model, the choice, and the transfer of logprobs to the host. The
modes of a batch size alternate on one engine, except for those that compute all logits and sort them, which
use a second one. The record is DIR/MODEL/sampling_steps.json, rewritten after each batch size; it keeps other
batch sizes of the same commit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from rosellm.bench.record import check_writable, new_record, write_record
from rosellm.bench.workloads import LOAD_FORMAT
from rosellm.command_line import OneLineParser, command, whole_number, whole_numbers
from rosellm.errors import PromptError
from rosellm.lab.records.bench import Bench, make_prompts
from rosellm.lab.records.earlier import kept_parts
from rosellm.lab.records.model_runs import short_name
from rosellm.lab.records.records import Results, number
from rosellm.lab.records.step_time import free_memory, prompt_length, room, turn_us
from rosellm.models.arch import Arch
from rosellm.models.families.table import KNOWN_SHAPES
from rosellm.models.loading import LOAD_FORMATS, arch_of, load_parts, resolve_device, resolve_dtype
from rosellm.models.model import Transformer
from rosellm.roseinfer.recipe import RECIPES, Recipe, get_rung
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.steps.logprob_ring import SIZES

NAME = "sampling_steps"
SHAPES = {short_name(name): KNOWN_SHAPES[name] for name in ("gpt2", "Qwen/Qwen3-0.6B")}  # models to record
BATCHES, MOST_ROWS = (1, 8, 64, 256), 4096
CONTEXT, TURNS, SECONDS = 256, 7, 0.1  # cached tokens per sequence, turns per mode, seconds per turn


@dataclass(frozen=True)
class Mode:
    """Sampling parameters besides ``temperature`` 0, for all rows of the batch or only the first.

    head: replaces the rung's own.
    """

    wish: Mapping[str, float]
    only_first: bool = False
    head: Literal["logits"] | None = None

    def params(self, rows: int, new_tokens: int) -> list[SamplingParams]:
        """Return the parameters of each row; every row has a different seed."""
        plain: dict[str, Any] = {"temperature": 0.0, "max_tokens": new_tokens, "ignore_eos": True}
        asking = 1 if self.only_first else rows
        wishes = [{**plain, **self.wish}] * asking + [plain] * (rows - asking)
        return [SamplingParams(seed=i, **wish) for i, wish in enumerate(wishes)]


TOP_P = {"temperature": 0.8, "top_p": 0.9}
FILTERED: dict[str, float] = {**TOP_P, "top_k": 50}
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3}
LOGPROBS = {"logprobs": 5}
GREEDY = "greedy"
MODES = {
    GREEDY: Mode({}),
    "temperature": Mode({"temperature": 0.8}),
    "top-p": Mode(TOP_P),
    "top-k, top-p": Mode(FILTERED),
    "+ penalties": Mode({**FILTERED, **PENALTIES}),
    "logprobs": Mode(LOGPROBS),
    "top-k, top-p: one row": Mode(FILTERED, only_first=True),
    "logprobs: one row": Mode(LOGPROBS, only_first=True),
    "greedy, all logits": Mode({}, head="logits"),
    "top-k, top-p, sorted": Mode(FILTERED, head="logits"),
}


def modes_of(batch: int) -> dict[str, Mode]:
    """Return the modes to measure; one-row modes are omitted for a batch of one."""
    return {name: mode for name, mode in MODES.items() if batch > 1 or not mode.only_first}


def measure_modes(
    model: Transformer, rung: str, batch: int, context: int, turns: int = TURNS, seconds: float = SECONDS
) -> dict[str, list[float]]:
    """Return mode → µs per decode step of ``batch`` sequences, the mean of each turn, after a warm-up turn.

    context: cached tokens per sequence, halfway through a turn's steps. seconds: of measured steps per turn.
    """
    prompts = make_prompts(batch, prompt_length(context), model.config.vocab_size)
    modes = modes_of(batch)
    heads = dict.fromkeys(mode.head for mode in modes.values())
    benches = {head: Bench(model, _recipe(rung, head), prompts, room()) for head in heads}
    turns_us: dict[str, list[float]] = {name: [] for name in modes}
    for turn in range(turns + 1):
        for name, mode in modes.items():
            bench = benches[mode.head]
            bench.params = mode.params(batch, room())
            us = turn_us(bench, seconds if turn else 0.0)
            turns_us[name] += [round(us, 3)] if turn else []
    return turns_us


def _recipe(rung: str, head: Literal["logits"] | None) -> str | Recipe:
    return rung if head is None else replace(RECIPES[rung], head=head)


def recorded_modes(results: Results) -> dict[str, dict[int, dict[str, list[float]]]]:
    """Return model → batch → mode → µs per step of each turn, for every model with a record."""
    models = sorted(path.parent.name for path in results.folder.glob(f"*/{NAME}.json"))
    figures = {model: Results(results.folder / model).load(NAME)["figures"] for model in models}
    return {
        model: {
            int(batch): {mode: one["turns_us"] for mode, one in modes.items()}
            for batch, modes in own["batches"].items()
        }
        for model, own in figures.items()
    }


def extra_bytes(arch: Arch, batch: int) -> dict[str, int]:
    """Return mode → bytes that a step of ``batch`` rows moves in addition to a greedy one.

    Weights have 16 bits, logits and counts 32. Tile maxima and reads of few tiles are omitted.
    """
    row, head = 4 * arch.vocab_size, 2 * arch.vocab_size * arch.d_model
    runs = -(-batch // SIZES[-1])  # logprobs; each reads the head's weights again
    return {
        "temperature": 0,
        "top-p": 2 * batch * row,  # logits: written, read to sum those above the drawn token
        "top-k, top-p": batch * row,  # written
        "+ penalties": 2 * batch * row,  # and counts are read
        "logprobs": runs * head + 5 * batch * row,  # logits and logprobs: written, read; and ranks
        "top-k, top-p: one row": row,
        "logprobs: one row": head + 5 * row,
    }


def extra_us(turns_us: Mapping[str, list[float]]) -> dict[str, float]:
    """Return mode → µs by which the median step exceeds the greedy one."""
    greedy = median(turns_us[GREEDY])
    return {mode: median(turns) - greedy for mode, turns in turns_us.items() if mode != GREEDY}


def measure(arguments: argparse.Namespace) -> None:
    """Measure every batch size; write the record and print the result after each.

    Before loading the model, raises ``PromptError``, or ``RecordError`` if the record would lose others.
    """
    device, arch = resolve_device(arguments.device), arch_of(arguments.model, arguments.load_format)
    _check_positions(arch, arguments.context)
    rung = get_rung(arguments.rung, device)
    folder = arguments.output / short_name(arguments.model)
    folder.mkdir(parents=True, exist_ok=True)
    path = check_writable(folder / f"{NAME}.json")
    record = partial(_record, arguments, rung, device, resolve_dtype("auto", device, arch))
    batches = kept_parts(path, record({}), [str(batch) for batch in arguments.batches], "batches")
    model, _ = load_parts(arguments.model, arguments.device, "auto", arguments.load_format)
    for batch in arguments.batches:
        turns_us = measure_modes(model, rung, batch, arguments.context, arguments.repeats)
        batches[str(batch)] = {
            name: {"median_us": median(turns), "turns_us": turns} for name, turns in turns_us.items()
        }
        write_record(path, record(batches))
        print(_told(batch, turns_us), flush=True)
        free_memory()


def _record(
    arguments: argparse.Namespace,
    rung: str,
    device: torch.device,
    dtype: torch.dtype,
    batches: dict[str, Any],
) -> dict[str, Any]:
    facts = {
        "model": arguments.model,
        "load_format": arguments.load_format,
        "dtype": str(dtype).removeprefix("torch."),
    }
    figures = {
        "rung": rung,
        "context": arguments.context,
        "batches": {batch: batches[batch] for batch in sorted(batches, key=int)},
        "modes": {name: asdict(mode) for name, mode in MODES.items()},
    }
    return new_record(NAME, device, **facts, figures=figures)


def _check_positions(arch: Arch, context: int) -> None:
    needed, there = prompt_length(context) + room(), arch.n_positions
    if needed > there:
        raise PromptError(f"a context of {context} tokens needs {needed} positions; the model has {there}")


def _told(batch: int, turns_us: Mapping[str, list[float]]) -> str:
    greedy = median(turns_us[GREEDY])
    told = (f"{name} {number(us := median(own))} ({us / greedy:.2f})" for name, own in turns_us.items())
    return f"B={batch}, µs (of greedy): {' · '.join(told)}"


def _parser() -> OneLineParser:
    parser = OneLineParser(prog=f"python -m rosellm.lab.records.{NAME}", description=__doc__)
    add = parser.add_argument
    add("--model", default="gpt2", help="hub id, local folder or shipped model")
    add("--load-format", choices=LOAD_FORMATS, default=LOAD_FORMAT, help="dummy: random weights")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: cuda if available")
    add("--rung", choices=tuple(RECIPES), metavar="NAME", help="default: the device's best")
    add("--batches", type=whole_numbers(MOST_ROWS), default=BATCHES, metavar="B,B", help="batch sizes")
    add("--context", type=whole_number(1), default=CONTEXT, metavar="N", help="cached tokens per sequence")
    add("--repeats", type=whole_number(1), default=TURNS, metavar="N", help="measured turns per mode")
    add("--output", type=Path, default=Path("build/records"), metavar="DIR", help="folder of the records")
    return parser


@command
def main(argv: list[str] | None = None) -> None:
    """Measure and record."""
    measure(_parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
