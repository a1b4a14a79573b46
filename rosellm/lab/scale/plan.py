"""What a fleet is asked: how much it serves, to how many within limits, what a failure takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rosellm.bench.arrivals import Arrival, poisson_times
from rosellm.errors import RoseError
from rosellm.lab.scale.cluster import Failures, Fleet, Outcome, simulate_cluster
from rosellm.lab.scale.replica import Request
from rosellm.lab.scale.routers import ROUTERS

ALONE = 900  # requests of one replica that tell how many it has at a time
ROUNDS = 4  # how often each place is taken in the run that tells the capacity
EACH = 100  # requests a replica, of a run
FEWEST = 3  # requests that have a later half: those after the middle one
Span = tuple[int, int]


@dataclass(frozen=True)
class Traffic:
    """Requests of unequal lengths: tokens uniform within each span; some prompts are ``long`` ones."""

    prompt: Span = (16, 512)
    new: Span = (16, 512)
    long: Span = (0, 0)
    long_share: float = 0.0

    def requests(self, n: int, rate: float | None = None, seed: int = 0) -> list[Arrival]:
        """A Poisson process of ``rate`` requests a second; None: all at once."""
        random = np.random.default_rng([seed, n])
        prompts, new, long = (
            random.integers(low, high + 1, n) for low, high in (self.prompt, self.new, self.long)
        )
        prompts = np.where(random.random(n) < self.long_share, long, prompts)
        times = [0.0] * n if rate is None else poisson_times(rate, n, seed)
        return [Arrival(*row) for row in zip(times, prompts.tolist(), new.tolist(), strict=True)]

    def running(self, n: int, seed: int = 0) -> list[Arrival]:
        """Requests in the midst of their answers, as they are met at any time: the longer, the likelier.

        What they have so far counts as prompt; two tokens or more are left, so that requests of a single new
        token are never among them. None are met if all are such, or if ``n`` is 0.
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

    alone: seconds that prefilling so many prompt tokens takes on an idle replica, which come on top of
    ``ttft_s``: nobody expects a long prompt's answer as soon as a short one's.
    """

    ttft_s: float
    gap_s: float
    alone: Callable[[int], float] = lambda tokens: 0.0

    def keeps(self, request: Request) -> bool:
        """Whether the request was served within both."""
        return request.first - request.arrival <= self.ttft_s + self.alone(request.prompt) and (
            request.gap <= self.gap_s
        )

    def share(self, outcome: Outcome) -> float:
        """The share of the requests that were served within both."""
        return sum(map(self.keeps, outcome.requests)) / len(outcome.requests)


def capacity(fleet: Fleet, traffic: Traffic) -> float:
    """Requests a second that one replica serves while its places are all taken."""
    n = ROUNDS * fleet.most
    outcome = simulate_cluster(traffic.requests(n), replace(fleet, n=1), ROUTERS["fewest tokens"]())
    ends = sorted(one.last for one in outcome.requests)
    return (n - 2 * fleet.most) / (ends[n - fleet.most - 1] - ends[fleet.most - 1])


def in_flight(fleet: Fleet, traffic: Traffic, rate: float) -> int:
    """Requests that one replica runs at a time, at ``rate`` requests a second, by Little's law."""
    alone = simulate_cluster(
        traffic.requests(ALONE, rate), replace(fleet, n=1), ROUTERS["fewest tokens"]()
    ).requests[ALONE // 3 : 2 * ALONE // 3]
    return min(fleet.most, round(rate * float(np.mean([one.last - one.arrival for one in alone]))))


def serve(
    fleet: Fleet,
    traffic: Traffic,
    rate: float,
    router: str,
    each: int = EACH,
    failures: Failures | None = None,
) -> Outcome:
    """The later half of ``each`` requests a replica, at ``rate`` a second of each replica.

    The fleet begins as full as it will be. Raises RoseError for fewer than ``FEWEST`` requests in all.
    """
    n, whole = each * fleet.n, rate * fleet.n
    if n < FEWEST:
        raise RoseError(f"{n} requests in all have no later half; give {FEWEST} or more")
    running = traffic.running(in_flight(fleet, traffic, rate) * fleet.n)
    arrivals = traffic.requests(n, whole)
    served = simulate_cluster(arrivals, fleet, ROUTERS[router](), failures, running)
    return served.since(arrivals[n // 2].seconds)


def sweep(
    fleet: Fleet, traffic: Traffic, each_s: float, router: str, loads: Sequence[float], each: int = EACH
) -> dict[float, Outcome]:
    """Load, a share of the capacity ``each_s`` of each replica → what :func:`serve` gives."""
    return {load: serve(fleet, traffic, load * each_s, router, each) for load in loads}
