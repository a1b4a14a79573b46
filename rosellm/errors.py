"""Errors that a user can cause; a command prints the error in one line and exits with status 2."""

from reprlib import Repr
from traceback import format_exception_only
from typing import Any

LONGEST_TOLD_BITS = 128
LONGEST_TOLD = 200  # characters
LONGEST_TOLD_ERROR = 1000


class RoseError(ValueError):
    """An invalid request, option, file or environment, described in one sentence."""


class CheckpointError(RoseError):
    """A checkpoint or tokenizer that is missing, incomplete, corrupt or of an unsupported model family."""


class RecipeError(RoseError):
    """An unknown rung, or a combination of variants that cannot run."""


class DeviceError(RoseError):
    """A device that is unknown, or missing on this machine."""


class OptionError(RoseError):
    """An option of the engine whose value is out of range."""


class SamplingError(RoseError):
    """Sampling parameters outside their range, or logits that cannot be sampled from."""


class PromptError(RoseError):
    """A prompt that is empty, of the wrong type, or too long for the model or the KV cache."""


class LongPromptError(PromptError):
    """A prompt that leaves no room for a new token; other requests of the same call are unaffected."""


class OverloadError(RoseError):
    """A request beyond the scheduler's limit; it can be submitted again later."""


class UnknownModelError(RoseError):
    """A request for another model than the one that a server has."""


class BusyError(RoseError):
    """An attempt to use an engine that another scheduler is running; only one may run it at a time."""


class RankError(RoseError):
    """The death, hang or failure of a rank of a tensor-parallel engine; the engine has ended."""


class KVCacheExhausted(RoseError):
    """A lack of free KV blocks; the cache is unchanged."""


class ClusterError(RoseError):
    """A Ray that is missing, too old or does not answer, or the death of all replicas."""


class OneLine(Repr):
    """A formatter of any object's ``repr`` in one line, which abbreviates long lists, strings and arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxlong = self.maxother = LONGEST_TOLD

    def repr1(self, x: Any, level: int) -> str:
        """Format ``x`` by type name, as the base class does, but only for built-in types."""
        if isinstance(x, int) and x.bit_length() > LONGEST_TOLD_BITS:
            return f"an integer of {x.bit_length()} bits"
        if type(x).__module__ != "builtins":
            return self.repr_instance(x, level)
        return super().repr1(x, level)

    def repr_instance(self, x: Any, level: int) -> str:
        return " ".join(super().repr_instance(x, level).split())


_one_line = OneLine()


def describe(value: object) -> str:
    """Format ``value`` for an error message, in one line of limited length.

    A huge integer is described by its size, since Python refuses to print thousands of digits. An exception
    is shown as its type and the first line of its message, even if its ``__str__`` fails.
    """
    if isinstance(value, BaseException):
        return _cut(format_exception_only(value)[0].strip().splitlines()[0], LONGEST_TOLD_ERROR)
    return _cut(_one_line.repr(value), LONGEST_TOLD)


def _cut(text: str, longest: int) -> str:
    """Replace the middle of a text longer than ``longest`` characters by dots."""
    half = (longest - len("...")) // 2
    return text if len(text) <= longest else f"{text[:half]}...{text[-half:]}"
