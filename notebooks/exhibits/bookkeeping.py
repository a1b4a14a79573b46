"""Time the Python code that reserves cache slots, for two kinds of metadata."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rosellm.lab.records.experiment import Asked, Experiment, Record
from rosellm.lab.records.turns import each
from rosellm.ladder.pools import SlotPool, TuplePool

POOLS = {"tuple": TuplePool, "slots": SlotPool}
BLOCK_SIZE, REPEATS = 64, 5


def bookkeeping_cost(batch: int, layers: int, steps: int) -> dict[str, list[float]]:
    """Time the Python code that reserves the cache slot of a token in one layer.

    batch: number of sequences.
    layers: number of layers.
    steps: tokens to reserve per sequence and layer.

    Returns kind of pool → nanoseconds per token and layer, for each repeat.
    """
    return {
        name: [_reserve_ns(kind, batch, layers, steps) for _ in range(REPEATS)]
        for name, kind in POOLS.items()
    }


def _reserve_ns(kind: type[TuplePool], batch: int, layers: int, steps: int) -> float:
    blocks = -(-steps // BLOCK_SIZE) * batch
    pools = [kind(layer, blocks, BLOCK_SIZE) for layer in range(layers)]
    tables: list[list[list[int]]] = [[[] for _ in range(batch)] for _ in range(layers)]
    start = time.perf_counter_ns()
    for _ in range(steps):
        for layer in range(layers):
            pools[layer].reserve_tokens(tables[layer])
    return (time.perf_counter_ns() - start) / (steps * layers * batch)


def bookkeeping(asked: Asked) -> Iterator[Record]:
    """Measure the nanoseconds of Python code per cache slot reserved, for two kinds of metadata."""
    batches = each("bookkeeping", (8, 256))
    figures = {str(batch): bookkeeping_cost(batch, 12, 128) for batch in batches}
    yield asked.record("bookkeeping", figures=figures)


EXPERIMENTS = [Experiment("bookkeeping", bookkeeping, model=None)]
