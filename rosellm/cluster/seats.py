"""Start, call, await and replace the replicas' actors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple

from rosellm.cluster.replica import Facts, Order, Report
from rosellm.errors import ClusterError, RankError, RoseError, describe
from rosellm.roseinfer.serving.admission import SchedulerConfig

LOADS_WITHIN_S = 600.0
MOST_DEATHS = 3
CALLS_AHEAD = 2  # one runs and the next is queued in the replica's process, so it is never idle


@dataclass(eq=False, slots=True)
class Seat:
    """The state of one replica, which outlives the replica's actors.

    index: number of the replica.
    actor: the Ray actor; None if the replica died too often to be replaced.
    calls: Ray's references to unanswered calls, earliest first.
    facts: the properties of the loaded replica; None until it is loaded.
    orders: requests to begin in the next call.
    cancelled: ids of requests to cancel in the next call.
    deaths: how often the replica has died since ``Seats.begin``.
    """

    index: int
    actor: Any = None
    calls: deque[Any] = field(default_factory=deque)
    facts: Facts | None = None
    orders: list[Order] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    deaths: int = 0

    def forget(self) -> None:
        """Drop pending orders and cancellations."""
        self.orders, self.cancelled = [], []


class Death(NamedTuple):
    """Why a replica died.

    is_error: whether its engine raised ``error``, so that the same requests could fail elsewhere too.
    """

    error: BaseException
    is_error: bool


class Seats:
    """The seats of all replicas.

    ray: the imported module.
    n: number of replicas.
    make: starts and returns the actor of the replica with a given index.
    """

    def __init__(self, ray: Any, n: int, make: Callable[[int], Any]) -> None:
        self._ray, self._make = ray, make
        self._seats = [Seat(index) for index in range(n)]
        self._config = SchedulerConfig()
        self._late = 0.0  # when to give up if no replica is loaded by then

    def __getitem__(self, index: int) -> Seat:
        return self._seats[index]

    def __len__(self) -> int:
        return len(self._seats)

    def load_all(self) -> Facts:
        """Start all replicas, wait until they are loaded, and return the properties of the first.

        Raises the error of an engine that does not load, or ``ClusterError`` if a replica dies or takes too
        long.
        """
        errors = self._ray.exceptions
        for seat in self._seats:
            self._start(seat)
        try:
            found = self._ray.get([seat.calls.popleft() for seat in self._seats], timeout=LOADS_WITHIN_S)
        except errors.RayTaskError as error:
            raise _raised(error) from None
        except errors.GetTimeoutError:
            raise ClusterError(f"the replicas did not load within {LOADS_WITHIN_S:g} s") from None
        except errors.RayError as error:
            raise ClusterError(f"a replica died while loading: {_line(error)}") from None
        for seat, facts in zip(self._seats, found, strict=True):
            seat.facts = facts
        return found[0]

    def begin(self, config: SchedulerConfig) -> None:
        """Forget all requests, restart dead replicas, and serve within the limits of ``config``."""
        self._config = config
        self._late = monotonic() + LOADS_WITHIN_S
        for seat in self._seats:
            seat.deaths = 0
            seat.forget()
            if seat.actor is None:
                self._start(seat)
            else:
                seat.actor.begin.remote(config)
            if seat.facts is not None:
                seat.calls.clear()

    def keep_busy(self, seat: Seat, has_requests: bool, seconds: float) -> None:
        """Queue calls to a replica until ``CALLS_AHEAD`` are unanswered.

        has_requests: whether the replica has requests; if not, it is called only to cancel requests.
        seconds: how long the replica runs per call.
        """
        while len(seat.calls) < CALLS_AHEAD and (has_requests or seat.cancelled):
            seat.calls.append(seat.actor.advance.remote(seat.orders, seat.cancelled, seconds))
            seat.forget()

    def next_answer(self, within_s: float) -> tuple[Seat, Facts | Report | Death] | None:
        """Return a seat and the answer to its earliest call, or None after ``within_s`` seconds.

        Raises ``ClusterError`` if no replica has been loaded for ``LOADS_WITHIN_S``.
        """
        first = {seat.calls[0]: seat for seat in self._seats if seat.calls}
        if any(seat.facts is not None for seat in self._seats):
            self._late = monotonic() + LOADS_WITHIN_S
        elif monotonic() > self._late:
            raise ClusterError(f"all replicas have died, and none came back within {LOADS_WITHIN_S:g} s")
        done = self._ray.wait(list(first), timeout=within_s)[0] if first else []
        return (first[done[0]], self._answer(first[done[0]])) if done else None

    def lose(self, seat: Seat, death: Death) -> None:
        """Kill what is left of a dead replica, and replace it, at most ``MOST_DEATHS`` times.

        Raises ``ClusterError`` if no replica is left.
        """
        self._fetch_done(seat.calls)
        self._ray.kill(seat.actor)
        seat.actor = seat.facts = None
        seat.calls.clear()
        seat.forget()
        seat.deaths += 1
        if seat.deaths <= MOST_DEATHS:
            self._start(seat)
        elif all(one.actor is None for one in self._seats):
            raise ClusterError(
                f"all {len(self)} replicas have died {MOST_DEATHS + 1} times; "
                f"the last one: {_line(death.error)}"
            )

    def end(self) -> None:
        """Kill the actors; does nothing if Ray has been shut down."""
        if not self._ray.is_initialized():
            return
        for seat in self._seats:
            if seat.actor is not None:
                self._ray.kill(seat.actor)

    def _start(self, seat: Seat) -> None:
        seat.actor = self._make(seat.index)
        seat.calls.append(seat.actor.load.remote(self._config))

    def _fetch_done(self, calls: deque[Any]) -> None:
        """Fetch answered calls, since Ray prints the errors of calls whose results are never fetched."""
        for call in self._ray.wait(list(calls), num_returns=len(calls), timeout=0)[0] if calls else []:
            with suppress(self._ray.exceptions.RayError):
                self._ray.get(call)

    def _answer(self, seat: Seat) -> Facts | Report | Death:
        try:
            answer = self._ray.get(seat.calls[0])
        except self._ray.exceptions.RayTaskError as error:  # the engine may be broken
            was_loading = seat.facts is None
            return Death(_raised(error), not was_loading and not isinstance(error.cause, RankError))
        except self._ray.exceptions.RayError as error:  # the process, node or answer is lost
            return Death(error, False)
        seat.calls.popleft()
        if isinstance(answer, Facts):
            seat.facts = answer
        return answer


def _raised(error: Any) -> BaseException:
    """Return the exception that a replica raised; its traceback is a note, unless it is a ``RoseError``."""
    if not isinstance(error.cause, RoseError):
        error.cause.add_note(str(error))
    return error.cause


def _line(error: BaseException) -> str:
    return f"{describe(error)} (see Ray's logs)"
