"""The sampling parameters of a request."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rosellm.errors import SamplingError, describe

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
FLOAT_MAX = sys.float_info.max
MOST_LOGPROBS = 20
MOST_COMPLETIONS = 16384  # as in vLLM
MOST_BIAS = 100.0  # as in OpenAI's interface
REPETITION_BOUNDS = 1e-30, 1e30  # a float32 logit up to 1e8 stays finite if divided or multiplied by these
NOT_FINITE = -2  # in place of a token id
NOT_STRUCTURED = "None: structured outputs (a regex, JSON, a grammar) are not supported"
NO_TOKEN = "the model's logits are not finite; nothing can be chosen from them"


def _number(
    default: Any, kind: type, low: float, high: float, allowed: str, optional: bool | None = None
) -> Any:
    """Declare a field whose values are of type ``kind``, from ``low`` to ``high``.

    allowed: the description of the range in errors.
    optional: whether None is allowed; by default, if it is the field's default.
    """

    def checked(value: Any) -> Any:
        value = plain(value)
        is_kind = isinstance(value, (int, kind)) and not isinstance(value, bool)
        return kind(value) if is_kind and low <= value <= high else _refuse(allowed)

    return _checked(default, checked, default is None if optional is None else optional)


def _checked(default: Any, checked: Callable[[Any], Any], optional: bool = True) -> Any:
    """Declare a field.

    checked: maps a value to the one to store, or raises ``ValueError`` with what is allowed.
    optional: whether None is allowed, and stored unchanged.
    """
    return field(default=default, metadata={"checked": checked, "optional": optional})


def _refuse(allowed: str) -> Any:
    raise ValueError(allowed)


def _switch(default: bool) -> Any:
    def checked(value: Any) -> bool:
        return value if isinstance(value, bool) else _refuse("True or False")

    return _checked(default, checked, optional=False)


def _texts(value: Any) -> tuple[str, ...]:
    texts = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) and text for text in texts):
        _refuse("a non-empty string or a list of them")
    return tuple(texts)


def _token_ids(value: Any) -> tuple[int, ...]:
    tokens: list[Any] = [*map(plain, value)] if isinstance(value, (list, tuple, set)) else [None]
    if not all(map(_is_token_id, tokens)):
        _refuse("a list of token ids")
    return tuple(sorted(set(tokens)))


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= INT32_MAX


def plain(value: Any) -> Any:
    """Return a scalar of numpy or torch as a number of Python, and anything else unchanged."""
    return value.item() if hasattr(value, "item") else value


def _biases(value: Any) -> dict[int, float]:
    """Return the biases by token id, cut to ±``MOST_BIAS``; the ids may be text, as in JSON."""
    try:
        biases = {int(token): float(bias) for token, bias in value.items()}
    except (AttributeError, TypeError, ValueError):
        return _refuse("a dictionary from token ids to numbers")
    if not all(map(_is_token_id, biases)) or any(map(math.isnan, biases.values())):
        _refuse("a dictionary from token ids to numbers")
    return {token: min(max(bias, -MOST_BIAS), MOST_BIAS) for token, bias in biases.items()}


def _seed(value: Any) -> int | None:
    seed = plain(value)
    if isinstance(seed, int) and not isinstance(seed, bool) and -1 <= seed <= INT64_MAX:
        return None if seed == -1 else seed
    return _refuse(f"a whole number from 0 to {INT64_MAX}, or -1 for a fresh one")


class StructuredOutputsParams(dict):
    """A constraint on the output, under vLLM's name; ``SamplingParams`` refuses it."""


@dataclass
class SamplingParams:
    """How the tokens of one request are chosen, and when it stops.

    Names, defaults and meanings are vLLM's. Changing an object has no effect on requests that were submitted.

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
    logit_bias: a dictionary from token ids to numbers that are added to their logits, cut to -100 to 100 and
        rounded to float16.
    allowed_token_ids: the only tokens that may be chosen; None allows all.
    bad_words: words that must not occur in the output: a word's last token cannot be chosen where the output
        ends with its other tokens. Each word is tokenised as it is and after a space; the latter counts only
        if it has the same number of tokens and another first token.
    max_tokens: maximum number of new tokens; None means as many as the engine has room for, which is the
        maximum in any case.
    min_tokens: number of new tokens before which no stop token and no end-of-sequence token can be chosen,
        and which complete no stop string.
    seed: the same seed and logits give the same tokens, whatever other requests share the batch; None and -1
        draw a fresh seed.
    ignore_eos: whether to continue past the end-of-sequence token.
    stop: a string or list of strings at which the text ends.
    stop_token_ids: further tokens that end the sequence.
    include_stop_str_in_output: whether the text includes the stop string or stop token that ends it.
    skip_special_tokens: whether the text omits special tokens.
    detokenize: whether the output has a text; stop strings need one.
    logprobs: return each token's log-probability and those of this many most likely tokens, 0 to 20, from the
        model's logits before penalties, biases and temperature; None returns none.
    prompt_logprobs: the same for the tokens of the prompt, except the first.
    truncate_prompt_tokens: keep only this many last tokens of the prompt; None keeps all, and -1 as many as
        fit with one new token.
    structured_outputs, guided_decoding, logits_processors: None; they are not supported.
    n: number of completions per prompt, 1 to 16,384, in ``LLM.generate`` and ``LLM.chat`` only; completion i,
        from 0, has ``seed + i``, or a fresh seed.

    Biases come first, then penalties, then the temperature; the first two also affect greedy choices. Raises
    ``SamplingError`` for invalid values.
    """

    temperature: float = _number(1.0, float, 0.0, FLOAT_MAX, "a number from 0 (greedy) to 1.79e308")
    top_k: int = _number(0, int, -1, INT64_MAX, f"a whole number from 0 to {INT64_MAX}, or -1")
    top_p: float = _number(1.0, float, math.ulp(0.0), 1.0, "a number above 0 and at most 1")
    max_tokens: int | None = _number(16, int, 1, math.inf, "a whole number, 1 or more, or None", True)
    seed: int | None = _checked(None, _seed)
    ignore_eos: bool = _switch(False)
    stop: str | list[str] | tuple[str, ...] | None = _checked(None, _texts, optional=False)
    min_p: float = _number(0.0, float, 0.0, 1.0, "a number from 0 to 1")
    repetition_penalty: float = _number(1.0, float, math.ulp(0.0), FLOAT_MAX, "a number above 0 (1: none)")
    presence_penalty: float = _number(0.0, float, -2.0, 2.0, "a number from -2 to 2")
    frequency_penalty: float = _number(0.0, float, -2.0, 2.0, "a number from -2 to 2")
    logprobs: int | None = _number(None, int, 0, MOST_LOGPROBS, f"a whole number from 0 to {MOST_LOGPROBS}")
    n: int = _number(1, int, 1, MOST_COMPLETIONS, f"a whole number from 1 to {MOST_COMPLETIONS}")
    stop_token_ids: list[int] | tuple[int, ...] | None = _checked(None, _token_ids)
    min_tokens: int = _number(0, int, 0, math.inf, "a whole number, 0 or more")
    logit_bias: dict[int, float] | None = _checked(None, _biases)
    allowed_token_ids: list[int] | tuple[int, ...] | None = _checked(None, _token_ids)
    bad_words: list[str] | tuple[str, ...] | None = _checked(None, _texts, optional=False)
    include_stop_str_in_output: bool = _switch(False)
    skip_special_tokens: bool = _switch(True)
    spaces_between_special_tokens: bool = _switch(True)
    detokenize: bool = _switch(True)
    prompt_logprobs: int | None = _number(
        None, int, 0, MOST_LOGPROBS, f"a whole number from 0 to {MOST_LOGPROBS}"
    )
    truncate_prompt_tokens: int | None = _number(None, int, -1, INT32_MAX, "a whole number, 1 or more, or -1")
    structured_outputs: None = _checked(None, lambda _: _refuse(NOT_STRUCTURED))
    guided_decoding: None = _checked(None, lambda _: _refuse(NOT_STRUCTURED))
    best_of: int | None = _checked(None, lambda best: best if best == 1 else _refuse("None; use n"))
    output_kind: None = _checked(None, lambda _: _refuse("None; a StreamingManager gives pieces of outputs"))
    extra_args: dict[str, Any] | None = _checked(
        None, lambda given: _refuse("None or {}") if given else given
    )
    logits_processors: None = _checked(None, lambda _: _refuse("None; use logit_bias or bad_words"))

    def __post_init__(self) -> None:
        self.check()

    def __setattr__(self, name: str, value: Any) -> None:
        one = type(self).__dataclass_fields__.get(name)
        if one is None:
            raise SamplingError(f"SamplingParams has no {name!r}")
        if "checked" in one.metadata and (value is not None or not one.metadata["optional"]):
            try:
                value = one.metadata["checked"](value)
            except ValueError as allowed:
                raise SamplingError(f"{name} is {describe(value)}; it must be {allowed}") from None
        object.__setattr__(self, name, max(value, 0) if name == "top_k" else value)

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Return parameters with the given values, where None means the default."""
        return cls(**{name: value for name, value in values.items() if value is not None})

    def clone(self) -> SamplingParams:
        """Return a copy, in a tenth of the time of ``copy.copy``: every request has one."""
        one = object.__new__(type(self))
        object.__setattr__(one, "__dict__", self.__dict__.copy())
        return one

    def check(self) -> None:
        """Raise ``SamplingError`` if parameters contradict each other."""
        if self.is_greedy and self.n > 1:
            raise SamplingError(f"n is {self.n}; it must be 1 at temperature 0, where completions are equal")
        if self.truncate_prompt_tokens == 0:
            raise SamplingError("truncate_prompt_tokens is 0; it must be a whole number, 1 or more, or -1")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingError(f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}")
        if self.stop and not self.detokenize:
            raise SamplingError("stop strings need a text, and detokenize is False")
        if self.allowed_token_ids == ():
            raise SamplingError("allowed_token_ids is empty: no token could be chosen")

    @property
    def __struct_fields__(self) -> tuple[str, ...]:
        """The names of the parameters, by which programs copy those of vLLM, a ``msgspec.Struct``."""
        return tuple(self.__dataclass_fields__)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return tuple(self.stop or ())

    def each(self) -> list[SamplingParams]:
        """Return the parameters of each of the ``n`` completions, with n = 1 and a seed of its own."""
        if self.n == 1:
            return [self]
        seeds = [None if self.seed is None else (self.seed + i) & INT64_MAX for i in range(self.n)]
        copies = [self.clone() for _ in seeds]
        for one, seed in zip(copies, seeds, strict=True):
            one.n, one.seed = 1, seed
        return copies

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
        """Whether a penalty, a bias or a ban changes the logits from which tokens are chosen."""
        penalties = self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty
        return any(penalties) or self.is_biased

    @property
    def is_biased(self) -> bool:
        """Whether some tokens are favoured, disfavoured or banned, always or in some places."""
        return bool(self.logit_bias or self.allowed_token_ids or self.bad_words or self.min_tokens)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0
