"""Replicas behind a router under arriving requests, event by event, and what a failure takes from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Literal

import numpy as np

from rosellm.bench.arrivals import Arrival
from rosellm.cluster.replica import SLICE_S
from rosellm.cluster.router import Routed
from rosellm.errors import RoseError
from rosellm.lab.records.serving_times import StepTimes
from rosellm.lab.scale.replica import Replica, Request
from rosellm.lab.scale.routers import AnyRouter
from rosellm.roseinfer.serving.admission import SchedulerConfig

MOST_ATTEMPTS = 100


@dataclass(frozen=True)
class Failures:
    """Replicas fail ``together`` at a time (those of a host), at random times ``mean_s`` seconds apart.

    mean_s: of one such unit, while it is up. load_s: until it takes requests again.
    """

    mean_s: float
    load_s: float
    together: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Fleet:
    """Equal replicas: how many, how long their steps take, the most that run together on one.

    report_s: how often the router hears how far a replica's requests are; that one has ended it hears at
    once.
    """

    n: int
    times: StepTimes
    most: int = 256
    config: SchedulerConfig = field(default_factory=SchedulerConfig)
    report_s: float = SLICE_S

    def of(self, n: int) -> Fleet:
        """So many of these replicas."""
        return replace(self, n=n)


@dataclass(frozen=True)
class Outcome:
    """Every request, in order of arrival, answered; ``seconds`` until the last one was.

    mean_in_flight: requests that had come and were not answered, on average over these seconds, as counted
    on the way. lost_tokens: that had been given by replicas that then failed.
    """

    requests: list[Request]
    seconds: float
    mean_in_flight: float
    failures: int
    lost_tokens: int

    def since(self, seconds: float) -> Outcome:
        """The same of those requests alone that came later. Raises RoseError if there are none."""
        later = [one for one in self.requests if one.arrival > seconds]
        if not later:
            raise RoseError(f"no request came after {seconds:.3g} s; give more requests")
        return replace(self, requests=later)

    def ttft(self, percent: float) -> float:
        """Seconds from arrival to the first token."""
        return float(np.percentile([one.first - one.arrival for one in self.requests], percent))

    def latency(self, percent: float) -> float:
        """Seconds from arrival to the last token."""
        return float(np.percentile([one.last - one.arrival for one in self.requests], percent))


Kind = Literal["round", "fail", "back"]


@dataclass(slots=True)
class _Seat:
    """A replica's place; ``life``: how many it has had. finished: by the round that ends at its ``now``."""

    replica: Replica
    life: int = 0
    is_idle: bool = True
    reported: float = 0.0
    running: dict[int, Request] = field(default_factory=dict)
    finished: list[Request] = field(default_factory=list)


def simulate_cluster(
    arrivals: Sequence[Arrival],
    fleet: Fleet,
    router: AnyRouter,
    failures: Failures | None = None,
    running: Sequence[Arrival] = (),
) -> Outcome:
    """Serve all; each request is answered once, by the last replica that it was given to.

    running: requests whose prompts are prefilled already, at 0; their first tokens count as given then. Where
    a replica has no place left, they come like others.

    The requests of a replica that fails wait again, before all others. Raises ``RoseError`` if one is given
    to ``MOST_ATTEMPTS`` replicas, none of which lasts.
    """
    run = Simulation([*running, *sorted(arrivals, key=lambda one: one.seconds)], fleet, router, failures)
    run.resume(len(running))
    run.serve()
    return run.outcome()


class Simulation:
    """The clock, what is to happen, and the seats."""

    def __init__(
        self, arrivals: list[Arrival], fleet: Fleet, router: AnyRouter, failures: Failures | None
    ) -> None:
        self._fleet, self._router, self._failures = fleet, router, failures
        self._requests = [Request(number, *arrival) for number, arrival in enumerate(arrivals)]
        self._seats = [self._seat(0.0) for _ in range(fleet.n)]
        self._events: list[tuple[float, int, Kind, int, int]] = []  # time, order, kind, which, life
        self._order = self._come = self._left = 0
        self._now = self._area = 0.0
        self._n_failures = self._lost_tokens = 0
        for index in range(fleet.n):
            router.add(index)
        if failures is not None:
            self._random = np.random.default_rng(failures.seed)
            for unit in range(math.ceil(fleet.n / failures.together)):
                self._push(self._lasts(), "fail", unit)

    def _seat(self, now: float) -> _Seat:
        fleet = self._fleet
        return _Seat(Replica(fleet.times, fleet.config, fleet.most, now))

    def resume(self, n: int) -> None:
        """Deal out the first ``n`` requests, which run already."""
        for request in self._requests[:n]:
            self._router.submit(Routed(request.number, request.prompt, request.new))
        self._come = n
        self._assign(Replica.resume)

    def serve(self) -> None:
        """Until every request has come and left."""
        handle = {"round": self._round, "fail": self._fail, "back": self._back}
        while self._left < len(self._requests):
            if self._come < len(self._requests) and (
                not self._events or self._requests[self._come].arrival <= self._events[0][0]
            ):
                self._arrive(self._requests[self._come])
            else:
                time, _, kind, which, life = heappop(self._events)
                self._advance(time)
                handle[kind](which, life)

    def outcome(self) -> Outcome:
        seconds = max(one.last for one in self._requests)
        mean = self._area / self._now if self._now else 0.0
        return Outcome(self._requests, seconds, mean, self._n_failures, self._lost_tokens)

    def _advance(self, time: float) -> None:
        self._area += (self._come - self._left) * (time - self._now)
        self._now = time

    def _push(self, time: float, kind: Kind, which: int, life: int = 0) -> None:
        self._order += 1
        heappush(self._events, (time, self._order, kind, which, life))

    def _arrive(self, request: Request) -> None:
        self._advance(request.arrival)
        self._come += 1
        self._router.submit(Routed(request.number, request.prompt, request.new))
        self._assign()

    def _assign(self, give: Callable[[Replica, Request], None] = Replica.give) -> None:
        for index, number in self._router.assign():
            seat, request = self._seats[index], self._requests[number]
            request.begin()
            if request.attempts > MOST_ATTEMPTS:
                raise RoseError(f"a request was given to {MOST_ATTEMPTS} replicas, and none lasted")
            seat.running[number] = request
            give(seat.replica, request)
            if seat.is_idle:
                seat.is_idle = False
                seat.replica.now = max(seat.replica.now, self._now)
                self._push(seat.replica.now, "round", index, seat.life)

    def _round(self, index: int, life: int) -> None:
        """What the last round gave is there; run the next one, unless nothing is left."""
        seat = self._seats[index]
        if life != seat.life:
            return
        if seat.finished:
            self._settle(seat)
        if self._now - seat.reported >= self._fleet.report_s:
            self._report(seat)
        seat.is_idle = not seat.replica.is_busy
        if not seat.is_idle:
            seat.finished = seat.replica.round()
            self._push(seat.replica.now, "round", index, life)

    def _settle(self, seat: _Seat) -> None:
        """Answer the finished requests, and let others take their places."""
        for one in seat.finished:
            self._router.finish(one.number)
            del seat.running[one.number]
        self._left += len(seat.finished)
        seat.finished = []
        self._assign()

    def _report(self, seat: _Seat) -> None:
        """Tell the router how far the replica's requests are."""
        seat.reported = self._now
        for number, one in seat.running.items():
            if n_tokens := seat.replica.tokens_of(one):
                self._router.note(number, n_tokens)

    def _lasts(self) -> float:
        assert self._failures is not None
        return self._now + self._random.exponential(self._failures.mean_s)

    def _unit(self, unit: int) -> range:
        assert self._failures is not None
        size = self._failures.together
        return range(unit * size, min((unit + 1) * size, self._fleet.n))

    def _fail(self, unit: int, _life: int) -> None:
        assert self._failures is not None
        self._n_failures += 1
        for index in self._unit(unit):
            seat = self._seats[index]
            self._lost_tokens += sum(seat.replica.tokens_of(one) for one in seat.running.values())
            self._router.lose(index)
            seat.life += 1
            seat.is_idle, seat.running, seat.finished = False, {}, []
        self._push(self._now + self._failures.load_s, "back", unit)
        self._assign()

    def _back(self, unit: int, _life: int) -> None:
        for index in self._unit(unit):
            life = self._seats[index].life
            self._seats[index] = self._seat(self._now)
            self._seats[index].life = life
            self._router.add(index)
        self._push(self._lasts(), "fail", unit)
        self._assign()
