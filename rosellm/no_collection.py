"""No garbage collection while a CUDA graph is captured."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class _Pauses:
    """How many callers have asked for it, and whether the first found the collector enabled."""

    lock, count, was_enabled = Lock(), 0, True


@contextmanager
def no_collection() -> Iterator[None]:
    """Within, no garbage is collected, on any thread.

    An engine that nobody holds any more may be garbage with CUDA graphs; to destroy one on a thread that is
    capturing another makes that capture fail. May be nested, and in several threads; the end of the last one
    enables the collector again, if it was enabled before.
    """
    with _Pauses.lock:
        if not _Pauses.count:
            _Pauses.was_enabled = gc.isenabled()
            gc.disable()
        _Pauses.count += 1
    try:
        yield
    finally:
        with _Pauses.lock:
            _Pauses.count -= 1
            if not _Pauses.count and _Pauses.was_enabled:
                gc.enable()
