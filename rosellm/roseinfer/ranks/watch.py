"""Failure detection: if a rank has died, or has made no progress for seconds, the other ranks are ended.

Every process increments a counter in shared memory from a background thread, unless its command hangs. Time
is measured in polls, not in seconds, so a suspended machine or a stopped process group does not look like a
lost rank.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess, parent_process
from threading import Event, Thread
from time import monotonic, process_time, sleep, thread_time
from typing import Any

import psutil

LOOK_S = 0.25
KILLED_WITHIN_S = 1.0
HUNG_AFTER = 24  # polls of an unchanged counter
LEAST_S = 0.01  # processor time per poll of a command that computes; polling threads take 1 to 3 ms

Beats = Any  # a shared int64 array, one counter per rank


class _Counts:
    """The number of consecutive polls in which each rank's heartbeat counter has not changed.

    beats: the heartbeat counters of all ranks.
    ranks: the ranks to poll.
    is_stopped: returns whether a rank's process is stopped (SIGSTOP).

    Polls before a rank's first heartbeat count only if its process is stopped, since starting takes long.
    """

    def __init__(self, beats: Beats, ranks: range, is_stopped: Callable[[int], bool]) -> None:
        self._beats, self._last, self._still = beats, list(beats), dict.fromkeys(ranks, 0)
        self._is_stopped = is_stopped

    def look(self) -> int | None:
        """Poll all counters once; return a hung rank, or None."""
        for rank in self._still:
            begins = not self._beats[rank] and not self._is_stopped(rank)
            moved = begins or self._beats[rank] != self._last[rank]
            self._last[rank] = self._beats[rank]
            self._still[rank] = 0 if moved else self._still[rank] + 1
            if self._still[rank] >= HUNG_AFTER:
                return rank
        return None


class Watch(Thread):
    """Rank 0's watchdog thread, which runs until ``ended`` is set.

    processes, pipes: the processes of ranks 1, 2, ..., and the connections to them; a failing rank sends its
        error through its pipe.
    beats: the heartbeat counters of all ranks.
    on_failure: called after the other ranks have been killed.
    ended: set when the group ends, after a failure or on purpose; ``reason`` says why.
    failed: whether another rank failed; all other ranks are then killed.
    """

    def __init__(
        self,
        processes: list[BaseProcess],
        pipes: list[Connection],
        beats: Beats,
        on_failure: Callable[[], object],
    ) -> None:
        super().__init__(name="ranks", daemon=True)
        self._processes, self._pipes, self._beats, self._on_failure = processes, pipes, beats, on_failure
        pids = dict(enumerate((process.pid for process in processes), start=1))
        self._counts = _Counts(beats, range(1, len(beats)), lambda rank: _is_stopped(pids[rank]))
        self._words: dict[int, str] = {}
        self.ended, self.failed, self.reason = Event(), False, ""

    def run(self) -> None:
        while not self.ended.is_set():
            dead = wait([process.sentinel for process in self._processes], LOOK_S)
            self._beats[0] += 1
            if self.ended.is_set():
                return
            if reason := self._death(dead) or self._hang():
                self.failed, self.reason = True, reason
                kill(self._processes)
                self.ended.set()
                self._on_failure()

    def stop(self, reason: str) -> None:
        """Set ``reason`` and ``ended``, unless they are set, before the ranks are shut down on purpose."""
        if not self.ended.is_set():
            self.reason = reason
            self.ended.set()

    def _death(self, sentinels: list) -> str | None:
        dead = [i for i, process in enumerate(self._processes) if process.sentinel in sentinels]
        if not dead:
            return None
        silent = [i for i in dead if not self._told(i)]  # errors may follow from a silent death
        first = (silent or dead)[0]
        return f"rank {first + 1} of {len(self._beats)} {self._told(first) or self._ended_by(first)}"

    def _told(self, index: int) -> str:
        if index not in self._words:
            self._words[index] = ""
            with suppress(EOFError, OSError):
                if self._pipes[index].poll():
                    self._words[index] = f"failed: {self._pipes[index].recv_bytes().decode()}"
        return self._words[index]

    def _ended_by(self, index: int) -> str:
        self._processes[index].join()
        code = self._processes[index].exitcode or 0
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    def _hang(self) -> str | None:
        rank = self._counts.look()
        if rank is None:
            return None
        return f"rank {rank} of {len(self._beats)} made no progress for {HUNG_AFTER * LOOK_S:.0f} seconds"


def kill(processes: list[BaseProcess]) -> None:
    """Kill the processes, even if stopped or blocked in a library; wait at most ``KILLED_WITHIN_S``."""
    for process in processes:
        process.kill()
    join(processes, KILLED_WITHIN_S)


def join(processes: list[BaseProcess], within_s: float) -> None:
    """Wait at most ``within_s`` seconds in total for the processes to exit."""
    late = monotonic() + within_s
    for process in processes:
        process.join(max(0.0, late - monotonic()))


class _Work:
    """A detector of work: processor time of this process's other threads, or a child such as a compiler."""

    def __init__(self) -> None:
        self._spent_s = self._last_s = 0.0

    def look(self) -> None:
        """Sample the processor time of all threads except the caller's; always call from the same thread."""
        self._last_s, self._spent_s = self._spent_s, process_time() - thread_time()

    def is_done(self) -> bool:
        """Return whether work was done between the last two samples, or a child process exists."""
        return self._spent_s - self._last_s >= LEAST_S or bool(psutil.Process().children())


def watch_rank_0(
    beats: Beats, rank: int, is_busy: Callable[[], bool], is_waiting: Callable[[], bool]
) -> None:
    """Start a thread that sends this rank's heartbeats, and ends the process if rank 0 dies or hangs.

    beats: the heartbeat counters of all ranks.
    is_busy: returns whether this rank is running a command.
    is_waiting: returns whether the command is blocked in a collective.

    A busy rank that neither waits nor computes sends no heartbeats, so rank 0 sees that it hangs. Between
    commands, the user's program may keep rank 0 from sending heartbeats, so rank 0 then counts as hung only
    if its process is stopped.
    """
    counts = _Counts(beats, range(1), lambda _: _is_stopped(os.getppid()))
    work = _Work()

    def goes_on() -> bool:
        work.look()
        if not is_busy() or is_waiting() or work.is_done():
            beats[rank] += 1
        return counts.look() is None or not (is_busy() or _is_stopped(os.getppid()))

    end_with_parent(f"rank {rank}: rank 0 exited; shutting down", goes_on)


def end_with_parent(said: str, goes_on: Callable[[], bool] = lambda: True) -> None:
    """Start a thread that ends this process when its parent ends or ``goes_on`` returns False.

    said: the message that is printed to stderr before the process ends.
    goes_on: called at every poll.

    The process must be a child started by ``multiprocessing``. It exits with status 1, without cleanup. A
    parent that ended before this call, while this process was importing, is also detected.
    """
    parent = parent_process()
    assert parent is not None

    def look() -> None:
        while os.getppid() == parent.pid and goes_on():
            sleep(LOOK_S)
        with suppress(OSError):  # stderr's reader may have exited too
            print(said, file=sys.stderr, flush=True)
        os._exit(1)

    Thread(target=look, name="parent", daemon=True).start()


def _is_stopped(pid: int | None) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False
