"""The members of a group: rank 0, which tells the others what to run, and those who follow."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any, NamedTuple, NoReturn, ParamSpec, TypeVar, cast

from torch import Tensor

from rosellm.errors import RankError, RoseError, told
from rosellm.models.part import Part
from rosellm.roseinfer.ranks.collectives import Collectives
from rosellm.roseinfer.ranks.peer_memory import PeerMemory
from rosellm.roseinfer.ranks.watch import Watch

P = ParamSpec("P")
T = TypeVar("T")
A_REASON_WITHIN_S, ABORTED_WITHIN_S = 2.0, 3.0


class _Result(NamedTuple):
    """Stands for the tensor that the latest command of that name returned."""

    name: str


class _Member:
    """One rank of a group; ``collectives`` is there once the ranks have met."""

    collectives: Collectives

    def __init__(self, part: Part) -> None:
        self.part = part

    def summed(self, x: Tensor) -> Tensor:
        """See ``group.Ranks``."""
        return self.collectives.summed(x)

    def gathered(self, x: Tensor) -> Tensor:
        """See ``group.Ranks``."""
        return self.collectives.gathered(x)

    def peers(self, n_bytes: int) -> PeerMemory:
        """See ``group.Ranks``."""
        return self.collectives.peers(n_bytes)

    def least(self, number: int) -> int:
        """See ``group.Group``."""
        return self.collectives.least(number)


class Follower(_Member):
    """Another rank than 0: it runs what it is told, until rank 0 hangs up.

    is_busy: while it does; is_waiting: while what it runs waits for other ranks.
    """

    def __init__(self, part: Part, pipe: Connection) -> None:
        super().__init__(part)
        self._pipe, self.is_busy, self.is_waiting = pipe, False, False
        self._runs: dict[str, weakref.WeakMethod] = {}
        self._results: dict[str, Any] = {}

    def command(self, name: str, run: Callable[P, T]) -> Callable[P, T]:
        """See ``group.Group``: the latest method of that name is run."""
        self._runs[name] = weakref.WeakMethod(run)  # a step that was only tried is not kept
        return run

    def summed(self, x: Tensor) -> Tensor:
        """See ``group.Ranks``."""
        return self._with_others(self.collectives.summed, x)

    def gathered(self, x: Tensor) -> Tensor:
        """See ``group.Ranks``."""
        return self._with_others(self.collectives.gathered, x)

    def least(self, number: int) -> int:
        """See ``group.Group``."""
        return self._with_others(self.collectives.least, number)

    def check(self) -> None:
        """Rank 0 has ended if this one could notice."""

    def told(self) -> Any:
        """What rank 0 says next. Raises ``EOFError`` once it has hung up."""
        return pickle.loads(self._pipe.recv_bytes())

    def follow(self) -> None:
        """Run commands until rank 0 hangs up."""
        while True:
            try:
                name, arguments = self.told()
            except EOFError:
                return
            given = [self._results[a.name] if isinstance(a, _Result) else a for a in arguments]
            self.is_busy = True
            self._results[name] = self._run(name)(*given)
            self.is_busy = False

    def _with_others(self, run: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        self.is_waiting = True
        result = run(*arguments, **named)
        self.is_waiting = False
        return result

    def _run(self, name: str) -> Callable[..., Any]:
        run = self._runs[name]()
        assert run is not None, name
        return run


class Leader(_Member):
    """Rank 0: its commands are told to the others before it runs them itself.

    An error while it does leaves the others waiting for it, so it ends the group. end: ends the others'
    processes, if they have not ended.
    """

    def __init__(self, part: Part, pipes: list[Connection], watch: Watch, end: Callable[[], object]) -> None:
        super().__init__(part)
        self._pipes, self._watch, self._end = pipes, watch, end
        self._results: dict[str, weakref.ref[Tensor]] = {}

    def command(self, name: str, run: Callable[P, T]) -> Callable[P, T]:
        """See ``group.Group``."""

        own: Callable[..., T] = run

        def led(*arguments: Any) -> Any:
            self.tell((name, [self._named(a) if isinstance(a, Tensor) else a for a in arguments]))
            with self.guarded():
                result = own(*arguments)
            if isinstance(result, Tensor):
                self._results[name] = weakref.ref(result)
            return result

        return cast("Callable[P, T]", led)

    def tell(self, what: Any) -> None:
        """Send it to all others; they get it in order."""
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
        """A context in which any error ends the group; an error of another rank replaces its consequences."""
        return _Guard(self)

    def give_up(self, error: BaseException) -> None:
        """End the group after an error of this rank; if it comes of another's end, that is raised."""
        consequence = isinstance(error, Exception) and not isinstance(error, RoseError)
        if consequence:
            self._watch.ended.wait(A_REASON_WITHIN_S)
        self.close(f"rank 0 failed: {told(error)}")
        self.abort()
        if consequence and self._watch.failed:
            self._raise_reason(error)

    def abort(self) -> None:
        """End what this rank's device waits for; returns before that if a graph holds it up for long."""
        if hasattr(self, "collectives"):
            aborting = Thread(target=self.collectives.abort, daemon=True)
            aborting.start()
            aborting.join(ABORTED_WITHIN_S)

    def close(self, reason: str = "it was closed") -> None:
        """End the other ranks; later commands raise ``RankError``."""
        self._watch.stop(reason)
        self._end()

    def _raise_reason(self, error: BaseException | None = None) -> NoReturn:
        raise RankError(f"{self._watch.reason}; the engine has ended, make another") from error

    def _named(self, tensor: Tensor) -> _Result:
        for name, known in self._results.items():
            if known() is tensor:
                return _Result(name)
        raise RoseError("the tensors of an earlier step are gone on the other ranks")


class _Guard:
    def __init__(self, leader: Leader) -> None:
        self._leader = leader

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._leader.give_up(error)
