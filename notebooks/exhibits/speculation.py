"""What speculation gains on a text: live, replayed from known tokens, and by the records' step times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import torch

from rosellm.bench.drafts import CountingScheduler
from rosellm.lab.records.bench import AnyTokenizer, Engine, SamplingParams, Transformer
from rosellm.lab.records.records import Results
from rosellm.roseinfer.kernels.speculation import drafts_after

Propose = Callable[[list[int], int], list[int] | None]

DRAFTED = "one tile per row", "attention of prefills"  # versions in the record ``verify_steps``


@dataclass
class Run:
    """Requests served together.

    tokens: those generated, by request.
    counts: for each step, how many tokens each of its requests got.
    seconds: of the whole run.
    """

    tokens: list[list[int]]
    counts: list[list[int]]
    seconds: float


def generate(
    model: Transformer, tokenizer: AnyTokenizer, prompts: list[list[int]], new_tokens: int, n_drafts: int = 0
) -> Run:
    """Serve the prompts greedily; with ``n_drafts`` above 0, every step that can draft does."""
    longest = max(map(len, prompts)) + new_tokens
    sizes = {"max_batch_size": len(prompts), "max_model_len": longest, "warm_up": False}
    rung = {"recipe": "speculative", "speculative_tokens": n_drafts} if n_drafts else {"recipe": "split_kv"}
    engine = Engine(model, tokenizer, **sizes, **rung)
    if n_drafts:
        engine.step.pace.drafts = lambda rows, accepted, batch: True
    scheduler = CountingScheduler(engine)
    start = perf_counter()
    outputs = scheduler.run(prompts, SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True))
    return Run([one.token_ids for one in outputs], scheduler.counts, perf_counter() - start)


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


def verified_us(results: Results, model: str, size: str, version: str = DRAFTED[0]) -> tuple[float, float]:
    """Return the recorded µs of a step without drafts, and of one that verifies 7 drafts per row.

    size: rows and prompt tokens, as the record's keys are written.
    """
    turns = results.figures("verify_steps", model, size, version, "7")
    return median(turns["plain"]), median(turns["verify"])


def sizes(results: Results) -> Iterator[tuple[str, str]]:
    """Yield every model and size of the record."""
    for model, found in results.figures("verify_steps").items():
        yield from ((model, size) for size in found)
