"""Names for parts of the engine in profiles."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

_NOBODY_LOOKS = nullcontext()


def profile_range(name: str) -> AbstractContextManager[object]:
    """``torch.profiler.record_function(name)`` while a profiler runs; else next to nothing.

    Entering and leaving a recorded range takes the host microseconds, whether anyone records it or not.
    """
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NOBODY_LOOKS
