"""What steps and requests hand back: who got a token; what a request came to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

from rosellm.errors import RoseError
from rosellm.models.loading import AnyTokenizer
from rosellm.roseinfer.request import RequestMetrics, Sequence


@dataclass(frozen=True, slots=True)
class Done:
    """A step of the engine that has ended.

    ``sequences`` got exactly one token each, which is now their last one; a step that computed only parts of
    prompts has none. seconds: what the device, or the host that drives it, spent in the step. failed: those
    that ended without a token, with the reason in ``Sequence.error``.
    """

    kind: Literal["prefill", "decode"]
    sequences: list[Sequence]
    seconds: float
    failed: list[Sequence] = field(default_factory=list)


@dataclass
class RequestOutput:
    """A request that has ended, and its one completion.

    ``token_ids`` are the generated ones, an end-of-sequence token included. ``finish_reason`` is "stop" (end
    of sequence or a stop string), "length", "cancelled", or "failed" with the reason in ``error``.
    ``prompt`` is the text that ``LLM.generate`` was given, None if token ids were. Outputs with the same
    prompt, tokens and end are equal, whichever request they are of.
    """

    request_id: int = field(compare=False)
    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: str
    metrics: RequestMetrics = field(compare=False)
    decode: Callable[[], str | None] = field(repr=False, compare=False)
    error: str | None = None
    prompt: str | None = None

    @classmethod
    def of(cls, sequence: Sequence, tokenizer: AnyTokenizer | None) -> RequestOutput:
        """What a sequence that has ended came to; tokenizer: None if there is none."""
        sequence.settle_text()
        if sequence.finish_reason is None:
            raise RoseError(f"request {sequence.request_id} has not ended yet")
        return cls(
            request_id=sequence.request_id,
            prompt_token_ids=sequence.prompt,
            token_ids=sequence.output,
            finish_reason=sequence.finish_reason,
            metrics=sequence.metrics,
            decode=_decoder(sequence, tokenizer),
            error=sequence.error,
        )

    @cached_property
    def text(self) -> str | None:
        """The completion without its end-of-sequence token and what follows from a stop string on.

        Decoded when first read; None if the engine has no tokenizer.
        """
        return self.decode()

    @property
    def outputs(self) -> list[RequestOutput]:
        """The completions of the prompt: this one."""
        return [self]

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle holds the text, not what decodes it."""
        return self.__dict__ | {"text": self.text, "decode": None}


def _decoder(sequence: Sequence, tokenizer: AnyTokenizer | None) -> Callable[[], str | None]:
    """What makes the text: nothing is decoded yet unless it was followed all along."""
    text = sequence.text
    if text is not None:
        return lambda: text.text
    if tokenizer is None:
        return lambda: None
    ends_with_eos = sequence.finish_reason == "stop"  # no stop string was looked for
    return partial(tokenizer.decode, sequence.output[:-1] if ends_with_eos else sequence.output)
