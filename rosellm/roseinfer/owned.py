"""Exclusive use of an engine by one scheduler."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from threading import Lock

from rosellm.errors import BusyError, RoseError


class Owned:
    """The base class of an engine, or engines used as one, that one scheduler at a time may reserve."""

    def __init__(self) -> None:
        self._owner: tuple[object, str] | None = None  # the only scheduler that may run it, and its name
        self._owner_lock, self._process = Lock(), os.getpid()

    def own(self, scheduler: object, name: str) -> None:
        """Reserve the engine for ``scheduler``; raise ``BusyError`` if another scheduler owns it.

        name: what errors call this scheduler.
        """
        self.check_process()
        with self._owner_lock:
            self.check_owner(scheduler)
            self._owner = scheduler, name

    def disown(self, scheduler: object) -> None:
        """Release the engine if ``scheduler`` owns it."""
        with self._owner_lock:
            if self._owner is not None and self._owner[0] is scheduler:
                self._owner = None

    def check_process(self) -> None:
        """Raise ``RoseError`` in a fork of the process that made the engine, where nothing runs it."""
        if os.getpid() != self._process:
            raise RoseError(
                "the engine was made before this process was forked; start processes by multiprocessing's "
                "method 'spawn', and make it there"
            )

    def selected(self) -> AbstractContextManager[object]:
        """Return a context in which the GPU and the stream of the engine are current."""
        return nullcontext()

    def check_owner(self, scheduler: object) -> None:
        """Raise ``BusyError`` if another scheduler owns the engine."""
        owner = self._owner
        if owner is not None and owner[0] is not scheduler:
            raise BusyError(
                f"the engine is in use by {owner[1]}; wait until it is done or make another engine"
            )
