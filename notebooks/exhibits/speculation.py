"""What speculation gains on a text: live, replayed from known tokens, and by the records' step times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch

from rosellm.bench.drafts import TEXTS as KINDS, CountingScheduler
from rosellm.lab.records.bench import AnyTokenizer, Engine, SamplingParams, Transformer
from rosellm.lab.records.records import Results
from rosellm.roseinfer.kernels.noise import gumbel_noise
from rosellm.roseinfer.kernels.speculation import drafts_after
from rosellm.roseinfer.recipe import speculating
from rosellm.roseinfer.steps.pace import Always
from rosellm.rosetrainer.training import window_logits

Propose = Callable[[list[int], int], list[int] | None]

TEXTS = {kind: texts[0] for kind, texts in KINDS.items()}
PLACES = 1, 3, 7, 15  # drafts per row of the recorded steps


@dataclass
class Run:
    """Requests served together.

    tokens: those generated, by request.
    counts: for each step, how many tokens each of its requests got.
    """

    tokens: list[list[int]]
    counts: list[list[int]]


def generate(
    model: Transformer,
    tokenizer: AnyTokenizer,
    prompts: list[list[int]],
    new_tokens: int,
    n_drafts: int = 0,
    draft: Transformer | None = None,
    temperature: float = 0.0,
) -> Run:
    """Serve the prompts, the i-th with seed i; with ``n_drafts`` above 0, every step that can draft does.

    draft: the model that drafts; None if drafts come from the texts.
    """
    longest = max(map(len, prompts)) + new_tokens
    sizes = {"max_batch_size": len(prompts), "max_model_len": longest, "warm_up": False}
    rung: dict[str, object] = {"recipe": "split_kv"}
    if n_drafts:
        recipe = speculating("split_kv", "ngram" if draft is None else "draft", model.device)
        rung = {"recipe": recipe, "speculative_tokens": n_drafts, "draft": draft}
    engine = Engine(model, tokenizer, **sizes, **rung)
    if n_drafts:
        engine.step.pace = Always()
    scheduler = CountingScheduler(engine)
    common = {"temperature": temperature, "max_tokens": new_tokens, "ignore_eos": True}
    outputs = scheduler.run(prompts, [SamplingParams(seed=i, **common) for i in range(len(prompts))])
    return Run([one.token_ids for one in outputs], scheduler.counts)


@torch.no_grad()
def percent_drawn(
    draft: Transformer,
    prompts: list[list[int]],
    answers: list[list[int]],
    temperature: float,
    other_seeds: int | None = 0,
) -> float:
    """Return how many of all answers' tokens a draft model chooses, each after the text before it.

    answers: as :func:`generate` returns them.
    other_seeds: what to add to the seeds of the answers; None if the draft model takes the likeliest token.

    The result is in per cent.
    """
    equal = []
    for seed, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        text = torch.tensor(prompt + answer, device=draft.device)
        logits = window_logits(draft, text[None])[len(prompt) - 1 :]
        if other_seeds is not None:
            places = torch.arange(len(prompt), len(text), device=draft.device)
            seeds = torch.full_like(places, seed + other_seeds)
            logits = logits / temperature + gumbel_noise(seeds, places, logits.shape[1])
        equal += (logits.argmax(1) == text[len(prompt) :]).tolist()
    return 100 * sum(equal) / len(equal)


@dataclass
class Replay:
    """The steps of a text whose tokens are known.

    drafted, accepted: draft tokens of each step, and how many of them were accepted.
    """

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        return 1 + sum(self.accepted) / max(1, len(self.accepted))

    def percent_accepted(self, place: int) -> float | None:
        """Return how many of all ``place``-th drafts were accepted, in per cent; None if there was none."""
        there = [a for d, a in zip(self.drafted, self.accepted, strict=True) if d >= place]
        return 100 * sum(a >= place for a in there) / len(there) if there else None


def matched(tokens: list[int], most: int) -> list[int]:
    """Return the drafts that the engine would verify after ``tokens``."""
    return drafts_after(torch.tensor(tokens), most).tolist() if most > 0 else []


def replay(propose: Propose, prompt: list[int], answer: list[int], n_drafts: int) -> Replay:
    """Take the decode steps of an answer whose tokens are known.

    propose: takes the tokens so far and the maximum number of drafts; returns drafts. Its last token comes
        from a prefill, as the engine's first does. The last token needs no draft: the step gives it anyway.
    """
    found, known, text = Replay(), len(prompt) + 1, prompt + answer
    while known < len(text):
        most = min(n_drafts, len(text) - known - 1)
        drafts = list(propose(text[:known], most) or [])[:most]
        n = 0
        while n < len(drafts) and drafts[n] == text[known + n]:
            n += 1
        found.drafted.append(len(drafts))
        found.accepted.append(n)
        known += n + 1
    return found


def draft_words(text: str, most: int) -> str:
    """Return the words that the suffix match drafts after the words of ``text``."""
    words = text.split()
    ids = {word: i for i, word in enumerate(dict.fromkeys(words))}
    names = list(ids)
    return " ".join(names[i] for i in matched([ids[word] for word in words], most))


def step_us(results: Results, model: str) -> dict[int, float]:
    """Return rows → recorded µs of a decode step."""
    figures = results.by_model("steps_by_rows")[model]["figures"]
    return {int(rows): one["median_us"] for rows, one in figures.items()}


def expected_gain(us: dict[int, float], drafts: int, chance: float, sequences: int = 1) -> float | None:
    """Return by which factor drafting speeds up tokens, if verifying costs as much as a step of its rows.

    us: rows → µs of a step.
    chance: that a draft is accepted if all before it were.

    None if no step of so many rows is recorded.
    """
    rows = sequences * (drafts + 1)
    tokens = sum(chance**i for i in range(drafts + 1))
    return tokens * us[sequences] / us[rows] if rows in us else None


def verified_us(results: Results, model: str, size: str) -> dict[int, tuple[float, float]]:
    """Return drafts per row → recorded µs of a step without drafts, and of one that verifies as many.

    size: rows and prompt tokens, as the record's keys are written.
    """
    ways = sizes(results)[model, size]
    us = {int(k): (median(one["plain"]), median(one["verify"])) for k, one in ways.items()}
    return {k: us[k] for k in PLACES if k in us}


def sizes(results: Results) -> dict[tuple[str, str], dict[str, dict[str, list[float]]]]:
    """Return every model and size whose steps with drafts are recorded, with the turns by drafts per row."""
    models = results.by_model("verify_drafts").items()
    return {(name, size): turns for name, one in models for size, turns in one["figures"].items()}


def recorded_gains(results: Results, model: str, text: str) -> dict[str, list[float]]:
    """Return way of drafting → tokens per second as multiples of those without drafts, by requests."""
    runs = results.figures(f"drafts-{model}", text, "seconds").values()
    ways = ("ngram", "draft")
    return {way: [median(one["plain"]) / median(one[way]) for one in runs] for way in ways}
