"""The members of a group: rank 0, which sends calls, and the followers, which also run these calls."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any, NoReturn, ParamSpec, TypeVar

from torch import Tensor

from rosellm.errors import RankError, RoseError, describe
from rosellm.models.part import Part
from rosellm.roseinfer.ranks.collectives import Collectives
from rosellm.roseinfer.ranks.group import Call
from rosellm.roseinfer.ranks.peer_memory import PeerMemory
from rosellm.roseinfer.ranks.watch import Watch

P = ParamSpec("P")
T = TypeVar("T")
A_REASON_WITHIN_S, ABORTED_WITHIN_S = 2.0, 3.0


class _Member:
    """A rank of a group.

    part: this rank's part of the model.
    collectives: set once all ranks have connected.
    """

    collectives: Collectives

    def __init__(self, part: Part) -> None:
        self.part = part

    def summed(self, x: Tensor) -> Tensor:
        """Sum the ranks' contiguous tensors in place (all-reduce); return ``x``."""
        return self.collectives.summed(x)

    def gathered(self, x: Tensor) -> Tensor:
        """Gather the ranks' contiguous tensors, in rank order: ``[size, *x.shape]`` (all-gather)."""
        return self.collectives.gathered(x)

    def peers(self, n_bytes: int) -> PeerMemory:
        """Return ``n_bytes`` of memory per rank that all ranks share."""
        return self.collectives.peers(n_bytes)

    def least(self, number: int) -> int:
        """Return the minimum of the ranks' numbers."""
        return self.collectives.least(number)


class Follower(_Member):
    """A rank other than 0, which runs rank 0's calls until rank 0 closes the pipe.

    pipe: the connection to rank 0.
    is_busy: whether a call is running.
    is_waiting: whether the call is blocked in a collective.
    """

    def __init__(self, part: Part, pipe: Connection) -> None:
        super().__init__(part)
        self._pipe, self.is_busy, self.is_waiting = pipe, False, False

    def on_all(self, call: Call) -> Call:
        """Return ``call``: only rank 0 sends calls to other ranks."""
        return call

    def summed(self, x: Tensor) -> Tensor:
        """Sum the ranks' tensors in place; ``is_waiting`` is True until the call returns."""
        return self._with_others(self.collectives.summed, x)

    def gathered(self, x: Tensor) -> Tensor:
        """Gather the ranks' tensors; ``is_waiting`` is True until the call returns."""
        return self._with_others(self.collectives.gathered, x)

    def least(self, number: int) -> int:
        """Return the minimum of the ranks' numbers; ``is_waiting`` is True until the call returns."""
        return self._with_others(self.collectives.least, number)

    def check(self) -> None:
        """Do nothing: ``watch_rank_0`` ends this process if rank 0 has ended."""

    def receive(self) -> Any:
        """Return rank 0's next message; raise ``EOFError`` once the pipe is closed."""
        return pickle.loads(self._pipe.recv_bytes())

    def follow(self, call: Call) -> None:
        """Run each of rank 0's calls with this rank's ``call``, until rank 0 closes the pipe."""
        while True:
            try:
                name, arguments = self.receive()
            except EOFError:
                return
            self.is_busy = True
            call(name, *arguments)
            self.is_busy = False

    def _with_others(self, run: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        self.is_waiting = True
        result = run(*arguments, **named)
        self.is_waiting = False
        return result


class Leader(_Member):
    """Rank 0, which sends each call to the other ranks and then runs it itself.

    If a call fails on rank 0, the other ranks would wait for it forever, so the error ends the group.

    pipes: connections to ranks 1, 2, ...
    watch: detects failures of other ranks.
    end: a function that ends the processes of the other ranks that still run.
    """

    def __init__(self, part: Part, pipes: list[Connection], watch: Watch, end: Callable[[], object]) -> None:
        super().__init__(part)
        self._pipes, self._watch, self._end = pipes, watch, end

    def on_all(self, call: Call) -> Call:
        """Return a function that sends a call to the other ranks, then runs it on rank 0 with ``call``."""

        def call_all(name: str, *arguments: Any) -> Any:
            self.send((name, arguments))
            with self.guarded():
                return call(name, *arguments)

        return call_all

    def send(self, what: Any) -> None:
        """Pickle ``what`` and send it to all other ranks; messages arrive in order."""
        self.check()
        message = pickle.dumps(what, pickle.HIGHEST_PROTOCOL)
        with self.guarded():
            for pipe in self._pipes:
                pipe.send_bytes(message)

    def check(self) -> None:
        """Raise ``RankError`` if the group has ended."""
        if self._watch.ended.is_set():
            self._raise_reason()

    def guarded(self) -> _Guard:
        """Return a context manager in which any error ends the group.

        If another rank's failure caused the error, ``RankError`` is raised instead, with that failure.
        """
        return _Guard(self)

    def give_up(self, error: BaseException) -> None:
        """End the group after ``error``; raise ``RankError`` if another rank's failure caused the error."""
        consequence = isinstance(error, Exception) and not isinstance(error, RoseError)
        if consequence:
            self._watch.ended.wait(A_REASON_WITHIN_S)
        self.close(f"rank 0 failed: {describe(error)}")
        self.abort()
        if consequence and self._watch.failed:
            self._raise_reason(error)

    def abort(self) -> None:
        """Abort rank 0's collectives; wait at most ``ABORTED_WITHIN_S``: a graph may block the abort."""
        if hasattr(self, "collectives"):
            aborting = Thread(target=self.collectives.abort, daemon=True)
            aborting.start()
            aborting.join(ABORTED_WITHIN_S)

    def close(self, reason: str = "it was closed") -> None:
        """End the other ranks; later calls raise ``RankError`` with ``reason``."""
        self._watch.stop(reason)
        self._end()

    def _raise_reason(self, error: BaseException | None = None) -> NoReturn:
        raise RankError(f"{self._watch.reason}; the engine has ended; make another") from error


class _Guard:
    def __init__(self, leader: Leader) -> None:
        self._leader = leader

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._leader.give_up(error)
