"""Errors that a user can cause; commands print them in one line and exit with status 2."""

from reprlib import Repr
from traceback import format_exception_only
from typing import Any

LONGEST_TOLD_BITS = 128
LONGEST_TOLD = 200  # characters
LONGEST_TOLD_ERROR = 1000


class RoseError(ValueError):
    """An invalid request, option, file or environment, described in one sentence."""


class CheckpointError(RoseError):
    """A checkpoint or tokenizer that is missing, incomplete, corrupt or of another model family."""


class RecipeError(RoseError):
    """An unknown rung, or a combination of variants that cannot run."""


class DeviceError(RoseError):
    """A device that is unknown, or missing on this machine."""


class OptionError(RoseError):
    """An option of the engine outside its range."""


class SamplingError(RoseError):
    """Sampling parameters outside their range, or logits that cannot be sampled from."""


class PromptError(RoseError):
    """A prompt that is empty, of the wrong type, or too long for the model or the KV cache."""


class OverloadError(RoseError):
    """The scheduler's request limit is reached; try again later."""


class BusyError(RoseError):
    """The engine is in use by another scheduler; only one may run it at a time."""


class RankError(RoseError):
    """A rank of a tensor-parallel engine died, hung or failed; the engine has ended."""


class KVCacheExhausted(RoseError):
    """No free KV block is left; the cache is unchanged."""


class ClusterError(RoseError):
    """Ray is missing, too old or does not answer, or all replicas on it have died."""


class OneLine(Repr):
    """Formats any object's ``repr`` in one line, abbreviating long lists, strings and arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxlong = self.maxother = LONGEST_TOLD

    def repr1(self, x: Any, level: int) -> str:
        """Like the base method, which dispatches on the type's name, but only for built-in types."""
        if isinstance(x, int) and x.bit_length() > LONGEST_TOLD_BITS:
            return f"an integer of {x.bit_length()} bits"
        if type(x).__module__ != "builtins":
            return self.repr_instance(x, level)
        return super().repr1(x, level)

    def repr_instance(self, x: Any, level: int) -> str:
        return " ".join(super().repr_instance(x, level).split())


_one_line = OneLine()


def describe(value: object) -> str:
    """Format ``value`` for an error message, in one line of at most ``LONGEST_TOLD`` characters.

    A huge integer is described by its size, since Python refuses to print thousands of digits. An exception
    is shown as its type and the first line of its message, even if its ``__str__`` fails.
    """
    if isinstance(value, BaseException):
        return _cut(format_exception_only(value)[0].strip().splitlines()[0], LONGEST_TOLD_ERROR)
    return _cut(_one_line.repr(value), LONGEST_TOLD)


def _cut(text: str, longest: int) -> str:
    """Abbreviate the middle of a text longer than ``longest``."""
    half = (longest - len("...")) // 2
    return text if len(text) <= longest else f"{text[:half]}...{text[-half:]}"
