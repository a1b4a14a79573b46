"""Simulate replicas behind a router under arriving requests, event by event, including failures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from typing import Any

import numpy as np

from rosellm.bench.arrivals import Arrival
from rosellm.bench.record import distribution
from rosellm.cluster.router import Routed, Router
from rosellm.errors import RoseError
from rosellm.lab.records.serving_times import StepTimes
from rosellm.roseinfer.exhibits import load_exhibit

_replica = load_exhibit("simulated_replica")
Fleet, Replica, Request = _replica.Fleet, _replica.Replica, _replica.Request
fewest_tokens = load_exhibit("routers").fewest_tokens

MOST_ATTEMPTS = 100
PERCENTS = (50, 95, 99)


@dataclass(frozen=True)
class Failures:
    """Replicas fail ``together`` at a time (those of a host), at exponentially distributed intervals.

    mean_s: mean seconds until such a unit fails, while it is up. load_s: seconds until it accepts requests
    again.
    """

    mean_s: float
    load_s: float
    together: int = 1
    seed: int = 0


NEVER = Failures(math.inf, 0.0)


@dataclass(frozen=True)
class Outcome:
    """Every request, answered, in order of arrival, and the number of failures meanwhile."""

    requests: list[Request]
    failures: int = 0

    @property
    def seconds(self) -> float:
        """When the last request was answered."""
        return max(one.last for one in self.requests)

    def since(self, seconds: float) -> Outcome:
        """Return the outcome of only the requests that arrived later. Raises RoseError if there are none."""
        later = [one for one in self.requests if one.arrival > seconds]
        if not later:
            raise RoseError(f"no request came after {seconds:.3g} s; give more requests")
        return replace(self, requests=later)

    def ttft(self, percent: float) -> float:
        """Return a percentile of the seconds from arrival to the first token."""
        return float(np.percentile([one.first - one.arrival for one in self.requests], percent))


def simulate_cluster(
    arrivals: Sequence[Arrival],
    fleet: Fleet,
    router: Router | None = None,
    failures: Failures = NEVER,
    running: Sequence[Arrival] = (),
) -> Outcome:
    """Serve all requests; each is answered once, by the last replica that it was assigned to.

    router: by default the project's own. running: requests already prefilled at time 0, when their first
    tokens count as generated; those that no replica has room for arrive like others. Requests of a failed
    replica are queued before all others. Raises ``RoseError`` if one is assigned to ``MOST_ATTEMPTS``
    replicas, all of which fail.
    """
    everything = [*running, *sorted(arrivals, key=lambda one: one.seconds)]
    run = Simulation(everything, fleet, router or fewest_tokens(), failures)
    run.resume(len(running))
    return run.serve()


class Simulation:
    """The clock, the pending events, and the replicas."""

    def __init__(self, arrivals: list[Arrival], fleet: Fleet, router: Router, failures: Failures) -> None:
        self._fleet, self._router, self._failures = fleet, router, failures
        self._random = np.random.default_rng(failures.seed)
        self._requests = [
            Request(time, number=number, prompt=prompt, new=new)
            for number, (time, prompt, new) in enumerate(arrivals)
        ]
        self._replicas = [Replica(fleet, 0.0) for _ in range(fleet.n)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []  # time, order, what happens
        self._n_events = self._n_answered = self._n_failures = 0
        self._now = 0.0
        for index in range(fleet.n):
            router.add(index)
        for first in range(0, fleet.n, failures.together):
            self._fail_later(range(first, min(first + failures.together, fleet.n)))

    def resume(self, n: int) -> None:
        """Distribute the first ``n`` requests, which are already running; the others arrive."""
        for request in self._requests[n:]:
            self._at(request.arrival, partial(self._arrive, request))
        for request in self._requests[:n]:
            self._submit(request)
        self._assign(Replica.resume)

    def serve(self) -> Outcome:
        """Run until every request is answered."""
        while self._n_answered < len(self._requests):
            self._now, _, happen = heappop(self._events)
            happen()
        return Outcome(self._requests, self._n_failures)

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        self._n_events += 1
        heappush(self._events, (time, self._n_events, happen))

    def _arrive(self, request: Request) -> None:
        self._submit(request)
        self._assign()

    def _submit(self, request: Request) -> None:
        self._router.submit(Routed(request.number, request.prompt, request.new))

    def _assign(self, give: Callable[[Replica, Request], None] = Replica.give) -> None:
        for index, number in self._router.assign():
            replica, request = self._replicas[index], self._requests[number]
            request.start_over()
            if request.attempts > MOST_ATTEMPTS:
                raise RoseError(f"a request was given to {MOST_ATTEMPTS} replicas, and none lasted")
            replica.running[number] = request
            give(replica, request)
            if replica.is_idle:
                replica.is_idle = False
                replica.now = max(replica.now, self._now)
                self._at(replica.now, partial(self._round, index, replica, []))

    def _round(self, index: int, replica: Replica, finished: list[Request]) -> None:
        """Answer the requests that the last round finished; run the next one unless the replica is lost."""
        if self._replicas[index] is not replica:
            return
        for one in finished:
            self._router.finish(one.number)
            del replica.running[one.number]
            self._n_answered += 1
        self._assign()
        if self._now - replica.reported >= self._fleet.report_s:
            self._report(replica)
        replica.is_idle = not replica.is_busy
        if not replica.is_idle:
            finished = replica.round()
            self._at(replica.now, partial(self._round, index, replica, finished))

    def _report(self, replica: Replica) -> None:
        """Report the progress of the replica's requests to the router."""
        replica.reported = self._now
        for number, one in replica.running.items():
            if given := replica.progress(one):
                self._router.note(number, given)

    def _fail_later(self, unit: range) -> None:
        lasts = self._random.exponential(self._failures.mean_s)
        self._at(self._now + lasts, partial(self._fail, unit))

    def _fail(self, unit: range) -> None:
        self._n_failures += 1
        back = self._now + self._failures.load_s
        for index in unit:
            self._replicas[index] = Replica(self._fleet, back)
            self._router.lose(index)
        self._at(back, partial(self._back, unit))
        self._assign()

    def _back(self, unit: range) -> None:
        for index in unit:
            self._router.add(index)
        self._fail_later(unit)
        self._assign()


def simulated_run(arrivals: Sequence[Arrival], times: StepTimes, max_batch_size: int) -> dict[str, Any]:
    """Return the figures of one simulated replica, named and defined as in ``benchmark_streaming``."""
    made = simulate_cluster(arrivals, Fleet(1, times, max_batch_size))
    requests = made.requests
    n_tokens = sum(len(one.token_times) for one in requests)
    return {
        "total_time_s": made.seconds,
        "total_throughput_tok_s": n_tokens / made.seconds,
        **distribution("ttft", [one.ttft for one in requests], PERCENTS),
        **distribution("itl", [gap for one in requests for gap in one.itl], PERCENTS),
    }
