"""Estimate what a run saves if prompts join its decode steps: whole passes over the weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from rosellm.bench.arrivals import Arrival
from rosellm.lab.records.records import ceilings
from rosellm.roseinfer.exhibits import load_exhibit


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
