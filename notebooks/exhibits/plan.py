"""Answer questions about a fleet: its capacity, the share of requests within limits, the cost of failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from rosellm.bench.arrivals import Arrival, poisson_times
from rosellm.roseinfer.exhibits import load_exhibit

_fleet, ROUTERS = load_exhibit("simulated_fleet"), load_exhibit("routers").ROUTERS
NEVER, Failures, simulate_cluster = _fleet.NEVER, _fleet.Failures, _fleet.simulate_cluster
Fleet, Outcome, Request = _fleet.Fleet, _fleet.Outcome, _fleet.Request

ALONE = 900  # requests in the run that measures a replica's concurrency
ROUNDS = 4  # requests per slot in the run that measures capacity
EACH = 100  # requests per replica in a run
Span = tuple[int, int]


@dataclass(frozen=True)
class Traffic:
    """Requests of unequal lengths: tokens uniform within each span; some prompts are ``long``."""

    prompt: Span = (16, 512)
    new: Span = (16, 512)
    long: Span = (0, 0)
    long_share: float = 0.0

    def requests(self, n: int, rate: float | None = None, seed: int = 0) -> list[Arrival]:
        """Draw ``n`` requests from a Poisson process of ``rate`` requests per second; None: all at once."""
        random = np.random.default_rng([seed, n])
        spans = (self.prompt, self.new, self.long)
        prompts, new, long = (random.integers(low, high + 1, n) for low, high in spans)
        prompts = np.where(random.random(n) < self.long_share, long, prompts)
        times = [0.0] * n if rate is None else poisson_times(rate, n, seed)
        return [Arrival(*row) for row in zip(times, prompts.tolist(), new.tolist(), strict=True)]

    def running(self, n: int, seed: int = 0) -> list[Arrival]:
        """Draw ``n`` requests in progress, as found at a random time: proportionally to their length.

        Tokens generated so far count as prompt; at least two tokens remain, so requests of one new token are
        excluded. Returns [] if all are such, or if ``n`` is 0.
        """
        least, most = self.new
        if not n or most < 2:
            return []
        random = np.random.default_rng([seed, n, 1])
        pool = replace(self, new=(max(2, least), most)).requests(8 * n, seed=seed + 1)
        lengths = np.array([one.new_tokens for one in pool], dtype=float)
        met = random.choice(len(pool), n, p=lengths / lengths.sum())
        given = (random.random(n) * (lengths[met] - 1)).astype(int).tolist()
        return [
            Arrival(0.0, pool[i].prompt_tokens + done, pool[i].new_tokens - done)
            for i, done in zip(met.tolist(), given, strict=True)
        ]


@dataclass(frozen=True)
class Limits:
    """Seconds that users accept until the first token, and between two tokens.

    alone: maps prompt tokens to the seconds of prefilling them on an idle replica, which are added to
    ``ttft_s``, because users expect a long prompt to take longer.
    """

    ttft_s: float
    gap_s: float
    alone: Callable[[int], float] = lambda tokens: 0.0

    def keeps(self, request: Request) -> bool:
        """Return whether the request was served within both limits."""
        is_early = request.first - request.arrival <= self.ttft_s + self.alone(request.prompt)
        return is_early and max(request.itl, default=0.0) <= self.gap_s

    def share(self, outcome: Outcome) -> float:
        """Return the share of requests served within both limits."""
        return sum(map(self.keeps, outcome.requests)) / len(outcome.requests)


def capacity(fleet: Fleet, traffic: Traffic) -> float:
    """Return the requests per second that one replica serves while all its slots are taken."""
    n = ROUNDS * fleet.most
    outcome = simulate_cluster(traffic.requests(n), fleet.of(1))
    ends = sorted(one.last for one in outcome.requests)
    return (n - 2 * fleet.most) / (ends[n - fleet.most - 1] - ends[fleet.most - 1])


@cache
def in_flight(one: Fleet, traffic: Traffic, rate: float) -> int:
    """Return the requests that a replica runs at once, at ``rate`` requests per second, by Little's law."""
    outcome = simulate_cluster(traffic.requests(ALONE, rate), one)
    middle = outcome.requests[ALONE // 3 : 2 * ALONE // 3]
    return min(one.most, round(rate * float(np.mean([one.last - one.arrival for one in middle]))))


def serve(
    fleet: Fleet, traffic: Traffic, rate: float, router: str, each: int = EACH, failures: Failures = NEVER
) -> Outcome:
    """Serve ``each`` requests per replica, at ``rate`` per second and replica; return the later half.

    The fleet starts at its steady-state load. Raises RoseError for fewer than three requests in all.
    """
    running = traffic.running(in_flight(fleet.of(1), traffic, rate) * fleet.n)
    arrivals = traffic.requests(each * fleet.n, rate * fleet.n)
    served = simulate_cluster(arrivals, fleet, ROUTERS[router](), failures, running)
    return served.since(arrivals[len(arrivals) // 2].seconds)
