"""What the commands of all packages share: usage errors in one line, sizes that a machine can count."""

from __future__ import annotations

import argparse
import reprlib
from collections.abc import Callable
from typing import Any

import torch

INT32_MAX = 2**31 - 1


class OneLineParser(argparse.ArgumentParser):
    """Tells a usage error in one line on stderr and exits with status 2."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> None:
        self.exit(2, f"error: {' '.join(message.split())}\n")


def whole_number(low: int, high: int = INT32_MAX) -> Callable[[str], int]:
    """An argparse type: an integer from ``low`` to ``high``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is not a whole number, {low} or more")
        if value > high:
            raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is too large; use at most {high}")
        return value

    return parse


def is_out_of_memory(error: Exception) -> bool:
    """Whether Python, numpy or torch could not get the memory, or count it."""
    told = ("allocate memory", "Storage size calculation overflowed")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(t in str(error) for t in told)
