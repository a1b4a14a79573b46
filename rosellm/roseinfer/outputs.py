"""The results of steps and requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import partial
from html import escape
from reprlib import Repr
from typing import Any, Literal

import numpy as np

from rosellm.errors import RoseError
from rosellm.models.loading import AnyTokenizer
from rosellm.roseinfer.request import Likely, RequestMetrics, Sequence


@dataclass(slots=True)  # not frozen, which would triple the time to make one
class Done:
    """A finished step of the engine.

    kind: "prefill" or "decode".
    sequences: the sequences that received tokens; none if the step computed only parts of prompts.
    seconds: the time that the step took on the device; for a host-driven step, on the host.
    failed: the sequences that ended without a token, with the reason in ``Sequence.error``.
    counts: how many tokens each of ``sequences`` received, which are now its last; None if one each.
    """

    kind: Literal["prefill", "decode"]
    sequences: list[Sequence]
    seconds: float
    failed: list[Sequence] = field(default_factory=list)
    counts: list[int] | None = None


@dataclass(slots=True)  # not frozen, for the same reason
class Logprob:
    """The log-probability of a token.

    logprob: the natural logarithm of its probability.
    rank: the token's rank among all tokens, from 1.
    decoded_token: the token's text, or None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


class Deferred:
    """A field of a dataclass that may be given as a function, which is called when it is first needed."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_{name}"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        value = instance.__dict__[self.name]
        if callable(value):
            value = instance.__dict__[self.name] = value()
        return value

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self.name] = None if value is self else value  # self is the default


def _deferred() -> Any:
    return field(default=Deferred(), compare=False)


@dataclass(repr=False)
class RequestOutput:
    """A finished request and its completion; if a prompt has several completions, the first holds the rest.

    prompt: the text given to ``LLM.generate``, or None if token ids were given.
    token_ids: the generated tokens, including an end-of-sequence token.
    finish_reason: "stop" (a stop token or a stop string), "length", "cancelled", or "failed" with the reason
        in ``error``.
    stop_reason: the stop string or the one of ``stop_token_ids`` that ended the completion; None otherwise.
    metrics: the times of the request and its tokens.
    text: the completion without the stop token or stop string that ended it; None without a tokenizer.
    logprobs: for each token a dictionary from token id to :class:`Logprob`, the sampled token first, then the
        most likely ones; None unless requested.
    prompt_logprobs: the same for the prompt's tokens, None for the first; None unless requested.
    cumulative_logprob: the sum of the sampled tokens' logprobs; None unless requested.
    index: the completion's place among those of its prompt, from 0.
    num_cached_tokens: number of tokens of the prompt that were cached when the request started.
    others: the other completions of the prompt.

    The text and the logprobs are decoded when they are first read. Outputs with the same prompt, tokens and
    finish reason are equal, even if their requests differ.
    ``dataclasses.asdict`` gives values that JSON can hold.
    """

    request_id: int = field(compare=False)
    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: str
    metrics: RequestMetrics = field(compare=False)
    text: str | None = _deferred()
    error: str | None = None
    prompt: str | None = None
    logprobs: list[dict[int, Logprob]] | None = _deferred()
    prompt_logprobs: list[dict[int, Logprob] | None] | None = _deferred()
    cumulative_logprob: float | None = _deferred()
    stop_reason: str | int | None = field(default=None, compare=False)
    index: int = field(default=0, compare=False)
    num_cached_tokens: int = field(default=0, compare=False)
    others: list[RequestOutput] = field(default_factory=list)

    @classmethod
    def of(cls, sequence: Sequence, tokenizer: AnyTokenizer | None) -> RequestOutput:
        """Return the output of an ended sequence; without a tokenizer, its ``text`` is None.

        Raises ``RoseError`` if the sequence has not ended.
        """
        sequence.settle_text()
        if sequence.finish_reason is None:
            raise RoseError(f"request {sequence.request_id} has not ended yet")
        params, likely, prompt = sequence.params, sequence.logprobs, sequence.prompt_logprobs
        return cls(
            request_id=sequence.request_id,
            prompt_token_ids=sequence.prompt,
            token_ids=sequence.output,
            finish_reason=sequence.finish_reason,
            metrics=sequence.metrics,
            text=_text_of(sequence, tokenizer),
            error=sequence.error,
            logprobs=_later(decoded_logprobs, likely, params.logprobs, tokenizer),
            prompt_logprobs=_later(decoded_logprobs, prompt, params.prompt_logprobs, tokenizer),
            cumulative_logprob=_later(_sum_of_chosen, likely),
            stop_reason=sequence.stop_reason,
            num_cached_tokens=sequence.num_cached_prompt_tokens,
        )

    @property
    def finished(self) -> bool:
        """True: only ended requests have outputs."""
        return True

    @property
    def outputs(self) -> list[RequestOutput]:
        """The completions of the prompt, this one first."""
        return [self, *self.others]

    def __getitem__(self, name: str) -> Any:
        """Return an attribute by name, for programs that expect nano-vllm's dictionaries."""
        return getattr(self, name)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle, in which nothing is left to decode."""
        deferred = ("text", "logprobs", "prompt_logprobs", "cumulative_logprob")
        return self.__dict__ | {f"_{name}": getattr(self, name) for name in deferred}

    def __repr__(self) -> str:
        shown = ("prompt", "text", "finish_reason", "stop_reason", "error", "prompt_token_ids", "token_ids")
        values = {name: value for name in shown if (value := getattr(self, name)) is not None}
        values |= {name: _shorter.repr(values[name]) for name in ("prompt_token_ids", "token_ids")}
        parts = [f"{name}={value if name.endswith('ids') else repr(value)}" for name, value in values.items()]
        others = f", others={self.others!r}" if self.others else ""
        return f"RequestOutput({', '.join(parts)}{others})"

    def _repr_html_(self) -> str:
        """Return the prompt and the completions as HTML, for a notebook."""
        prompt = self.prompt if self.prompt is not None else f"{len(self.prompt_token_ids)} token ids"
        return "".join(
            f'<pre style="white-space:pre-wrap"><span style="opacity:.6">{escape(prompt)}</span>'
            f"<b>{escape(one.text if one.text is not None else str(one.token_ids))}</b>\n"
            f'<small style="opacity:.6">{len(one.token_ids)} tokens, ended by '
            f"{escape(one.error or one.finish_reason)}</small></pre>"
            for one in self.outputs
        )


CompletionOutput = RequestOutput  # vLLM's name of an output's ``outputs``
_shorter = Repr()
_shorter.maxlist = 12


def _later(decode: Callable[..., object], likely: object, *given: object) -> Any:
    """Return the call of ``decode`` as a function, or None without ``likely``."""
    return None if likely is None else partial(decode, likely, *given)


def _text_of(sequence: Sequence, tokenizer: AnyTokenizer | None) -> Any:
    """Return what decodes a sequence's text; None without a tokenizer, or if the request wants no text."""
    text, params = sequence.text, sequence.params
    if text is not None:
        return lambda: text.text
    if tokenizer is None or not params.detokenize:
        return None
    end = len(sequence.tokens) - sequence.n_without_text
    return lambda: tokenizer.decode(
        sequence.tokens[sequence.n_prompt : end], sequence.prompt, params.skip_special_tokens
    )


def decoded_logprobs(
    likely: SequenceOf[Likely | None], n: int, tokenizer: AnyTokenizer | None
) -> list[dict[int, Logprob] | None]:
    """Return a dictionary per token, the given token first and then the ``n`` most likely ones.

    A dictionary maps token ids to :class:`Logprob`; it is None where ``likely`` is None.
    """
    text: Callable[[int], str | None] = (lambda _: None) if tokenizer is None else tokenizer.token_text

    def entries(words: list[int], values: list[float]) -> dict[int, Logprob]:
        own, *most = words[: min(n + 1, len(values))]
        ranked = {own: Logprob(values[0], words[-1], text(own))}
        for rank, token in enumerate(most, 1):
            if token != own:
                ranked[token] = Logprob(values[rank], rank, text(token))
        return ranked

    return [None if one is None else entries(one.tolist(), values_of(one).tolist()) for one in likely]


def values_of(likely: Likely) -> np.ndarray:
    """Return the logprobs in a result of ``likely_tokens``, ``[1 + m]`` fp32."""
    half = len(likely) // 2
    return likely[half : 2 * half].view(np.float32)


def _sum_of_chosen(likely: list[Likely]) -> float:
    return sum((float(values_of(one)[0]) for one in likely), 0.0)
