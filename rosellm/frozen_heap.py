"""Garbage collection beside an engine that runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class _Freezes:
    """How many callers have asked for it; the garbage collector is the whole process's."""

    lock, count = Lock(), 0


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Within, the garbage collector passes over the objects that were there before (``gc.freeze``).

    A full collection looks at every object: with torch and transformers imported it takes about 0.1 s, during
    which all requests wait. Objects made within are collected as ever. May be nested, and in several threads;
    the end of the last one also undoes a ``gc.freeze`` of the caller's own.
    """
    with _Freezes.lock:
        _Freezes.count += 1
        if _Freezes.count == 1:
            gc.freeze()
    try:
        yield
    finally:
        with _Freezes.lock:
            _Freezes.count -= 1
            if not _Freezes.count:
                gc.unfreeze()
