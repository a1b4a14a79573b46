"""The time of a step that verifies drafts: ``python -m rosellm.bench verify --drafts 1,3,7,15``.

Steps with and without drafts of one engine take turns, after prompts of random ids. Every row has as many
drafts as asked, and draws its tokens at temperature 1. With ``--traces``, a record of ``rosellm.bench
drafts``, whole runs follow in which every step accepts as many drafts as the steps of that record did,
whatever the model chooses.
"""

from __future__ import annotations

import json
import random
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rosellm.bench.options import add_common_options, count, counts
from rosellm.bench.record import check_writable, engine_facts, new_record, write_record
from rosellm.bench.steps import SKIPPED
from rosellm.errors import RoseError
from rosellm.models.loading import load_parts
from rosellm.roseinfer.engine import MOST_DRAFTS, Engine
from rosellm.roseinfer.kernels.speculation import Texts, Verified, choose, chosen_ref
from rosellm.roseinfer.outputs import Done
from rosellm.roseinfer.recipe import speculating
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.steps.pace import Always
from rosellm.roseinfer.steps.planner import batch_bucket
from rosellm.roseinfer.steps.speculative import SpeculativeStep

STEPS, RUN_STEPS = 24, 40  # of a turn, and of a whole run


def add_to(parser: ArgumentParser) -> None:
    """Add this benchmark's options, and :func:`run` as the parser's default ``run``."""
    add = add_common_options(parser, __doc__, run)
    add("--rows", **counts((1, 8, 64), 256), help="sequences that decode together")
    add("--drafts", **counts((1, 3, 7, 15), MOST_DRAFTS), help="draft tokens of every row and step")
    add("--prompt-tokens", **counts((64,), 1 << 20), help="length of every prompt, random ids")
    add("--turns", **count(3), help="turns of each kind of step")
    add("--traces", type=Path, metavar="FILE", help="a record of rosellm.bench drafts")


def run(given: Namespace) -> None:
    """Measure, print a table, and write the record if asked for."""
    if given.json:
        check_writable(given.json)
    traces = read_traces(given.traces) if given.traces else {}
    gpt, tokenizer = load_parts(given.model, given.device, given.dtype, given.load_format)
    length = max(given.prompt_tokens) + (max(given.drafts) + 1) * (max(STEPS, RUN_STEPS) + 4)
    sizes = {"max_batch_size": max(given.rows), "max_model_len": length, "warm_up": False}
    figures: dict[str, Any] = {}
    for k in given.drafts:
        options = {"recipe": speculating(None, "ngram", gpt.device), "speculative_tokens": k, **sizes}
        facts = measure_steps(Bench(Engine(gpt, tokenizer, **options), k), given, figures)
        if traces:
            measure_replays(Replays(Engine(gpt, tokenizer, **options), k), given, traces, figures)
        if given.json:
            facts |= {"model": Path(given.model).name, "load_format": given.load_format, "figures": figures}
            write_record(given.json, new_record("verify_steps", gpt.device, **facts))


def measure_steps(bench: Bench, given: Namespace, figures: dict[str, Any]) -> dict[str, Any]:
    """Add steps without and with drafts to the figures, and return facts about the engine."""
    for rows, prompt_tokens in product(bench.with_all_drafts(given.rows), given.prompt_tokens):
        found = bench.steps(rows, prompt_tokens, given.turns)
        key = f"{rows} × {prompt_tokens}"
        figures.setdefault(key, {})[bench.k] = found
        plain, verify = median(found["plain"]), median(found["verify"])
        ratio = verify / plain
        print(f"{key:>10}, {bench.k:2} drafts: {plain:8.0f} → {verify:8.0f} µs, {ratio:.2f}", flush=True)
    return {"engine": engine_facts(bench.engine)}


def measure_replays(
    bench: Replays, given: Namespace, traces: dict[str, list[int]], figures: dict[str, Any]
) -> None:
    """Add replayed runs to the figures."""
    for rows, (name, trace) in product(bench.with_all_drafts(given.rows), traces.items()):
        each, seconds = bench.replayed(rows, given.prompt_tokens[0], trace, given.turns)
        key = f"{rows} × {given.prompt_tokens[0]}"
        replayed = {"tokens_per_step": each, "seconds_per_step": seconds}
        figures[key][bench.k].setdefault("replayed", {})[name] = replayed
        gain = each * median(seconds["plain"]) / median(seconds["drafting"])
        print(f"{key:>10}, {name}: {each:.2f} tokens per step, {gain:.2f} × tok/s", flush=True)


def read_traces(file: Path) -> dict[str, list[int]]:
    """Return text → tokens of every step, of drafts from the text; raise ``RoseError`` for another file."""
    try:
        figures = json.loads(file.read_text())["figures"]
        return {name: own["tokens of every step"]["ngram"] for name, own in figures.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RoseError(f"{str(file)!r} is not a record of rosellm.bench drafts ({error})") from error


class Run(NamedTuple):
    """Decode steps: seconds of each by the device's clock, and of all by the host's; tokens of all rows."""

    steps: list[float]
    seconds: float
    n_tokens: int


class Bench:
    """An engine whose steps draft ``k`` tokens per row when they are asked to, from any text."""

    def __init__(self, engine: Engine, k: int) -> None:
        assert isinstance(engine.step, SpeculativeStep)
        self.engine, self.step, self.k = engine, engine.step, k
        drafting = self.step.worker.drafting
        self.step.worker.drafting = drafting._replace(propose=partial(drafting.propose, shortest=0))

    def with_all_drafts(self, rows: list[int]) -> list[int]:
        """Return the batch sizes whose steps verify ``k`` drafts per row; larger ones verify fewer."""
        takes = self.step.worker.drafts_for
        return [n for n in rows if takes(min(batch_bucket(n), max(rows))) == self.k]

    def steps(self, rows: int, prompt_tokens: int, turns: int) -> dict[str, list[float]]:
        """Return the median µs of steps without and with drafts, for each turn."""
        kinds = {"plain": False, "verify": True}
        for drafts in kinds.values():
            self.run(rows, prompt_tokens, drafts, STEPS)
        found: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(turns):
            for name, drafts in kinds.items():
                run = self.run(rows, prompt_tokens, drafts, STEPS)
                found[name].append(median(run.steps[SKIPPED:]) * 1e6)
        return found

    def run(self, rows: int, prompt_tokens: int, drafts: bool, n_steps: int) -> Run:
        """Take decode steps, after prompts of random ids."""
        engine, step, draw = self.engine, self.step, random.Random(0)
        params = SamplingParams(temperature=1.0, max_tokens=(self.k + 1) * (n_steps + 3), ignore_eos=True)
        vocab = engine.config.vocab_size
        prompts = [[draw.randrange(vocab) for _ in range(prompt_tokens)] for _ in range(rows)]
        sequences: list[Sequence] = [engine.make_sequence(prompt, params) for prompt in prompts]
        engine.prefill(sequences)
        step.pace = Always(drafts)
        done: list[Done] = []
        start = perf_counter()
        for _ in range(n_steps):
            engine.begin_decode(sequences)
            done += step.collect(leave=step.run_ahead)
        done += step.collect()
        taken = perf_counter() - start
        for sequence in sequences:
            engine.release(sequence)
        n_tokens = sum(sum(one.counts or [1] * len(one.sequences)) for one in done)
        return Run([one.seconds for one in done], taken, n_tokens)


class Replays(Bench):
    """A :class:`Bench` in which a trace says how many tokens each step gives.

    Seven small operators replace the drafts by right and wrong ones, after the model has chosen.
    """

    def __init__(self, engine: Engine, k: int) -> None:
        super().__init__(engine, k)
        worker, device = self.step.worker, engine.device
        self._choose: Callable[..., Tensor] = chosen_ref if engine.kernels.name == "torch" else choose
        self._accept = worker.drafting.accept
        worker.drafting = worker.drafting._replace(accept=self._accept_by_trace)
        self._trace = torch.zeros(RUN_STEPS + 8, dtype=torch.int32, device=device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._place = torch.arange(1, k + 1, device=device)

    def _accept_by_trace(
        self, *, state: Any, texts: Texts, verified: Verified, values: Tensor | None, indices: Tensor
    ) -> None:
        chosen = self._choose(values, indices)
        pairs, drafts = (x.view(-1, self.k + 1) for x in (chosen, verified.state.tokens))
        is_wrong = self._place >= self._trace.index_select(0, self._step)
        drafts[:, 1:] = pairs[:, :-1] + is_wrong
        self._step.add_(1).remainder_(len(self._trace))
        self._accept(state=state, texts=texts, verified=verified, values=None, indices=chosen[:, None])

    def replayed(
        self, rows: int, prompt_tokens: int, given: list[int], turns: int
    ) -> tuple[float, dict[str, list[float]]]:
        """Return tokens and seconds per step of runs whose steps each give as many tokens as ``given``.

        given: tokens of every step, repeated as needed; more than k + 1 count as k + 1.

        Returns the mean number of tokens that a step gave a row, and the seconds per step of every turn,
        without and with drafts.
        """
        counts_of_steps = [min(n, self.k + 1) for n in given]
        repeated = (counts_of_steps * len(self._trace))[: len(self._trace)]
        self._trace.copy_(torch.tensor(repeated))
        found: dict[str, list[float]] = {"plain": [], "drafting": []}
        gained = []
        for turn in range(1 + turns):  # the first captures graphs
            for name, drafts in (("plain", False), ("drafting", True)):
                self._step.zero_()
                one = self.run(rows, prompt_tokens, drafts, RUN_STEPS)
                if turn:
                    found[name].append(one.seconds / RUN_STEPS)
            gained.append(one.n_tokens / rows / RUN_STEPS)
        self._trace.zero_()
        return mean(gained), found
