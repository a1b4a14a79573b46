"""Tokens that a checkpoint names beside its ``tokenizer.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rosellm.errors import CheckpointError

IN_TEXT = ("bos_token", "eos_token")
LISTS = ("additional_special_tokens", "extra_special_tokens")


def named_tokens(folder: Path) -> dict[str, bool]:
    """Token → whether that makes it special. Raises ``CheckpointError`` for corrupt files.

    Special tokens are left out of decoded text. From ``added_tokens.json``, ``tokenizer_config.json`` and
    ``special_tokens_map.json``, which older tools write; not those for padding or unknown words, which no
    text needs. As in transformers, a list of additional special tokens makes none of them special.
    """
    config, others = (_object(folder / name) for name in ("tokenizer_config.json", "special_tokens_map.json"))
    try:
        tokens = dict.fromkeys(_object(folder / "added_tokens.json"), False)
        for token in (config.get("added_tokens_decoder") or {}).values():
            tokens[token["content"]] = bool(token.get("special"))
        for source in (config, others):
            tokens = {_content(token): False for token in _listed(source)} | tokens
            tokens |= {_content(token): True for token in filter(None, map(source.get, IN_TEXT))}
        return tokens
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} names tokens in a form that is not known") from error


def named_class(folder: Path) -> str | None:
    """The class of transformers that reads the tokenizer, without the ``Fast`` that older files add."""
    files = (_object(folder / name) for name in ("tokenizer_config.json", "config.json"))
    named = next(filter(None, (file.get("tokenizer_class") for file in files)), None)
    return named.removesuffix("Fast") if isinstance(named, str) else None


def _listed(source: dict[str, Any]) -> Iterator[Any]:
    for name in LISTS:
        listed = source.get(name) or []
        yield from listed.values() if isinstance(listed, dict) else listed


def _content(token: Any) -> str:
    return token if isinstance(token, str) else token["content"]


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an absent file is empty."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return found
