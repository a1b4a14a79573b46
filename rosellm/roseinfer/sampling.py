"""The sampling parameters of a request."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace

from rosellm.errors import SamplingError, describe

INT64_MAX = 2**63 - 1
MOST_LOGPROBS = 20
MOST_COMPLETIONS = 16384  # as in vLLM
REPETITION_BOUNDS = 1e-30, 1e30  # a float32 logit of up to 1e8 stays finite, divided or multiplied by these
NOT_FINITE = -2  # in place of a token id
NO_TOKEN = "the model's logits are not finite; nothing can be chosen from them"


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and when it stops. Raises ``SamplingError``.

    temperature: 0 is greedy; otherwise logits are divided by it. top_k: keep the k most likely tokens; 0 and
    -1 (stored as 0) keep all. top_p: keep the smallest set of most likely tokens whose probability reaches it
    (Holtzman et al. 2020); 1 keeps all. min_p: keep tokens at least that fraction as likely as the most
    likely one (Nguyen et al. 2024); 0 keeps all. min_p is applied first and top_p last; the most likely token
    always stays.

    repetition_penalty: the logit of a token of prompt or output is divided by it if positive, else multiplied
    (Keskar et al. 2019), with values clamped to 1e-30 and 1e30; 1 is none. frequency_penalty: subtracted from
    a token's logit for each of its occurrences in the output; presence_penalty: subtracted once if there is
    any; 0 is none. Penalties come before the temperature, and also affect greedy choices.

    max_tokens: the most new tokens. seed: the same seed and logits give the same tokens whatever shares the
    batch; None draws a fresh one. ignore_eos: continue past the end-of-sequence token. stop: a string or list
    of strings at which the text ends, excluding the stop string. logprobs: return each token's
    log-probability and those of this many most likely tokens, 0 to 20, from the model's logits before
    penalties and temperature; None returns none. n: completions per prompt, 1 to 16,384, in ``LLM.generate``
    and ``LLM.chat`` only; the i-th has ``seed + i``, or a fresh seed.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 16
    seed: int | None = None
    ignore_eos: bool = False
    stop: str | list[str] | tuple[str, ...] | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        self._number("temperature", 0.0, sys.float_info.max, "a number from 0 (greedy) to 1.79e308")
        self._number("top_p", math.ulp(0.0), 1.0, "a number above 0 and at most 1")
        self._number("min_p", 0.0, 1.0, "a number from 0 to 1")
        self._number("repetition_penalty", math.ulp(0.0), sys.float_info.max, "a number above 0 (1: none)")
        for name in ("presence_penalty", "frequency_penalty"):
            self._number(name, -2.0, 2.0, "a number from -2 to 2")
        self._whole("top_k", -1, INT64_MAX, f"a whole number from 0 to {INT64_MAX}, or -1")
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        self._whole("max_tokens", 1)
        if self.seed is not None:
            self._whole("seed", 0, INT64_MAX)
        if self.logprobs is not None:
            self._whole("logprobs", 0, MOST_LOGPROBS)
        if self.is_greedy:
            self._whole("n", 1, 1, "1 at temperature 0, where completions are equal")
        else:
            self._whole("n", 1, MOST_COMPLETIONS)
        if not isinstance(self.ignore_eos, bool):
            raise SamplingError(f"ignore_eos is {describe(self.ignore_eos)}; use True or False")
        stops = () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, (list, tuple)) or not all(isinstance(s, str) and s for s in stops):
            raise SamplingError(f"stop is {describe(self.stop)}; use a non-empty string or a list of them")
        object.__setattr__(self, "stop", tuple(stops))

    def _number(self, name: str, low: float, high: float, allowed: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            raise SamplingError(f"{name} is {describe(value)}; it must be {allowed}")

    def _whole(self, name: str, low: int, high: float = math.inf, allowed: str | None = None) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            limits = f", {low} or more" if high == math.inf else f" from {low} to {high}"
            raise SamplingError(
                f"{name} is {describe(value)}; it must be {allowed or f'a whole number{limits}'}"
            )

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def each(self) -> list[SamplingParams]:
        """Return the parameters of each of the n completions."""
        if self.n == 1:
            return [self]
        seeds = [None if self.seed is None else (self.seed + i) & INT64_MAX for i in range(self.n)]
        return [replace(self, n=1, seed=seed) for seed in seeds]

    @property
    def repetition(self) -> float:
        """The repetition penalty, clamped to ``REPETITION_BOUNDS``."""
        least, most = REPETITION_BOUNDS
        return float(min(max(self.repetition_penalty, least), most))

    @property
    def is_filtered(self) -> bool:
        """Whether top-k, top-p or min-p restricts sampling."""
        return not self.is_greedy and bool(self.top_k or self.top_p < 1 or self.min_p)

    @property
    def is_penalised(self) -> bool:
        """Whether a token's logit depends on earlier tokens."""
        penalties = self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty
        return any(penalties)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0
