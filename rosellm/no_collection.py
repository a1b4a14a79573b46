"""Disable garbage collection while a CUDA graph is captured."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class _Pauses:
    """The number of active contexts, and whether the collector was enabled before the first began."""

    lock, count, was_enabled = Lock(), 0, True


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable garbage collection, on any thread, within the context.

    A collection may destroy the CUDA graphs of an unused engine. If this happens on a thread that is
    capturing another graph, the capture fails. Contexts may be nested and used in several threads; leaving
    the last one enables the collector again if it was enabled before.
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
