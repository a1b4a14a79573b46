"""Validate the parameters of a notebook."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rosellm.errors import RoseError, describe
from rosellm.models.checkpoint import SHIPPED_MODELS
from rosellm.models.families.table import KNOWN_SHAPES
from rosellm.models.model import Transformer

PROMPTS = ("prompt_lengths", "mixed_lengths", "prompt_tokens")
REAL = ("latency_us",)
FROM_ZERO = ("seed",)


class ParameterError(RoseError):
    """A parameter of a notebook is out of range; IPython shows this error as one line."""

    def _render_traceback_(self) -> list[str]:  # called by IPython
        return [f"{type(self).__name__}: {self}"]


def check_parameters(gpt: Transformer, **given: Any) -> None:
    """Raise ParameterError if a parameter is out of range, or if prompts and new tokens exceed the positions.

    given: parameters by name, each a number or a list of numbers.
    """
    for name, value in given.items():
        if isinstance(value, list) and not value:
            raise ParameterError(f"{name} is an empty list; give at least one number")
        for number in value if isinstance(value, list) else [value]:
            _check_number(name, number)
    prompts = [given[name] for name in PROMPTS if name in given]
    longest = max((max(p) if isinstance(p, list) else p for p in prompts), default=1)
    new, positions = given.get("new_tokens", 0), gpt.config.n_positions
    if longest + new > positions:
        raise ParameterError(
            f"a prompt of {longest} tokens and {new} new ones exceed the model's {positions} positions; "
            "give shorter prompts or fewer new tokens"
        )


def check_least_new(least: int, new_tokens: int) -> None:
    """Raise ParameterError for fewer new tokens than a notebook's runs need."""
    if new_tokens < least:
        raise ParameterError(f"new_tokens is {new_tokens}; this notebook needs {least} or more")


def model_path(model: str) -> str:
    """Resolve a model's name or folder, relative to the folder in which the user started the command.

    A notebook's working folder is its own, but the environment variable PWD is still that of the shell.
    Anything that is not a folder there is returned unchanged.
    """
    if model in SHIPPED_MODELS or model in KNOWN_SHAPES:
        return model
    seen_from_caller = Path(os.environ.get("PWD", "."), model)
    return str(seen_from_caller) if seen_from_caller.is_dir() else model


def _check_number(name: str, value: object) -> None:
    least = 0 if name in FROM_ZERO else 1
    if name in REAL:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ParameterError(f"{name} is {describe(value)}; give a number above 0")
    elif isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ParameterError(f"{name} is {describe(value)}; give a whole number, {least} or more")
