"""Errors that a user can cause; commands print them in one line and exit with status 2."""

from traceback import format_exception_only

LONGEST_TOLD_BITS = 128


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
    """A rank of a tensor-parallel engine has died, hangs or failed: the engine has ended."""


class KVCacheExhausted(RoseError):
    """No free KV block is left; the cache is unchanged."""


class ClusterError(RoseError):
    """Ray is missing, too old or does not answer, or all replicas on it have died."""


def told(value: object) -> str:
    """``value`` for an error message; of an exception its type and message, even if its ``__str__`` fails.

    A huge integer is described by its size, since Python refuses to print thousands of digits.
    """
    if isinstance(value, BaseException):
        return format_exception_only(value)[0].strip()
    if isinstance(value, int) and value.bit_length() > LONGEST_TOLD_BITS:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)
