"""Rendering of conversations in the text format that a chat model was trained on."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from rosellm.errors import CheckpointError, PromptError, describe
from rosellm.models.tokenizer import from_transformers, refusal

Message = dict[str, Any]


def render_chat(folder: Path | None, messages: list[Message], add_generation_prompt: bool = True) -> str:
    """Render ``messages`` with the chat template of the checkpoint in ``folder``.

    folder: None for a dummy tokenizer, which has no template.
    messages: dictionaries such as ``{"role": "user", "content": "..."}``, in order.
    add_generation_prompt: whether to append the header of the model's answer.

    The text includes special tokens, so encode it with ``special=False``. Raises ``CheckpointError`` without
    a valid template, and ``PromptError`` if the messages are malformed or the template fails on them.
    """
    _check_messages(messages)
    if folder is None:
        raise CheckpointError("a dummy tokenizer has no chat template; load a checkpoint to chat with")
    tokenizer = _templated(folder)
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as error:  # a template is a program: it may fail in any way
        from jinja2 import TemplateSyntaxError  # imported here: only chats need it

        if isinstance(error, TemplateSyntaxError):
            failure = f"the chat template in {folder} has a syntax error"
            raise refusal(CheckpointError, failure, error) from error
        raise refusal(PromptError, f"the chat template in {folder} fails on the messages", error) from error


def _check_messages(messages: object) -> None:
    form = '{"role": ..., "content": ...}'
    if not isinstance(messages, list) or not messages:
        raise PromptError(f"messages are {describe(messages)}; give a list of {form}")
    for i, message in enumerate(messages):
        fields = message if isinstance(message, dict) else {}
        if not all(isinstance(fields.get(name), str) for name in ("role", "content")):
            raise PromptError(f"message {i} is {describe(message)}; give {form}, both of them text")


@lru_cache(maxsize=1)
def _templated(folder: Path) -> Any:
    """Load the tokenizer with ``transformers``, which finds the template in any of several files.

    Raises ``CheckpointError`` if there is no template.
    """
    try:
        tokenizer = from_transformers(folder)
    except BaseException as error:
        raise refusal(CheckpointError, f"{folder} has no tokenizer with a chat template", error) from error
    if not tokenizer.chat_template or not isinstance(tokenizer.chat_template, (str, dict)):
        raise CheckpointError(f"{folder} has no chat template; give a prompt as text")
    return tokenizer
