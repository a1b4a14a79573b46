"""Measure what sampling adds to a decode step: greedy, drawn, filtered, penalised, with logprobs.

A step is complete, as in ``step_time``: it includes the model, the choice of tokens, and the transfer of
logprobs to the host. The modes of a batch size alternate on one engine; modes with the head "logits", which
compute all logits and sort them, use a second engine. The record is DIR/MODEL/sampling_steps.json, rewritten
after each batch size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Literal

from rosellm.lab.records.bench import Bench, make_prompts
from rosellm.lab.records.experiment import Asked, Experiment, Record, in_parts
from rosellm.lab.records.records import number
from rosellm.lab.records.step_time import prompt_length, room, turn_us
from rosellm.lab.records.turns import in_turns
from rosellm.models.loading import resolve_dtype
from rosellm.models.model import Transformer
from rosellm.roseinfer.recipe import RECIPES
from rosellm.roseinfer.sampling import SamplingParams

NAME = "sampling_steps"
BATCHES = 1, 8, 64, 256
CONTEXT, TURNS, SECONDS = 256, 3, 0.1  # cached tokens per sequence, turns per mode, seconds per turn


@dataclass(frozen=True)
class Mode:
    """How the tokens of a batch are chosen.

    wish: sampling parameters; the temperature is 0 unless it is among them.
    only_first: whether they apply to the first sequence only; the remaining sequences are then greedy.
    head: replaces the rung's own head; None keeps it.
    """

    wish: Mapping[str, float]
    only_first: bool = False
    head: Literal["logits"] | None = None

    def params(self, rows: int, new_tokens: int) -> list[SamplingParams]:
        """Return the sampling parameters of each sequence; every sequence has a different seed.

        rows: number of sequences.
        new_tokens: maximum number of tokens that each generates.
        """
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
    """Time decode steps in every mode, in alternation, after a warm-up turn.

    batch: number of sequences.
    context: cached tokens per sequence, halfway through the steps.
    turns: number of measured turns of each mode.
    seconds: duration of the measured steps of a turn.

    Returns mode → mean µs per step of each turn.
    """
    prompts = make_prompts(batch, prompt_length(context), model.config.vocab_size)
    modes = modes_of(batch)
    heads = dict.fromkeys(mode.head for mode in modes.values())
    recipes = {head: replace(RECIPES[rung], head=head) if head else rung for head in heads}
    benches = {head: Bench(model, recipe, prompts, room()) for head, recipe in recipes.items()}

    def turn(mode: Mode) -> float:
        bench = benches[mode.head]
        bench.params = mode.params(batch, room())
        return round(turn_us(bench, seconds), 3)

    return in_turns({name: partial(turn, mode) for name, mode in modes.items()}, turns)


def measure(asked: Asked) -> Iterator[Record]:
    """Measure every batch size; print the result after each."""
    rung, context = asked.best, min(CONTEXT, asked.size.prompt)
    facts = {"model": asked.model, "load_format": asked.load_format}
    facts["dtype"] = str(resolve_dtype("auto", asked.where, asked.arch)).removeprefix("torch.")
    modes = {name: asdict(mode) for name, mode in MODES.items()}
    figures = {"rung": rung, "context": context, "batches": {}, "modes": modes}

    def batch_figures(batch: int) -> dict[str, Any]:
        turns_us = measure_modes(asked.gpt, rung, batch, context, asked["repeats"])
        return {name: {"median_us": median(turns), "turns_us": turns} for name, turns in turns_us.items()}

    def told(batch: str, found: dict[str, Any]) -> str:
        us = {name: one["median_us"] for name, one in found.items()}
        each = (f"{name} {number(own)} ({own / us[GREEDY]:.2f})" for name, own in us.items())
        return f"B={batch}, µs (of greedy): {' · '.join(each)}"

    parts = {str(batch): partial(batch_figures, batch) for batch in asked.size.batches(*BATCHES)}
    yield from in_parts(asked, asked.record(NAME, **facts, figures=figures), parts, told, "batches", int)


EXPERIMENTS = [Experiment(NAME, measure, {"repeats": TURNS}, own_folder=True)]
