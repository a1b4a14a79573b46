"""Plan step times: floors times the device's measured inefficiency, plus all-reduces over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rosellm.lab.scale.sums import Sums
from rosellm.lab.scale.work import PREFILL_TERMS, Cut
from rosellm.roseinfer.layers.fused import fastest_products
from rosellm.roseinfer.steps.resident import RUN_AHEAD

ATTENTION = PREFILL_TERMS.index("attention")
FAR = 1024  # context from which attention's time per cached token is derived


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
    run_ahead: int = RUN_AHEAD

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
        fixed = near + self._sums_us(rows) + self._norms_us(rows)
        return fixed / 1e6, (far - near) / (FAR * rows) / 1e6

    def _sums_us(self, rows: int) -> float:
        if self.sums is None:
            return 0.0
        return self.cut.sums * self.sums(self.cut.sum_bytes(rows)) + self.sums(0)  # the last is the head's

    def _norms_us(self, rows: int) -> float:
        """Return the µs of separate norms after all-reduces; on one rank they are fused into the GEMMs."""
        if self.sums is None or fastest_products(rows, self.cut.whole.n_layer_parameters) != "few":
            return 0.0
        return self.cut.sums * self.sums.norm_us


def product(times: Sequence[float], floors: Sequence[float]) -> float:
    """Return the sum of the products of factors and floors."""
    return sum(a * b for a, b in zip(times, floors, strict=True))
