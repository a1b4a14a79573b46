"""Rendering of conversations in the text format that a chat model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from rosellm.errors import CheckpointError, PromptError, describe
from rosellm.models.tokenizer import from_transformers, refusal

Message = dict[str, Any]


# Arguments of ``apply_chat_template`` that do not reach the template.
NO_VARIABLES = {
    "conversation", "chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip


def render_chat(
    folder: Path | None, messages: list[Message], add_generation_prompt: bool = True, **options: Any
) -> str:
    """Render ``messages`` with the chat template of the checkpoint in ``folder``.

    folder: None for a dummy tokenizer, which has no template.
    messages: dictionaries such as ``{"role": "user", "content": "..."}``, in order. As in OpenAI's interface,
        a content may be a list of ``{"type": "text", "text": "..."}``, or None.
    add_generation_prompt: whether to append the header of the model's answer.
    options: further arguments of transformers' ``apply_chat_template``, such as ``tools``, ``chat_template``
        or the template's own variables.

    The text includes special tokens, so encode it with ``special=False``. Raises ``CheckpointError`` without
    a valid template, and ``PromptError`` if the messages are malformed or the template fails on them.
    """
    plain = _plain_messages(messages)
    if folder is None:
        raise CheckpointError("a dummy tokenizer has no chat template; load a checkpoint to chat with")
    own = options.get("chat_template")
    tokenizer = hf_tokenizer(folder)
    if not own and not isinstance(tokenizer.chat_template or None, (str, dict)):
        raise CheckpointError(f"{folder} has no chat template; give a prompt as text, or chat_template=")
    name = "the given chat template" if own else f"the chat template in {folder}"
    try:
        return tokenizer.apply_chat_template(
            plain, tokenize=False, add_generation_prompt=add_generation_prompt, **options
        )
    except Exception as error:  # a template is a program: it may fail in any way
        from jinja2 import TemplateSyntaxError  # imported here: only chats need it

        if isinstance(error, TemplateSyntaxError):
            raise refusal(CheckpointError, f"{name} has a syntax error", error) from error
        raise refusal(PromptError, f"{name} fails on the messages", error) from error


def hf_tokenizer(folder: Path) -> Any:
    """Load the tokenizer in ``folder`` with ``transformers``, which finds the template in several places.

    It is loaded again once a file has changed.
    """
    files = sorted(path for path in folder.glob("*") if path.suffix in (".json", ".jinja", ".model"))
    stats = [path.stat() for path in (*files, *sorted(folder.glob("*/*.jinja")))]
    return _hf_tokenizer(folder, tuple((stat.st_mtime_ns, stat.st_size) for stat in stats))


@lru_cache(maxsize=1)
def _hf_tokenizer(folder: Path, _stamps: tuple[tuple[int, int], ...]) -> Any:
    try:
        return from_transformers(folder)
    except BaseException as error:
        raise refusal(CheckpointError, f"{folder} has no tokenizer with a chat template", error) from error


def _plain_messages(messages: object) -> list[Message]:
    """Return the messages with each content as one text; raise ``PromptError`` if they are malformed."""
    form = '{"role": ..., "content": ...}'
    if not isinstance(messages, list) or not messages:
        raise PromptError(f"messages are {describe(messages)}; give a list of {form}")
    plain = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise PromptError(f"message {i} is {describe(message)}; give {form}, both of them text")
        if "content" not in message and not message.get("tool_calls"):
            raise PromptError(f"message {i} is {describe(message)}; give {form}, both of them text")
        content = _plain_content(i, message.get("content"))
        plain.append({**message, "content": content, **_parsed_calls(i, message)})
    return plain


def _plain_content(index: int, content: Any) -> str:
    parts = content if isinstance(content, list) else [content or ""]
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise PromptError(f"message {index} has content {describe(content)}; give text, or parts of text")
    return "\n".join(texts)


def _parsed_calls(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message's tool calls, if any, with their arguments as dictionaries, as templates expect."""
    calls = message.get("tool_calls")
    if not calls:
        return {}
    try:
        return {"tool_calls": [_parsed_call(call) for call in calls]}
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise PromptError(f"message {index} has malformed tool_calls ({describe(error)})") from error


def _parsed_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or {}
    parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {**call, "function": {**function, "arguments": parsed}}
