"""Plan step times on one GPU or several: floors times what a device needs beyond them, plus all-reduces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from rosellm.lab.records.all_reduce import NONE
from rosellm.lab.records.floors import Ceiling, floors_us, prefill_floors_us
from rosellm.models.arch import Arch
from rosellm.models.part import Part
from rosellm.roseinfer.layers.fused import fastest_products
from rosellm.roseinfer.steps.resident import RUN_AHEAD

DECODE_TERMS = ("a layer, µs", "weights", "weights of several rows", "attention", "activations")
PREFILL_TERMS = (
    "a layer, µs", "products", "products of many tokens", "attention", "activations", "a prompt, µs",
)  # fmt: skip
ATTENTION = PREFILL_TERMS.index("attention")
MANY_TOKENS = 4096  # per pass
ACTIVATIONS = ("norm", "elementwise", "embedding", "append")
ITEMSIZE = 2  # bytes of an element
FAR = 1024  # context from which attention's time per cached token is derived
KB = 1024


@dataclass(frozen=True)
class Cut:
    """A model in a 16-bit type, sharded equally over ``ranks`` devices: its work as floors, in µs."""

    whole: Arch
    ceiling: Ceiling
    ranks: int = 1

    def on(self, ranks: int) -> Cut:
        """Return the same model on ``ranks`` ranks."""
        return replace(self, ranks=ranks)

    @cached_property
    def part(self) -> Arch:
        """A rank's shard, except that its head is ``1 / ranks`` of the whole. Raises ``OptionError``."""
        part = Part(0, self.ranks)
        part.check(self.whole)
        return part.arch(self.whole)

    @property
    def sums(self) -> int:
        """All-reduces in a pass: after attention and after the MLP of each layer."""
        return 2 * self.whole.n_layers * (self.ranks > 1)

    def decode(self, rows: int, context: float) -> tuple[float, ...]:
        """Return ``DECODE_TERMS`` of a step of ``rows`` rows with ``context`` cached tokens each."""
        floors = floors_us(self.part, rows, context, ITEMSIZE, self.ceiling)
        weights = floors["GEMM"] + floors["head"] / self.ranks
        return self.whole.n_layers, weights, weights * (rows > 1), floors["attention"], _activations(floors)

    def prefill(self, prompts: float, tokens: float) -> tuple[float, ...]:
        """Return ``PREFILL_TERMS`` of a pass of ``prompts`` equally long prompts with ``tokens`` in total."""
        floors = prefill_floors_us(self.part, prompts, tokens / prompts, ITEMSIZE, self.ceiling)
        products = floors["GEMM"] + floors["head"] / self.ranks
        many = products * (tokens > MANY_TOKENS)
        return self.whole.n_layers, products, many, floors["attention"], _activations(floors), prompts

    @property
    def pair_us(self) -> float:
        """µs of a query-key pair, in all layers and heads of a rank."""
        return 4 * self.part.n_layers * self.part.attention_width / self.ceiling.flops_per_us


def _activations(floors: dict[str, float]) -> float:
    return sum(floors[cause] for cause in ACTIVATIONS)


@dataclass(frozen=True)
class Sums:
    """µs of one all-reduce beyond the norm after it, by bytes: measured among ``ranks`` ranks in one way.

    Interpolated linearly between sizes, and extrapolated beyond the largest from the last two. norm_us: µs of
    the norm itself, which a GEMM of few rows fuses where there is no all-reduce.
    """

    ranks: int
    sizes: tuple[int, ...]
    us: tuple[float, ...]
    norm_us: float = 0.0

    def __call__(self, n_bytes: float) -> float:
        if n_bytes <= self.sizes[-1] or len(self.sizes) == 1:
            return float(np.interp(n_bytes, self.sizes, self.us))
        (before, last), (at, end) = self.sizes[-2:], self.us[-2:]
        return end + max(0.0, end - at) / (last - before) * (n_bytes - last)

    def among(self, ranks: int) -> Sums:
        """Estimate the cost among ``ranks`` ranks: at each size, that of the faster of two algorithms.

        Both are extrapolated from the measured ranks; the latency is the time of the smallest size. If each
        of n ranks reads the data of all others, the latency stays the same, and the rest of the time grows
        with ``n - 1``. In a ring, the latency grows with ``n - 1``, and the rest with ``2 (n - 1) / n``
        (Patarasuk & Yuan 2009).
        """
        latency, others = self.us[0], (ranks - 1) / (self.ranks - 1)
        share = others * self.ranks / ranks
        bytes_us = [us - latency for us in self.us]
        quicker = (min(latency + others * us, others * latency + share * us) for us in bytes_us)
        return Sums(ranks, self.sizes, tuple(quicker), self.norm_us)


def read_sums(figures: Mapping[str, Any], *ways: str) -> Sums:
    """Read the figures of an ``all_reduce`` record: at each size the fastest of ``ways`` (default: all)."""
    us = figures["us"]
    chosen = ways or [way for way in us if way != NONE]
    sizes = sorted({int(kb) for way in chosen for kb in us[way]})
    fastest = [min(us[way][str(kb)]["median"] for way in chosen if str(kb) in us[way]) for kb in sizes]
    alone = [us[NONE][str(kb)]["median"] for kb in sizes]
    beyond = tuple(max(0.0, both - norm) for both, norm in zip(fastest, alone, strict=True))
    return Sums(figures["ranks"], tuple(kb * KB for kb in sizes), beyond, alone[0])


@dataclass(frozen=True)
class Achieved:
    """Factors by which each term of a decode step and of a prefill exceeds its floor.

    The terms per layer and per prompt, which are host time, are in µs. host_us: µs of a run's first and last
    steps, for which the device waits.
    """

    decode: tuple[float, ...]
    prefill: tuple[float, ...]
    host_us: float = 0.0


@dataclass(frozen=True)
class StepModel:
    """Planned ``StepTimes`` of an engine whose scheduler runs ahead, on the ranks of ``cut``.

    sums: all-reduces over the ranks; None on one rank. most: rows per batch. All prompts of a prefill count
    as equally long.
    """

    cut: Cut
    achieved: Achieved
    most: int = 256
    sums: Sums | None = None
    run_ahead = RUN_AHEAD

    def decode(self, rows: int, cached: int, longest: int = 0) -> float:
        """See ``StepTimes``; ``longest`` has no effect, because attention is split into equal pieces."""
        fixed, each = self._decode_s[rows]
        return fixed + each * cached

    def host(self, rows: int) -> float:
        """Return 0: the device does not wait for a host that runs ahead."""
        return 0.0

    def prefill(self, prompts: int, tokens: int, earlier: int = 0) -> float:
        """See ``StepTimes``."""
        attention = self.achieved.prefill[ATTENTION] * self.cut.pair_us * earlier
        own = product(self.achieved.prefill, self.cut.prefill(prompts, tokens))
        return (own + attention + self._sums_us(tokens)) / 1e6

    @cached_property
    def _decode_s(self) -> list[tuple[float, float]]:
        """For each number of rows, a step's fixed seconds and the seconds per cached token of all rows."""
        return [(0.0, 0.0), *map(self._line, range(1, self.most + 1))]

    def _line(self, rows: int) -> tuple[float, float]:
        near, far = (product(self.achieved.decode, self.cut.decode(rows, c)) for c in (0, FAR))
        return (near + self._sums_us(rows, decodes=True)) / 1e6, (far - near) / (FAR * rows) / 1e6

    def _sums_us(self, rows: int, decodes: bool = False) -> float:
        """Return the µs of all-reduces; of few rows that decode, with norms that one rank's GEMMs fuse."""
        if self.sums is None:
            return 0.0
        own = decodes and fastest_products(rows, self.cut.whole.n_layer_parameters) == "few"
        each = self.sums(rows * self.cut.whole.d_model * ITEMSIZE) + own * self.sums.norm_us
        return self.cut.sums * each + self.sums(0)  # the last is the head's


def product(times: Sequence[float], floors: Sequence[float]) -> float:
    """Return the sum of the products of factors and floors."""
    return sum(a * b for a, b in zip(times, floors, strict=True))
