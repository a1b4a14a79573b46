"""Checks of the values in a checkpoint's files."""

from __future__ import annotations

from typing import Any

from rosellm.errors import CheckpointError, describe


def check(is_good: bool, name: str, value: object, needed: str) -> None:
    """Raise ``CheckpointError`` unless ``is_good``.

    name, value: the field and its value, named in the error.
    needed: what the field must be, as text for the error.
    """
    if not is_good:
        raise CheckpointError(f"{name} is {describe(value)}; {needed} is needed")


def is_whole(value: Any, low: int, high: int) -> bool:
    """Return whether ``value`` is an int (not a bool) from ``low`` to ``high``."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: Any, above: float, most: float) -> bool:
    """Return whether ``value`` is a number (not a bool) greater than ``above`` and at most ``most``."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and above < value <= most
