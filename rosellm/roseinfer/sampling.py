"""The sampling parameters of a request."""

from __future__ import annotations

import math
import sys
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any

from rosellm.errors import SamplingError, describe

INT64_MAX = 2**63 - 1
FLOAT_MAX = sys.float_info.max
MOST_LOGPROBS = 20
MOST_COMPLETIONS = 16384  # as in vLLM
REPETITION_BOUNDS = 1e-30, 1e30  # a float32 logit up to 1e8 stays finite if divided or multiplied by these
NOT_FINITE = -2  # in place of a token id
NO_TOKEN = "the model's logits are not finite; nothing can be chosen from them"


def _within(default: Any, kind: type, low: float, high: float, allowed: str) -> Any:
    """Declare a field whose values are of type ``kind``, from ``low`` to ``high``.

    allowed: the description of the range in errors.
    """
    return field(default=default, metadata={"kind": kind, "low": low, "high": high, "allowed": allowed})


def _check(one: Field, value: Any) -> None:
    if value is None and one.default is None:
        return
    kind, low, high, allowed = one.metadata.values()
    is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        raise SamplingError(f"{one.name} is {describe(value)}; it must be {allowed}")


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it stops.

    temperature: logits are divided by it; 0 chooses the most likely token (greedy).
    top_k: keep the k most likely tokens; 0 and -1 (stored as 0) keep all.
    top_p: keep the smallest set of most likely tokens whose probability reaches this value (Holtzman et al.
        2020); 1 keeps all.
    min_p: keep tokens at least this fraction as likely as the most likely one (Nguyen et al. 2024); 0 keeps
        all. min_p is applied first and top_p last; the most likely token is always kept.
    repetition_penalty: for each token in the prompt or output, a positive logit is divided by this value, any
        other is multiplied by it (Keskar et al. 2019); 1 has no effect. Clamped to the range 1e-30 to 1e30.
    frequency_penalty: subtracted from a token's logit for each of its occurrences in the output; 0 has no
        effect.
    presence_penalty: subtracted once from the logit of a token that occurs in the output; 0 has no effect.
    max_tokens: maximum number of new tokens.
    seed: the same seed and logits give the same tokens, whatever other requests share the batch; None draws a
        fresh seed.
    ignore_eos: whether to continue past the end-of-sequence token.
    stop: a string or list of strings at which the text ends; the stop string is not part of the text.
    logprobs: return each token's log-probability and those of this many most likely tokens, 0 to 20, from the
        model's logits before penalties and temperature; None returns none.
    n: number of completions per prompt, 1 to 16,384, in ``LLM.generate`` and ``LLM.chat`` only; completion i,
        from 0, has ``seed + i``, or a fresh seed.

    Penalties are applied before the temperature, and also affect greedy choices. Raises ``SamplingError`` for
    invalid values.
    """

    temperature: float = _within(1.0, float, 0.0, FLOAT_MAX, "a number from 0 (greedy) to 1.79e308")
    top_k: int = _within(0, int, -1, INT64_MAX, f"a whole number from 0 to {INT64_MAX}, or -1")
    top_p: float = _within(1.0, float, math.ulp(0.0), 1.0, "a number above 0 and at most 1")
    max_tokens: int = _within(16, int, 1, math.inf, "a whole number, 1 or more")
    seed: int | None = _within(None, int, 0, INT64_MAX, f"a whole number from 0 to {INT64_MAX}")
    ignore_eos: bool = False
    stop: str | list[str] | tuple[str, ...] | None = None
    min_p: float = _within(0.0, float, 0.0, 1.0, "a number from 0 to 1")
    repetition_penalty: float = _within(1.0, float, math.ulp(0.0), FLOAT_MAX, "a number above 0 (1: none)")
    presence_penalty: float = _within(0.0, float, -2.0, 2.0, "a number from -2 to 2")
    frequency_penalty: float = _within(0.0, float, -2.0, 2.0, "a number from -2 to 2")
    logprobs: int | None = _within(None, int, 0, MOST_LOGPROBS, f"a whole number from 0 to {MOST_LOGPROBS}")
    n: int = _within(1, int, 1, MOST_COMPLETIONS, f"a whole number from 1 to {MOST_COMPLETIONS}")

    def __post_init__(self) -> None:
        for one in fields(self):
            if one.metadata:
                _check(one, getattr(self, one.name))
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        if self.is_greedy and self.n > 1:
            raise SamplingError(f"n is {self.n}; it must be 1 at temperature 0, where completions are equal")
        if not isinstance(self.ignore_eos, bool):
            raise SamplingError(f"ignore_eos is {describe(self.ignore_eos)}; use True or False")
        stops = () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, (list, tuple)) or not all(isinstance(s, str) and s for s in stops):
            raise SamplingError(f"stop is {describe(self.stop)}; use a non-empty string or a list of them")
        object.__setattr__(self, "stop", tuple(stops))

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def each(self) -> list[SamplingParams]:
        """Return the parameters of each of the ``n`` completions, with n = 1 and a seed of its own."""
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
        """Whether any penalty makes a token's logit depend on earlier tokens."""
        penalties = self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty
        return any(penalties)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0
