"""How tensor parallelism shards a model: regions, bytes and all-reduces; and all-reduces as they run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rosellm.models.arch import Arch
from rosellm.models.families.table import KNOWN_SHAPES
from rosellm.models.model import Transformer
from rosellm.models.part import Part
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.ranks.group import ALONE
from rosellm.roseinfer.recipe import RECIPES
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import SamplingParams

MODERN = ("Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B")
MODELS = {name.partition("/")[2]: KNOWN_SHAPES[name] for name in MODERN}
WATCHED = replace(RECIPES["split_kv"], runner="eager")  # so that its all-reduces are calls even on a GPU
SUMS_A_LAYER = 2  # after ``out`` and after ``down``


class Region(NamedTuple):
    """Rows and columns of a matrix that one rank holds."""

    rank: int
    rows: range
    columns: range


@dataclass(frozen=True)
class CutMatrix:
    """A whole matrix ``[rows, columns]``, and the region that each rank holds."""

    name: str
    rows: int
    columns: int
    regions: list[Region]

    @property
    def is_cut_by_columns(self) -> bool:
        return any(len(region.columns) < self.columns for region in self.regions)

    def elements(self, rank: int) -> int:
        return sum(len(one.rows) * len(one.columns) for one in self.regions if one.rank == rank)


def cut_matrices(arch: Arch, n_ranks: int) -> list[CutMatrix]:
    """Return the matrices that a decode step reads in one layer, and the head. Raises ``OptionError``."""
    parts = [Part(rank, n_ranks) for rank in range(n_ranks)]
    parts[0].check(arch)
    with torch.device("meta"):
        whole = Transformer(arch)
    shapes = {name: one.shape for name, one in whole.blocks[0].named_parameters() if one.dim() == 2}
    shapes["lm_head.weight"] = whole.lm_head.weight.shape
    found = []
    for name, (rows, columns) in shapes.items():
        regions = [
            region for part in parts for region in _regions(f"blocks.0.{name}", part, arch, rows, columns)
        ]
        found.append(CutMatrix(name.removesuffix(".weight"), rows, columns, regions))
    return found


def _regions(name: str, part: Part, arch: Arch, rows: int, columns: int) -> Iterator[Region]:
    first = 0
    for piece in part.pieces(name, arch, rows):
        kept = range(first + piece.kept.start, first + piece.kept.stop)
        yield Region(part.rank, kept, part.columns(name, columns))
        first += piece.n_rows


@cache
def step_bytes(arch: Arch, n_ranks: int = 1, itemsize: int = 2) -> int:
    """Return the bytes of weights that rank 0 reads in a decode step: its shards of layers and head."""
    *layer, head = cut_matrices(arch, n_ranks)
    return itemsize * (arch.n_layers * sum(one.elements(0) for one in layer) + head.elements(0))


def sums_a_step(arch: Arch) -> int:
    """Count the all-reduces of a decode step."""
    return SUMS_A_LAYER * arch.n_layers


@dataclass
class SummedStep:
    """A decode step on rank 0: start, end and each all-reduce in seconds, and their bytes."""

    start: float
    end: float
    sums: list[tuple[float, float]]
    n_bytes: list[int]

    @property
    def computing(self) -> list[tuple[float, float]]:
        """The intervals between the all-reduces."""
        edges = [self.start, *(at for both in self.sums for at in both), self.end]
        return [both for i, both in enumerate(pairwise(edges)) if i % 2 == 0]

    @property
    def share(self) -> float:
        """The all-reduces' share of the step, including waits for other ranks."""
        return sum(end - start for start, end in self.sums) / (self.end - self.start)


@dataclass
class _Watched:
    """Collectives that record when each all-reduce starts and ends."""

    collectives: Any
    sums: list[tuple[float, float, int]] = field(default_factory=list)

    def summed(self, x: Tensor) -> Tensor:
        begin = perf_counter()
        result = self.collectives.summed(x)
        self.sums.append((begin, perf_counter(), x.nbytes))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.collectives, name)


def decoded(
    engine: Engine, prompts: list[list[int]], n_steps: int
) -> tuple[list[list[int]], list[SummedStep]]:
    """Return the greedy tokens of these prompts, and their decode steps with all-reduces.

    Those in a captured step are not visible.
    """
    params = SamplingParams(temperature=0.0, max_tokens=n_steps + 1, ignore_eos=True)
    sequences = [engine.make_sequence(prompt, params) for prompt in prompts]
    engine.prefill(sequences)
    with _watched(engine) as watched:
        steps = [_step(engine, sequences, watched) for _ in range(n_steps)]
    for sequence in sequences:
        engine.release(sequence)
    return [sequence.output for sequence in sequences], steps


def _step(engine: Engine, sequences: list[Sequence], watched: _Watched) -> SummedStep:
    watched.sums, start = [], perf_counter()
    engine.decode(sequences)
    end = perf_counter()
    return SummedStep(start, end, [one[:2] for one in watched.sums], [one[2] for one in watched.sums])


@contextmanager
def _watched(engine: Engine) -> Iterator[_Watched]:
    group: Any = engine.group
    watched = _Watched(None if group is ALONE else group.collectives)
    if group is ALONE:
        yield watched
        return
    group.collectives = watched
    try:
        yield watched
    finally:
        group.collectives = watched.collectives
