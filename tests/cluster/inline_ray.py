"""Ray in place of Ray: actors in this process, whose calls run as they are waited for, and die when told."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from rosellm.cluster.replica import Replica
from rosellm.cluster.replicas import Replicas, ReplicaScheduler
from rosellm.cluster.seats import Seats
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.owned import Owned
from rosellm.roseinfer.serving.admission import SchedulerConfig


class Lost(Exception):
    """A call to an actor that is gone."""


class Raised(Lost):
    """A call that raised ``cause``."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Actor:
    """Its calls, run in order; arguments and answers are copies. ``loaded``: the replica itself."""

    def __init__(self, replica: _Loaded) -> None:
        self.loaded, self._calls, self.is_alive = replica, deque(), True

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=partial(self._call, name))

    def _call(self, name: str, *arguments: Any) -> Call:
        call = Call(self, partial(getattr(self.loaded, name), *pickle.loads(pickle.dumps(arguments))))
        self._calls.append(call)
        return call

    def run_until(self, call: Call) -> None:
        while not call.is_done:
            self._calls.popleft().run()

    def run_all(self) -> list[Call]:
        """Run, and return, all calls that have come so far."""
        ran = list(self._calls)
        for call in ran:
            self.run_until(call)
        return ran


class Call:
    """An answer to come. What a call has done before its actor dies is done, but its answer is lost.

    is_fetched: whether the answer was asked for since it came.
    """

    def __init__(self, actor: Actor, run: Callable[[], Any]) -> None:
        self.actor, self._run = actor, run
        self.is_done, self.is_fetched, self.answer, self.error = False, False, None, None

    def run(self) -> None:
        self.is_done = True
        if not self.actor.is_alive:
            self.error = Lost("The actor died.")
            return
        try:
            self.answer = pickle.loads(pickle.dumps(self._run()))
        except Exception as error:
            self.error = Raised(error)


class InlineRay:
    """``choose``: of the calls that are waited for, the one that is answered; None: none in time."""

    exceptions = SimpleNamespace(RayTaskError=Raised, RayError=Lost, GetTimeoutError=TimeoutError)

    def __init__(self, choose: Callable[[list[Call]], Call | None] = lambda calls: calls[0]) -> None:
        self.choose = choose

    def wait(
        self, calls: list[Call], num_returns: int = 1, timeout: float = 0.0
    ) -> tuple[list[Call], list[Call]]:
        if num_returns > 1 or not timeout:
            done = [call for call in calls if call.is_done]
            return done, [call for call in calls if not call.is_done]
        chosen = self.choose(calls)
        if chosen is None:
            return [], calls
        chosen.actor.run_until(chosen)
        return [chosen], [call for call in calls if call is not chosen]

    def get(self, calls: Any, timeout: float | None = None) -> Any:
        if isinstance(calls, list):
            return [self.get(call) for call in calls]
        calls.actor.run_until(calls)
        calls.is_fetched = True
        if calls.error is not None:
            raise calls.error
        return calls.answer

    def kill(self, actor: Actor) -> None:
        actor.is_alive = False

    def is_initialized(self) -> bool:
        return True


class InlineFleet(Replicas):
    """``Replicas`` over such actors. make: an engine of a replica."""

    def __init__(self, ray: InlineRay, n: int, make: Callable[[], Engine], marks: bool = False) -> None:
        Owned.__init__(self)
        self.actors: dict[int, Actor] = {}
        self.tokenizer = make().tokenizer
        self.seats = Seats(ray, n, partial(self._start, make))
        self._load(marks)

    def _start(self, make: Callable[[], Engine], index: int) -> Actor:
        self.actors[index] = Actor(_Loaded(make))
        return self.actors[index]

    def scheduler(self, config: SchedulerConfig) -> ReplicaScheduler:
        return ReplicaScheduler(self, config, 1e-6, 0.001)  # a step a call


class _Loaded(Replica):
    """Its engine is made here."""

    def __init__(self, make: Callable[[], Engine]) -> None:
        super().__init__("", 1, {})
        self._make = make

    def load(self, config: SchedulerConfig) -> Any:
        self.engine = self._make()
        return self.take(config, self.engine)
