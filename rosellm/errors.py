"""Errors that a user can cause; commands print them as one line and exit with status 2."""

from traceback import format_exception_only

LONGEST_TOLD_BITS = 128


class RoseError(ValueError):
    """A request, option, file or environment that cannot be served, told in one sentence."""


class CheckpointError(RoseError):
    """A checkpoint or tokenizer that is missing, incomplete, corrupt or of another model family."""


class RecipeError(RoseError):
    """An unknown rung, or a combination of variants that cannot run."""


class DeviceError(RoseError):
    """A device that is absent here or unknown."""


class OptionError(RoseError):
    """An option of the engine outside its range."""


class SamplingError(RoseError):
    """Sampling parameters outside their range, or logits that nothing can be drawn from."""


class PromptError(RoseError):
    """A prompt that is empty, of the wrong type, or too long for the model or the KV cache."""


class OverloadError(RoseError):
    """The scheduler holds as many requests as it may; try again later."""


class BusyError(RoseError):
    """The engine is run by someone else; one at a time may."""


class KVCacheExhausted(RoseError):
    """No free KV block is left; nothing was changed."""


def told(value: object) -> str:
    """``value`` for a message: an exception's type and message, also where its own ``__str__`` fails.

    Python refuses to print integers of thousands of digits.
    """
    if isinstance(value, BaseException):
        return format_exception_only(value)[0].strip()
    if isinstance(value, int) and value.bit_length() > LONGEST_TOLD_BITS:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)
