"""What tests of schedulers and streams share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rosellm.errors import RoseError
from rosellm.models.tokenizer import Tokenizer
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.scheduler import OnlineScheduler
from tests.helpers import random_model, small_config, small_engine

WORDS = "hello world, here is some text to learn from, with words and words"
ENDLESS = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)


def greedy(max_tokens: int = 8, **others) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **others)


def engine_of(seed: int = 0, tokenizer: Tokenizer | None = None, n_positions: int = 64, **options) -> Engine:
    vocab_size = tokenizer.vocab_size if tokenizer else 101
    model = random_model(seed, small_config(vocab_size=vocab_size, n_positions=n_positions))
    return small_engine(model, **{"tokenizer": tokenizer, "recipe": "resident_step"} | options)


def run_to_end(scheduler: OnlineScheduler) -> None:
    while scheduler.has_unfinished:
        scheduler.step()


def assert_all_free(engine: Engine) -> None:
    if engine.prefix_cache is not None:
        engine.prefix_cache.clear()
    engine.check_integrity()
    assert engine.blocks.num_free_blocks() == engine.num_kv_blocks


class Calls:
    """Keeps the batches that the scheduler gives to the engine, and the chunks of prompts."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, list[int]]] = []
        self.chunks: list[list[int]] = []
        for name in ("prefill", "decode"):
            monkeypatch.setattr(engine, f"begin_{name}", self._seen(name, getattr(engine, f"begin_{name}")))

    def of(self, name: str) -> list[list[int]]:
        return [ids for called, ids in self.log if called == name]

    def _seen(self, name: str, begin: Callable) -> Callable:
        def see_and_begin(sequences: list[Sequence], *counts: list[int]) -> object:
            self.log.append((name, [s.request_id for s in sequences]))
            self.chunks += counts
            return begin(sequences, *counts)

        return see_and_begin


def outcome(read: Callable[[], object]) -> object:
    try:
        return read()
    except RoseError as error:
        return error
