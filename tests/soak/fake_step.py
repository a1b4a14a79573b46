"""A step without a model: the next token is a function of the tokens that the KV cache holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Literal

import numpy as np
from torch import Tensor

from rosellm.roseinfer.cache.kv_blocks import KVBlocks
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.outputs import Done
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.steps.step import Step
from tests.helpers import random_model, small_config
from tests.late_step import run_late

VOCAB, EOS, BLOCK, N_POSITIONS = 13, 0, 4, 48
CONFIG = small_config(
    vocab_size=VOCAB, eos_token_ids=(EOS,), n_positions=N_POSITIONS, n_layers=2, n_heads=1, d_model=1
)
BEGINS = "begin_prefill", "begin_decode"
POISON = "the model's logits are not finite"
WEIGHTS = np.random.default_rng(0).integers(1, 97, N_POSITIONS).astype(np.float32)  # sums of these are exact


def next_token(context: np.ndarray) -> int:
    """The token after these, ``[n]`` float32."""
    return int(context @ WEIGHTS[: len(context)] + len(context)) % VOCAB


@cache
def tokens_after(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """What follows a prompt, as far as there are positions."""
    tokens = list(prompt)
    while len(tokens) < N_POSITIONS:
        tokens.append(next_token(np.array(tokens, np.float32)))
    return tuple(tokens[len(prompt) :])


class Letters:
    """A tokenizer of one character a token, a space among them."""

    alphabet = "a bcdefghijkl"

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [self.alphabet.index(letter) for letter in text]

    def encode_many(self, texts: list[str], special: bool = True) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(self.push, token_ids))

    def stream(self) -> Letters:
        return self

    def push(self, token_id: int) -> str:
        return self.alphabet[token_id]

    def finish(self) -> str:
        return ""


class FakeStep:
    """Driven by the host, as :class:`rosellm.ladder.dense.Dense`; a token's key is the token.

    Every token depends on its whole context, read from the cache by block table: a block that is lost,
    shared by mistake or written by another gives other tokens. A request of ``poisoned`` fails where it would
    get its next token.
    """

    run_ahead = 0

    def __init__(self, blocks: KVBlocks) -> None:
        self.blocks = blocks
        self._keys = blocks.k_cache.numpy()[:, :, 0, :, 0]  # [L, N_BLOCKS, BLOCK_SIZE], the cache itself
        self._ended: list[Done] = []
        self.poisoned: set[int] = set()

    def begin_prefill(self, sequences: list[Sequence], counts: list[int]) -> None:
        for sequence, count in zip(sequences, counts, strict=True):
            self._write(sequence, count)
            sequence.num_cached_tokens += count
        self._commit("prefill", [s for s in sequences if s.completes_prefill(0)])

    def begin_decode(self, sequences: list[Sequence]) -> int:
        for sequence in sequences:
            self._write(sequence, 1)
        self._commit("decode", sequences)
        return len(sequences)

    def collect(self, leave: int = 0) -> Iterator[Done]:
        while self._ended:
            yield self._ended.pop(0)

    def release(self, sequence: Sequence) -> None:
        """Nothing is kept of a sequence."""

    def last_logits(self) -> Tensor:
        raise NotImplementedError("a step without a model has no logits")

    def _commit(self, kind: Literal["prefill", "decode"], sequences: list[Sequence]) -> None:
        failed = [s for s in sequences if s.request_id in self.poisoned]
        for sequence in failed:
            sequence.fail(POISON)
        new = int(kind == "decode")
        healthy = [s for s in sequences if not s.is_finished]
        got = [s for s in healthy if s.commit(self._next(s, s.num_cached_tokens + new), new)]
        self._ended.append(Done(kind, got, 1e-3, failed))

    def _next(self, sequence: Sequence, num_cached_tokens: int) -> int:
        """From the cache of one layer, in turns."""
        rows = self._keys[num_cached_tokens % len(self._keys), sequence.block_ids]
        return next_token(rows.ravel()[:num_cached_tokens])

    def _write(self, sequence: Sequence, count: int) -> None:
        """Reserve slots for the next ``count`` tokens, and cache them in every layer."""
        self.blocks.reserve_prompt(sequence.block_ids, count)
        for position in range(sequence.num_cached_tokens, sequence.num_cached_tokens + count):
            place = sequence.block_ids[position // BLOCK], position % BLOCK
            self._keys[:, *place] = sequence.tokens[position]


def fake_engine(run_ahead: int, **options) -> Engine:
    """An engine with all its parts but the step, whose tokens come ``run_ahead`` steps late."""
    engine = Engine(_never_run(), recipe="resident_step", block_size=BLOCK, **options)
    engine.step, engine.budget.run_ahead = FakeStep(engine.blocks), 0
    if run_ahead:
        run_late(engine, run_ahead)
    return engine


def poison(engine: Engine, request_id: int) -> None:
    """The request of a fake engine fails where it would get its next token."""
    step = engine.step
    getattr(step, "step", step).poisoned.add(request_id)


def call_before(step: Step, hook: Callable[[], None], names: tuple[str, ...] = BEGINS) -> None:
    """From now on ``hook`` is called before each of these methods of the step."""

    def hooked(method: Callable) -> Callable:
        return lambda *arguments: (hook(), method(*arguments))[1]

    for name in names:
        setattr(step, name, hooked(getattr(step, name)))


@cache
def _never_run():
    return random_model(0, CONFIG)
