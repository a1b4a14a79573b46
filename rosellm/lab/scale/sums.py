"""The cost of an all-reduce: read from the record, and planned for more ranks than were measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rosellm.lab.records.all_reduce import NONE

KB = 1024


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
