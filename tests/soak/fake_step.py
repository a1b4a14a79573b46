"""A step without a model: the next token is a function of the tokens that the KV cache holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from copy import copy
from functools import cache

import numpy as np
from torch import Tensor

from rosellm.roseinfer.cache.kv_blocks import KVBlocks
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.outputs import Done
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.steps.step import Step
from tests.helpers import random_model, small_config

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

    def decode(self, token_ids: list[int], prompt: object = (), skip_special: bool = True) -> str:
        return "".join(map(self.push, token_ids))

    def stream(self, prompt: object = (), skip_special: bool = True) -> Letters:
        return self

    def push(self, token_id: int) -> str:
        return self.alphabet[token_id]

    def finish(self) -> str:
        return ""


class FakeStep:
    """Runs at once, on copies of the sequences, and hands tokens over ``run_ahead`` steps later.

    Every token depends on its whole context, read from the cache by block table, where a token's key is the
    token: a block that is lost, shared by mistake or written by another gives other tokens. A request of
    ``poisoned`` fails where it would get its next token. A copy shares its sequence's block lists. ``idle``
    counts the decode steps that had nothing left to run.
    """

    def __init__(self, blocks: KVBlocks, run_ahead: int) -> None:
        self.blocks, self.run_ahead = blocks, run_ahead
        self._keys = blocks.k_cache.numpy()[:, :, 0, :, 0]  # [L, N_BLOCKS, BLOCK_SIZE], the cache itself
        self._ahead: dict[Sequence, Sequence] = {}
        self._begun: deque[tuple[str, list[Sequence], list[int | str], list[int]]] = deque()
        self.poisoned: set[int] = set()
        self.idle = 0

    def begin_prefill(self, sequences: list[Sequence], counts: list[int]) -> None:
        whole = [s for s, n in zip(sequences, counts, strict=True) if s.completes_prefill(n)]
        for sequence, count in zip(sequences, counts, strict=True):
            ahead = self._ahead[sequence] = copy(sequence)
            ahead.tokens = list(sequence.tokens)
            self._write(ahead, count)
            ahead.num_cached_tokens += count
            if sequence not in whole:
                sequence.num_cached_tokens += count
        self._begin("prefill", whole, [s.prefill_length - s.num_cached_tokens for s in whole])

    def begin_decode(self, sequences: list[Sequence]) -> int:
        running = [s for s in sequences if not self._ahead[s].is_finished]
        self.idle += not running
        if running:
            for sequence in running:
                self._write(self._ahead[sequence], 1)
            self._begin("decode", running, [1] * len(running))
        return len(running)

    def collect(self, leave: int = 0) -> Iterator[Done]:
        while len(self._begun) > leave:
            kind, sequences, tokens, counts = self._begun.popleft()
            got, failed = [], []
            for sequence, token, count in zip(sequences, tokens, counts, strict=True):
                if sequence not in self._ahead:
                    continue  # it was released before this came
                if isinstance(token, str):
                    sequence.fail(token)
                    failed.append(sequence)
                elif sequence.commit(token, count):
                    got.append(sequence)
            yield Done(kind, got, 1e-3, failed)

    def release(self, sequence: Sequence) -> None:
        self._ahead.pop(sequence, None)

    def last_logits(self) -> Tensor:
        raise NotImplementedError("a step without a model has no logits")

    def _begin(self, kind: str, sequences: list[Sequence], counts: list[int]) -> None:
        """``counts``: tokens of each that are cached with this step."""
        new = int(kind == "decode")  # a prefill's are cached already
        ahead = [self._ahead[sequence] for sequence in sequences]
        for one in ahead:
            if one.request_id in self.poisoned:
                one.fail(POISON)
            else:
                one.commit(self._next(one, one.num_cached_tokens + new), new)
        tokens = [one.error or one.tokens[one.num_cached_tokens] for one in ahead]
        self._begun.append((kind, sequences, tokens, counts))

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
    engine.step, engine.budget.run_ahead = FakeStep(engine.blocks, run_ahead), run_ahead
    return engine


def poison(engine: Engine, request_id: int) -> None:
    """The request of a fake engine fails where it would get its next token."""
    engine.step.poisoned.add(request_id)


def call_before(step: Step, hook: Callable[[], None], names: tuple[str, ...] = BEGINS) -> None:
    """From now on ``hook`` is called before each of these methods of the step."""

    def hooked(method: Callable) -> Callable:
        return lambda *arguments: (hook(), method(*arguments))[1]

    for name in names:
        setattr(step, name, hooked(getattr(step, name)))


@cache
def _never_run():
    return random_model(0, CONFIG)
