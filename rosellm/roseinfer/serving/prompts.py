"""Validate prompts and sampling parameters; convert prompts to lists, and to one object per request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, TypedDict, TypeVar, cast

from rosellm.errors import PromptError, SamplingError, describe
from rosellm.roseinfer.sampling import SamplingParams

T = TypeVar("T")


class TextPrompt(TypedDict):
    """A prompt as text, in vLLM's form."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids, in vLLM's form."""

    prompt_token_ids: list[int]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt


def as_prompts(prompts: Any) -> tuple[list[str | list[int]], list[Any]]:
    """Convert one prompt or many, of any form, to a list of texts and lists of token ids.

    Token ids are not validated yet. Also returns each prompt's text, or None. Raises ``PromptError`` if the
    form is not supported.
    """
    if isinstance(prompts, (str, Mapping)):
        prompts = [prompts]
    items = _as_list(prompts)
    if items is None:
        raise PromptError(f"prompts is {describe(prompts)}; give text, token ids, or several of these")
    if items and all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return [items], [None]
    many = [item if isinstance(item, str) else _as_list(item) for item in map(_unwrapped, items)]
    if None in many:
        index = many.index(None)
        raise PromptError(f"prompt {index} is {describe(items[index])}; give text or token ids")
    texts = [item.get("prompt") if isinstance(item, Mapping) else item for item in items]
    return cast("list[str | list[int]]", many), texts


def one_each(params: SamplingParams | list[SamplingParams], n_prompts: int) -> list[SamplingParams]:
    """Return one ``SamplingParams`` per prompt.

    params: one for all prompts, or a list of one per prompt.

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
    """Raise ``PromptError`` unless ``prompts`` is a list or tuple."""
    if not isinstance(prompts, (list, tuple)):
        raise PromptError(f"the prompts are {describe(prompts)}; give a list of prompts")


def each_encoded(
    encode_many: Callable[[Sequence[str | list[int]]], list[list[int]]], prompts: Sequence[str | list[int]]
) -> list[list[int]]:
    """Encode all prompts with ``encode_many``.

    If there are several prompts, a ``PromptError`` names the index of the invalid prompt.
    """
    try:
        return encode_many(prompts)
    except PromptError:
        _each_numbered(lambda prompt: encode_many([prompt]), [(prompt,) for prompt in prompts])
        raise


def each_made(
    make: Callable[[list[int], SamplingParams], T],
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams],
) -> list[T]:
    """Call ``make`` for each prompt and its parameters; return the results.

    params: one for all prompts, or a list of one per prompt.

    If there are several prompts, a ``PromptError`` names the index of the invalid prompt.
    """
    return _each_numbered(make, list(zip(prompts, one_each(params, len(prompts)), strict=True)))


def _each_numbered(make: Callable[..., T], given: list[tuple[Any, ...]]) -> list[T]:
    """Call ``make`` on the arguments of each prompt.

    If there are several prompts, a ``PromptError`` names the index of the invalid prompt.
    """
    made = []
    for index, arguments in enumerate(given):
        try:
            made.append(make(*arguments))
        except PromptError as error:
            if len(given) == 1:
                raise
            raise PromptError(f"prompt {index}: {error}") from error
    return made


def _unwrapped(prompt: Any) -> Any:
    """Return the text or token ids in a dictionary of vLLM's form; return anything else unchanged.

    Raises ``PromptError`` if the dictionary has anything else that is not empty.
    """
    if not isinstance(prompt, Mapping):
        return prompt
    for name in prompt.keys() - {"prompt", "prompt_token_ids"}:
        if prompt[name]:  # vLLM's others, such as multi_modal_data
            raise PromptError(
                f"a prompt has {describe(name)}; only prompt and prompt_token_ids are supported"
            )
    ids = prompt.get("prompt_token_ids")
    return prompt.get("prompt") if ids is None else ids


def _as_list(items: Any) -> list | None:
    """Convert an array, tensor or iterable to a list of Python values; return None for anything else."""
    items = _as_python(items)
    if not isinstance(items, Iterable) or isinstance(items, (str, bytes, bytearray, Mapping, Set)):
        return None
    items = list(items)
    return items if set(map(type, items)) == {int} else [_as_python(item) for item in items]


def _as_python(item: Any) -> Any:
    """Convert arrays, tensors and their scalars to lists and numbers; return anything else unchanged."""
    return item.tolist() if hasattr(item, "tolist") else item
