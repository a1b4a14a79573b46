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


def engine_of(seed: int = 0, tokenizer: Tokenizer | None = None, **options) -> Engine:
    changes = {"vocab_size": tokenizer.vocab_size} if tokenizer else {}
    options = {"recipe": "resident_step"} | options
    return small_engine(random_model(seed, small_config(**changes)), tokenizer=tokenizer, **options)


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
        begin_prefill, begin_decode = engine.begin_prefill, engine.begin_decode

        def spy_prefill(sequences: list[Sequence], counts: list[int]) -> list[Sequence]:
            self.log.append(("prefill", [s.request_id for s in sequences]))
            self.chunks.append(counts)
            return begin_prefill(sequences, counts)

        def spy_decode(sequences: list[Sequence]) -> int:
            self.log.append(("decode", [s.request_id for s in sequences]))
            return begin_decode(sequences)

        monkeypatch.setattr(engine, "begin_prefill", spy_prefill)
        monkeypatch.setattr(engine, "begin_decode", spy_decode)

    def of(self, name: str) -> list[list[int]]:
        return [ids for called, ids in self.log if called == name]


def outcome(read: Callable[[], object]) -> object:
    try:
        return read()
    except RoseError as error:
        return error
