"""The sampling parameters of a request."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from rosellm.errors import SamplingError, told

INT64_MAX = 2**63 - 1
NOT_FINITE = -2  # in place of a token id
NO_TOKEN = "the model's logits are not finite; nothing can be chosen from them"


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and when it stops.

    temperature: 0 is greedy; otherwise logits are divided by it. top_k: keep the k most likely tokens; 0
    keeps all. top_p: keep the smallest set of most likely tokens whose probability reaches it (Holtzman et
    al. 2020); 1 keeps all. max_tokens: the most new tokens. seed: the same seed and logits give the same
    tokens whatever shares the batch; None draws a fresh one. ignore_eos: continue past the end-of-sequence
    token. stop: a string or list of strings at which the text ends, excluding the stop string. Raises
    ``SamplingError``.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 16
    seed: int | None = None
    ignore_eos: bool = False
    stop: str | list[str] | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        self._number("temperature", 0.0, sys.float_info.max, "a number from 0 (greedy) to 1.79e308")
        self._number("top_p", math.ulp(0.0), 1.0, "a number above 0 and at most 1")
        self._whole("top_k", 0, INT64_MAX)
        self._whole("max_tokens", 1)
        if self.seed is not None:
            self._whole("seed", 0, INT64_MAX)
        if not isinstance(self.ignore_eos, bool):
            raise SamplingError(f"ignore_eos is {self.ignore_eos!r}; use True or False")
        stops = () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, (list, tuple)) or not all(isinstance(s, str) and s for s in stops):
            raise SamplingError(f"stop is {self.stop!r}; use a non-empty string or a list of them")
        object.__setattr__(self, "stop", tuple(stops))

    def _number(self, name: str, low: float, high: float, allowed: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            raise SamplingError(f"{name} is {told(value)}; it must be {allowed}")

    def _whole(self, name: str, low: int, high: float = math.inf) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            allowed = f", {low} or more" if high == math.inf else f" from {low} to {high}"
            raise SamplingError(f"{name} is {told(value)}; it must be a whole number{allowed}")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0
