"""Random operations on an engine without a scheduler: any sequences, in any order, at any time."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from rosellm.ladder.museum import STEPS
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import BEST_RUNG
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import SamplingParams
from tests.helpers import MODERN, random_model, small_config, uncached_greedy
from tests.soak.fake_step import BLOCK, EOS, VOCAB
from tests.soak.programs import one_of
from tests.soak.scheduler_driver import Asked, OnEngine, prompt_of

MOST_SEQUENCES, POSITIONS = 4, 192
FEW, FAR = 12, 150  # tokens asked for
PATIENCE_S = 2.0  # of the processor's time
AMPLE = MOST_SEQUENCES * POSITIONS // BLOCK


@dataclass(eq=False)
class Held:
    """A sequence, what it must come to, and whether its prompt is begun wholly, so that it may decode."""

    sequence: Sequence
    asked: Asked
    decodes: bool = False


class EngineDriver(OnEngine):
    """What the caller may do is what the engine's docstrings say; the oracle caches nothing."""

    weights = {
        "make": 12, "prefill": 14, "decode": 36, "decode_again": 12, "decode_far": 2, "collect": 14,
        "give_up": 5, "release": 4, "forget_prefixes": 1,
    }  # fmt: skip
    axes = {
        "rung": ("mutable_block_info", "resident_step", "packed_prefill", BEST_RUNG),
        "prefix_cache": (False, True),
    }

    def open(self, rung: str, prefix_cache: bool) -> None:
        self.engine = Engine(
            _model(),
            recipe=rung,
            block_size=BLOCK,
            num_kv_blocks=AMPLE,
            max_batch_size=MOST_SEQUENCES,
            prefix_cache=prefix_cache and rung not in STEPS,
        )
        self.held: list[Held] = []
        self.latest: list[Sequence] = []

    def apply(self, name: str, a: int, b: int) -> None:
        with _patience(name):
            super().apply(name, a, b)

    # Operations.

    def make(self, a: int, b: int) -> bool:
        if len(self.held) == MOST_SEQUENCES:
            return False
        prompt = prompt_of(a, b)
        max_tokens = FAR if b >= 224 else 1 + b % FEW
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=a >= 64)
        asked = Asked.of(prompt, params, _following(tuple(prompt), max_tokens))
        self.held.append(Held(self.engine.make_sequence(prompt, params), asked))
        return True

    def prefill(self, a: int, b: int) -> bool:
        """Some that do not decode yet: all their tokens, or so many at most."""
        chosen = self._choose(a, decodes=False)
        if not chosen:
            return False
        counts = None if b % 2 else [1 + (b >> place) % 8 for place in range(len(chosen))]
        whole = self.engine.begin_prefill([held.sequence for held in chosen], counts)
        for held in chosen:
            held.decodes = held.sequence in whole
        self.seen["prompts cut"] += len(chosen) - len(whole)
        return True

    def decode(self, a: int, b: int) -> bool:
        """Some of those that decode, in any order."""
        chosen = [held.sequence for held in self._choose(a, decodes=True)]
        if not chosen:
            return False
        self.latest = chosen[b % len(chosen) :] + chosen[: b % len(chosen)]
        self.engine.begin_decode(self.latest)
        return True

    def decode_again(self, a: int, b: int) -> bool:
        """The same list, if all in it still decode."""
        decoding = [held.sequence for held in self.held if held.decodes and not held.sequence.is_finished]
        if not self.latest or not set(self.latest) <= set(decoding):
            return False
        self.engine.begin_decode(self.latest)
        self.seen["lists passed again"] += 1
        return True

    def decode_far(self, a: int, b: int) -> bool:
        """More steps than a resident step can tell apart, and none collected."""
        if not self.decode(a, b):
            return False
        for _ in range(FAR):
            running = [sequence for sequence in self.latest if not sequence.is_finished]
            if running:
                self.engine.begin_decode(running)
        return True

    def collect(self, a: int, b: int) -> None:
        """Whoever is told of got a token, unless it was released meanwhile."""
        for done in self.engine.step.collect(a % 5):
            self.seen["steps"] += 1
            assert not done.failed and len(set(done.sequences)) == len(done.sequences)

    @one_of("held")
    def give_up(self, held: Held, b: int) -> bool:
        """As one that is preempted: its blocks go, and it is prefilled again later, output included."""
        if held.sequence.is_finished:
            return False
        self.engine.release(held.sequence)
        held.decodes = False
        return True

    @one_of("held")
    def release(self, held: Held, b: int) -> None:
        self.held.remove(held)
        self.engine.release(held.sequence)

    # What must hold.

    def check(self) -> None:
        for held in self.held:
            sequence, asked = held.sequence, held.asked
            assert sequence.output == asked.tokens[: sequence.n_output]
            is_whole = sequence.n_output == len(asked.tokens)
            assert sequence.finish_reason == (asked.reason if is_whole else None)
        self.engine.check_integrity()

    def end(self) -> None:
        """Everybody runs to its end."""
        with _patience("end"):
            waiting = [h.sequence for h in self.held if not (h.decodes or h.sequence.is_finished)]
            if waiting:
                self.engine.prefill(waiting)
            list(self.engine.step.collect())
            while running := [h.sequence for h in self.held if not h.sequence.is_finished]:
                n_before = sum(sequence.n_output for sequence in running)
                self.engine.decode(running)
                assert sum(sequence.n_output for sequence in running) > n_before, "a token is lost"
        self.check()
        while self.held:
            self.release(0, 0)
        self.assert_all_free()

    def _choose(self, a: int, decodes: bool) -> list[Held]:
        """Those at the places of the bits of ``a``."""
        fit = [h for h in self.held if h.decodes == decodes and not h.sequence.is_finished]
        return [held for place, held in enumerate(fit) if a >> place & 1]


@contextmanager
def _patience(name: str) -> Iterator[None]:
    """An operation that never ends is a failure as any other."""

    def interrupt(_signal: int, _frame: object) -> None:
        raise AssertionError(f"{name} does not come to its end")

    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@cache
def _model():
    config = small_config(vocab_size=VOCAB, eos_token_ids=(EOS,), n_positions=POSITIONS, d_model=8, **MODERN)
    return random_model(0, config)


@cache
def _following(prompt: tuple[int, ...], n: int) -> tuple[int, ...]:
    return tuple(uncached_greedy(_model(), list(prompt), n))
