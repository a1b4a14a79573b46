"""Passes over the weights: which ones a run takes, and what their GEMMs cost."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from rosellm.bench.arrivals import Arrival
from rosellm.lab.records.records import ceilings
from rosellm.lab.records.watched_step import Begun, watched
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.exhibits import load_exhibit

DECODE, PROMPTS, JOINED = "decode", "prompts", "joined"
KINDS = DECODE, PROMPTS, JOINED


class Pass(NamedTuple):
    """One pass over the weights for ``rows`` decoding sequences, ``tokens`` prompt tokens, or both."""

    kind: str
    rows: int
    tokens: int
    seconds: float


class WatchedPass:
    """A wrapper of a joined pass that records in ``began`` when each call began, by ``perf_counter``."""

    def __init__(self, joined: Any) -> None:
        self._joined = joined
        self.began: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._joined, name)

    def __call__(self, *args: Any) -> Tensor:
        self.began.append(perf_counter())
        return self._joined(*args)


@contextmanager
def watched_joins(engine: Engine) -> Iterator[list[float]]:
    """Yield the list of times at which joined passes of an engine begin; empty if it joins nothing."""
    step: Any = engine.step
    if not hasattr(step, "joined"):
        yield []
        return
    joined = step.joined
    step.joined = watch = WatchedPass(joined)
    try:
        yield watch.began
    finally:
        step.joined = joined


def passes_of(engine: Engine, run: Callable[[], object]) -> list[Pass]:
    """Return the passes that a run on the engine takes, in the order in which they ended."""
    with watched_joins(engine) as began, watched(engine) as steps:
        run()
    prefills = [one.began for one in steps if one.kind == "prefill"]
    return _merged(steps, {prefills[bisect_right(prefills, at) - 1] for at in began})


def _merged(steps: Iterable[Begun], joined: set[float]) -> list[Pass]:
    """Merge each decode step with the prefill that joined it; joined: when such prefills began."""
    passes: list[Pass] = []
    for one in steps:
        if one.kind == "decode":
            passes.append(Pass(DECODE, one.rows, 0, one.seconds))
        elif one.began in joined:
            decode = passes.pop()
            passes.append(Pass(JOINED, decode.rows, one.tokens, decode.seconds + one.seconds))
        else:
            passes.append(Pass(PROMPTS, 0, one.tokens, one.seconds))
    return passes


def counted(passes: Iterable[Pass]) -> dict[str, int]:
    """Count the passes of each kind."""
    kinds = [one.kind for one in passes]
    return {kind: kinds.count(kind) for kind in KINDS}


def recorded_products() -> dict[int, float]:
    """Return rows → recorded µs of all layers' GEMMs of GPT-2 small on the H200: cuBLAS in a chain."""
    chain_us, head_us = (ceilings()[f"{name}_us_vocab_50257"] for name in ("cublas_gemm_chain", "lm_head"))
    return {int(rows): us - head_us[rows] for rows, us in chain_us.items()}


def products_us(rows: int) -> float:
    """Interpolate ``recorded_products`` linearly to any number of rows."""
    recorded = recorded_products()
    return float(np.interp(rows, list(recorded), list(recorded.values())))


def taken_by(requests: Sequence[Arrival], together: int, budget: int = 16_384) -> list[tuple[int, int]]:
    """Return the decoding rows and new prompt tokens of each step of a run whose requests all come at once.

    A finished row is given to the next request in the following step. budget: prompt tokens per step, which
    the step's last prompt may exceed.
    """
    waiting, running, steps = list(reversed(requests)), list[int](), list[tuple[int, int]]()
    while waiting or running:
        rows, tokens, new = len(running), 0, list[int]()
        while waiting and rows + len(new) < together and tokens < budget:
            tokens += waiting[-1].prompt_tokens
            new.append(waiting.pop().new_tokens)
        steps.append((rows, tokens))
        running = [n - 1 for n in chain(running, new) if n > 1]
    return steps


def joins(rows: int, tokens: int) -> bool:
    """Return whether ``tokens`` prompt tokens would join a step of ``rows``."""
    return rows > 0 and 0 < tokens <= load_exhibit("one_pass").JOINED_TOKENS[-1]


def saved_us(steps: Iterable[tuple[int, int]]) -> float:
    """Return the µs of GEMMs that a run saves if prompts join the decode steps."""
    together = [(rows, tokens) for rows, tokens in steps if joins(rows, tokens)]
    apart = sum(products_us(rows) + products_us(tokens) for rows, tokens in together)
    return apart - sum(products_us(rows + tokens) for rows, tokens in together)
