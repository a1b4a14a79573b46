"""The sizes of the calls with which a kernel is tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rosellm.models.arch import Arch
from rosellm.roseinfer.kernels.few_rows import FEW_ROWS

EPS = 1e-2  # of norms; large enough that a kernel without it fails
POSITIONS = 1100  # more than the tokens of every context in the fixed cases
Operands = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """The sizes of one call; a kernel uses only the sizes that its operands have.

    rows: number of rows, one per sequence or token.
    width: number of input columns.
    outputs: number of output columns, or the size of the vocabulary.
    option: selects one of the kernel's uses.
    cached: number of cached tokens of the first row; 0 for a short context.
    """

    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    width: int
    outputs: int
    dtype: torch.dtype = torch.float32
    option: int = 0
    cached: int = 0

    @property
    def positions(self) -> int:
        """The number of positions of the model: more than the cached tokens."""
        return max(POSITIONS, self.cached + 2)


SMALLEST = Case(1, 1, 1, 4, 1, 1, 2)
ODD = Case(5, 3, 3, 6, 4, 37, 26)
GROUPED = Case(9, 4, 2, 16, 16, 64, 48)
NARROW = Case(FEW_ROWS, 6, 3, 10, 8, 100, 62)
GPT2 = Case(33, 12, 12, 64, 64, 768, 96)
MANY_ROWS = Case(300, 1, 1, 8, 8, 24, 10)
WIDE = Case(3, 4, 2, 128, 16, 2048, 40)  # heads as in Qwen3 and Llama 3, width as in Llama 3.2
# Contexts, widths and vocabularies of many tiles: a kernel without a loop would pass all other cases.
# Each size comes four times in a row, to combine it with each value of each option.
LONG = Case(2, 4, 2, 16, 16, 256, 5000, cached=300)
LONGEST = Case(1, 1, 1, 16, 16, 33 * 256, 100, cached=1025)
LONGEST_OF_TWO = replace(LONGEST, rows=2, heads=2)
MOST_RANDOM, USES = 20, 6


def cases(
    model: Arch | None, dtypes: tuple[torch.dtype, ...], seed: int, n_random: int, context: int = 0
) -> Iterator[Case]:
    """Yield the cases to try: fixed sizes, from the smallest to those of GPT-2 and Llama, then random sizes.

    model: architecture whose sizes are an additional case; None for none.
    dtypes: alternate every three cases; ``option`` increases with every case.
    n_random: number of random cases.
    context: number of cached tokens of two additional cases; 0 for none.
    """
    rng = np.random.default_rng(seed)
    sizes = [SMALLEST, ODD, ODD, GROUPED, GROUPED, NARROW, GPT2, MANY_ROWS, WIDE]
    sizes += [*[LONG] * 4, *[LONGEST] * 2, *[LONGEST_OF_TWO] * 2]
    if context:
        sizes += [replace(LONGEST, width=64, cached=context)] * 2
    if model is not None:
        heads = model.n_heads, model.n_kv_heads, model.head_dim
        sizes.append(Case(17, *heads, block_size=16, width=model.d_model, outputs=2 * model.d_model))
    sizes += [_random(rng) for _ in range(n_random)]
    for i, one in enumerate(sizes):
        yield replace(one, dtype=dtypes[i // 3 % len(dtypes)], option=i)


def _random(rng: np.random.Generator) -> Case:
    rows, width, outputs = (int(n) for n in rng.integers(2, (MOST_RANDOM, 200, 100)))
    kv_heads, group, half = (int(n) for n in rng.integers(1, (4, 4, 20)))
    block_size = 1 << int(rng.integers(0, 7))
    cached = int(rng.integers(0, 400))
    return Case(rows, kv_heads * group, kv_heads, 2 * half, block_size, width, 2 * outputs, cached=cached)
