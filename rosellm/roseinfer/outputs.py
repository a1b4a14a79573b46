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

    kind: "prefill" or "decode".
    sequences: the sequences that received exactly one token, which is now their last; none if the step
        computed only parts of prompts.
    seconds: the time that the step took on the device; for a host-driven step, on the host.
    failed: the sequences that ended without a token, with the reason in ``Sequence.error``.
    """

    kind: Literal["prefill", "decode"]
    sequences: list[Sequence]
    seconds: float
    failed: list[Sequence] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token.

    logprob: the natural logarithm of its probability.
    rank: the token's rank among all tokens, from 1.
    decoded_token: the token's text, or None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass
class RequestOutput:
    """A finished request and its completion; if a prompt has several completions, the first holds the rest.

    prompt: the text given to ``LLM.generate``, or None if token ids were given.
    token_ids: the generated tokens, including an end-of-sequence token.
    finish_reason: "stop" (end of sequence or a stop string), "length", "cancelled", or "failed" with the
        reason in ``error``.
    metrics: the times of the request and its tokens.
    text_or_decoder: the text, or a function that decodes it; None without a tokenizer.
    logprobs: for each token a dictionary from token id to :class:`Logprob`, the sampled token first, then the
        most likely ones; None unless requested.
    cumulative_logprob: the sum of the sampled tokens' logprobs; None unless requested.
    others: the other completions of the prompt.

    Outputs with the same prompt, tokens and finish reason are equal, even if their requests differ.
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
        """Return the output of an ended sequence; without a tokenizer, its ``text`` is None.

        Raises ``RoseError`` if the sequence has not ended.
        """
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
        """The completion without its end-of-sequence token, cut before the first stop string.

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
        """Return the state to copy or pickle, in which the text replaces its decoder."""
        return self.__dict__ | {"text_or_decoder": self.text}


def _decoder(sequence: Sequence, tokenizer: AnyTokenizer | None) -> Callable[[], str] | None:
    """Return a function that returns the text, decoding it if needed; None without a tokenizer."""
    text = sequence.text
    if text is not None:
        return lambda: text.text
    if tokenizer is None:
        return None
    ends_with_eos = sequence.finish_reason == "stop"  # by a token: with stop strings, ``text`` is set
    return partial(tokenizer.decode, sequence.output[:-1] if ends_with_eos else sequence.output)


def _decoded(likely: list[Likely], tokenizer: AnyTokenizer | None) -> list[dict[int, Logprob]]:
    """Return a dictionary per output token: its :class:`Logprob` entries by token id, with decoded text."""
    text = cache(lambda token: None if tokenizer is None else tokenizer.decode([token]))
    return [{token: Logprob(logprob, rank, text(token)) for token, logprob, rank in one} for one in likely]
