"""The results of steps and requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal

from rosellm.errors import RoseError
from rosellm.models.loading import AnyTokenizer
from rosellm.roseinfer.request import Likely, RequestMetrics, Sequence


@dataclass(frozen=True, slots=True)
class Done:
    """A finished step of the engine.

    sequences: those that got exactly one token each, now their last one; none if the step computed only parts
    of prompts. seconds: the time that the step took on the device, or on the host that drives it. failed:
    sequences that ended without a token, with the reason in ``Sequence.error``.
    """

    kind: Literal["prefill", "decode"]
    sequences: list[Sequence]
    seconds: float
    failed: list[Sequence] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's natural log-probability, its rank among all tokens (from 1), and its text, if known."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass
class RequestOutput:
    """A finished request and its completion, or the first of several.

    ``outputs`` lists all its completions, each a ``RequestOutput``. ``token_ids`` are the generated ones,
    including an end-of-sequence token. ``finish_reason`` is "stop" (end of sequence or a stop string),
    "length", "cancelled", or "failed" with the reason in ``error``. ``prompt`` is the text given to
    ``LLM.generate``, None if it got token ids. ``logprobs``: for each token a dictionary from token id to
    :class:`Logprob`, the sampled token first, then the most likely ones; ``cumulative_logprob``: their sum
    over the sampled tokens; both None unless requested. Outputs with the same prompt, tokens and finish
    reason are equal, whatever their requests.
    """

    request_id: int = field(compare=False)
    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: str
    metrics: RequestMetrics = field(compare=False)
    text_or_decoder: str | Callable[[], str] | None = field(repr=False, compare=False)
    error: str | None = None
    prompt: str | None = None
    logprobs: list[dict[int, Logprob]] | None = field(default=None, repr=False, compare=False)
    cumulative_logprob: float | None = field(default=None, compare=False)
    others: list[RequestOutput] = field(default_factory=list, repr=False)

    @classmethod
    def of(cls, sequence: Sequence, tokenizer: AnyTokenizer | None) -> RequestOutput:
        """Return the output of an ended sequence; without a tokenizer its ``text`` is None."""
        sequence.settle_text()
        if sequence.finish_reason is None:
            raise RoseError(f"request {sequence.request_id} has not ended yet")
        likely = sequence.logprobs
        return cls(
            request_id=sequence.request_id,
            prompt_token_ids=sequence.prompt,
            token_ids=sequence.output,
            finish_reason=sequence.finish_reason,
            metrics=sequence.metrics,
            text_or_decoder=_decoder(sequence, tokenizer),
            error=sequence.error,
            logprobs=None if likely is None else _decoded(likely, tokenizer),
            cumulative_logprob=None if likely is None else sum((own[1] for own, *_ in likely), 0.0),
        )

    @property
    def text(self) -> str | None:
        """The completion, without its end-of-sequence token, cut before the first stop string.

        Decoded on first access; None if the engine has no tokenizer.
        """
        text = self.text_or_decoder
        if callable(text):
            self.text_or_decoder = text = text()
        return text

    @property
    def outputs(self) -> list[RequestOutput]:
        """The completions of the prompt, this one first."""
        return [self, *self.others]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle, with the text instead of its decoder."""
        return self.__dict__ | {"text_or_decoder": self.text}


def _decoder(sequence: Sequence, tokenizer: AnyTokenizer | None) -> Callable[[], str] | None:
    """Return a function that returns the text, decoding it if needed; None without a tokenizer."""
    text = sequence.text
    if text is not None:
        return lambda: text.text
    if tokenizer is None:
        return None
    ends_with_eos = sequence.finish_reason == "stop"  # not a stop string: those set ``text``
    return partial(tokenizer.decode, sequence.output[:-1] if ends_with_eos else sequence.output)


def _decoded(likely: list[Likely], tokenizer: AnyTokenizer | None) -> list[dict[int, Logprob]]:
    """Return the logprobs at each output token, by token id, with the text of every token."""
    text = cache(lambda token: None if tokenizer is None else tokenizer.decode([token]))
    return [{token: Logprob(logprob, rank, text(token)) for token, logprob, rank in one} for one in likely]
