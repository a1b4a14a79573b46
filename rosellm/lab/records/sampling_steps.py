"""Measure what sampling adds to a decode step: greedy, drawn, filtered, penalised, with logprobs.

A step is complete, as in ``step_time``: the model, the choice, and the transfer of logprobs to the host. The
modes of a batch size alternate on one engine, except for those that compute all logits and sort them, which
use a second one. The record is DIR/MODEL/sampling_steps.json, rewritten after each batch size; it keeps other
batch sizes of the same commit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Literal

from rosellm.errors import PromptError
from rosellm.lab.records.bench import Bench, make_prompts
from rosellm.lab.records.earlier import in_parts
from rosellm.lab.records.experiment import Asked, Experiment, Record
from rosellm.lab.records.records import number
from rosellm.lab.records.step_time import prompt_length, room, turn_us
from rosellm.lab.records.turns import in_turns
from rosellm.models.loading import resolve_dtype
from rosellm.models.model import Transformer
from rosellm.roseinfer.recipe import RECIPES, Recipe
from rosellm.roseinfer.sampling import SamplingParams

NAME = "sampling_steps"
BATCHES = 1, 8, 64, 256
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

    def turn(mode: Mode) -> float:
        bench = benches[mode.head]
        bench.params = mode.params(batch, room())
        return round(turn_us(bench, seconds), 3)

    return in_turns({name: partial(turn, mode) for name, mode in modes.items()}, turns)


def _recipe(rung: str, head: Literal["logits"] | None) -> str | Recipe:
    return rung if head is None else replace(RECIPES[rung], head=head)


def measure(asked: Asked) -> Iterator[Record]:
    """Measure every batch size; print the result after each."""
    rung = asked["rung"] or asked.best
    facts = {"model": asked.model, "load_format": asked.load_format}
    facts["dtype"] = str(resolve_dtype("auto", asked.where, asked.arch)).removeprefix("torch.")
    modes = {name: asdict(mode) for name, mode in MODES.items()}
    figures = {"rung": rung, "context": asked["context"], "batches": {}, "modes": modes}

    def batch_figures(batch: int) -> dict[str, Any]:
        turns_us = measure_modes(asked.gpt, rung, batch, asked["context"], asked["repeats"])
        return {name: {"median_us": median(turns), "turns_us": turns} for name, turns in turns_us.items()}

    parts = {str(batch): partial(batch_figures, batch) for batch in asked["batches"]}
    begun = asked.record(NAME, **facts, figures=figures)
    for record, batch, found in in_parts(asked.folder / f"{NAME}.json", begun, parts, "batches", int):
        yield record
        us = {name: one["median_us"] for name, one in found.items()}
        told = (f"{name} {number(own)} ({own / us[GREEDY]:.2f})" for name, own in us.items())
        print(f"B={batch}, µs (of greedy): {' · '.join(told)}", flush=True)


def _refuse(asked: Asked) -> None:
    needed, there = prompt_length(asked["context"]) + room(), asked.arch.n_positions
    if needed > there:
        raise PromptError(
            f"a context of {asked['context']} tokens needs {needed} positions; the model has {there}"
        )


DEFAULTS = {"batches": BATCHES, "context": CONTEXT, "rung": None, "repeats": TURNS}
EXPERIMENTS = [Experiment(NAME, measure, DEFAULTS, own_folder=True, refuse=_refuse)]
