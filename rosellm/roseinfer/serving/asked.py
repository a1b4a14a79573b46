"""Validate prompts and their sampling parameters, and turn them into sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence as SequenceOf
from typing import TypeVar

from rosellm.errors import PromptError, SamplingError, describe
from rosellm.roseinfer.sampling import SamplingParams

T = TypeVar("T")


def one_each(params: SamplingParams | list[SamplingParams], n_prompts: int) -> list[SamplingParams]:
    """Return sampling parameters for every prompt, from one for all or one each.

    Raises ``SamplingError`` for a wrong type or number.
    """
    if isinstance(params, SamplingParams):
        return [params] * n_prompts
    if not isinstance(params, (list, tuple)) or not all(isinstance(own, SamplingParams) for own in params):
        raise SamplingError(
            f"sampling parameters are {describe(params)}; give one SamplingParams, or a list of them"
        )
    if len(params) != n_prompts:
        raise SamplingError(
            f"{len(params)} SamplingParams for {n_prompts} prompts; give one for all, or one each"
        )
    return list(params)


def check_prompts(prompts: object) -> None:
    """Raise ``PromptError`` for anything but a list of prompts."""
    if not isinstance(prompts, (list, tuple)):
        raise PromptError(f"the prompts are {describe(prompts)}; give a list of lists of token ids")


def each_encoded(
    encode_many: Callable[[SequenceOf[str | list[int]]], list[list[int]]],
    prompts: SequenceOf[str | list[int]],
) -> list[list[int]]:
    """Encode the prompts with ``encode_many``; a ``PromptError`` names the prompt's index."""
    try:
        return encode_many(prompts)
    except PromptError:
        for index, prompt in enumerate(prompts):
            try:
                encode_many([prompt])
            except PromptError as error:
                raise _numbered(index, error) from error
        raise


def each_made(
    make: Callable[[list[int], SamplingParams], T],
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams],
) -> list[T]:
    """Call ``make`` for each prompt and its parameters; a ``PromptError`` names the prompt's index."""
    made = []
    for index, (prompt, own) in enumerate(zip(prompts, one_each(params, len(prompts)), strict=True)):
        try:
            made.append(make(prompt, own))
        except PromptError as error:
            raise _numbered(index, error) from error
    return made


def _numbered(index: int, error: PromptError) -> PromptError:
    return PromptError(f"prompt {index}: {error}")
