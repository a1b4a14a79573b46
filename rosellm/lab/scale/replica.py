"""Simulate one replica of many without updating each row at each step.

All rows of a batch get their tokens together. So a request is represented by the indices of the decode steps
of its first and last token, and only requests that begin or end with a step are touched.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise

from rosellm.lab.records.serving_times import StepTimes
from rosellm.roseinfer.serving.admission import SchedulerConfig


@dataclass(slots=True, eq=False)
class Request:
    """One request and its progress; seconds on the simulation's clock, NaN until known.

    start: the decode step of its second token. step_times: when each decode step of its replica was
    delivered, later ones too. attempts: number of replicas that it was assigned to. A new attempt starts
    over; final values are those of the last one.
    """

    number: int
    arrival: float
    prompt: int
    new: int
    first: float = math.nan
    attempts: int = 0
    cached: int = 0
    start: int = 0
    step_times: list[float] = field(default_factory=list)

    def begin(self) -> None:
        """Reset the state of an earlier attempt."""
        self.first, self.cached, self.step_times = math.nan, 0, []
        self.attempts += 1

    @property
    def token_times(self) -> list[float]:
        """When its tokens were delivered so far; [] before the first."""
        if math.isnan(self.first):
            return []
        return [self.first, *self.step_times[self.start : self.start + self.new - 1]]

    @property
    def last(self) -> float:
        """When the last token was delivered, of a finished request."""
        return self.step_times[self.start + self.new - 2] if self.new > 1 else self.first

    @property
    def gap(self) -> float:
        """The longest time between two of its tokens; 0 for a single one."""
        return max((later - one for one, later in pairwise(self.token_times)), default=0.0)


@dataclass(slots=True)
class Step:
    """A launched step. tokens: how many it generates. begins: the requests whose prefill it ends."""

    ends: float
    tokens: int
    begins: list[Request]
    finishes: list[Request]
    is_decode: bool


class Replica:
    """A scheduler at its host's time ``now``; ``waiting``: requests assigned to it and not prefilled."""

    def __init__(self, times: StepTimes, config: SchedulerConfig, most: int, now: float = 0.0) -> None:
        self.times, self.config, self.most, self.now = times, config, most, now
        self.waiting: deque[Request] = deque()
        self._free = now
        self._active = self._rows = self._cached = self._begun = 0
        self._step_times: list[float] = []  # when each decode step's tokens were delivered
        self._in_flight: deque[Step] = deque()
        self._ends: list[tuple[int, int, Request]] = []  # heap: last step of each decoding request
        self._longest: list[tuple[int, int]] = []  # heap: step less context; last step

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self._active)

    def tokens_of(self, request: Request) -> int:
        """Return how many of the request's tokens have been delivered by ``now``."""
        if math.isnan(request.first):
            return 0
        return 1 + min(request.new - 1, max(0, len(self._step_times) - request.start))

    def give(self, request: Request) -> None:
        """Queue the request for prefill."""
        self.waiting.append(request)

    def resume(self, request: Request) -> None:
        """Admit a prefilled request of at least two tokens, its first token given; queue it if full."""
        if self._active == self.most:
            return self.give(request)
        request.first, request.cached = self.now, request.prompt
        self._admit([request])

    def round(self) -> list[Request]:
        """Launch a decode and a prefill, deliver the ended steps at ``now``; return the finished requests."""
        has_decoded = self._rows > 0
        if has_decoded:
            self._decode()
        got = self._collect(self.times.run_ahead)
        has_prefilled = bool(self.waiting) and self._prefill()
        got += self._collect(self.times.run_ahead if has_decoded or has_prefilled else 0)
        tokens, finished = 0, []
        for step in got:
            tokens += step.tokens
            self._deliver(step)
            finished += step.finishes
        self.now += self.times.host(tokens)
        return finished

    def _decode(self) -> None:
        rows, number, longest = self._rows, self._begun, self._longest
        while longest[0][1] < number:
            heappop(longest)
        seconds = self.times.decode(rows, self._cached, number - longest[0][0])
        self._cached += rows
        self._begun += 1
        finishes = []
        while self._ends and self._ends[0][0] == number:
            one = heappop(self._ends)[2]
            finishes.append(one)
            self._rows -= 1
            self._cached -= one.prompt + one.new - 1
        self._begin(seconds, rows, [], finishes, is_decode=True)

    def _prefill(self) -> bool:
        """Prefill within the budget, the rest of a chunked prompt first; return whether any ran."""
        whole_budget, chunk = self.config.prefill_token_budget, self.config.prefill_chunk
        budget = min(whole_budget, chunk or whole_budget) if self._active else whole_budget
        whole: list[Request] = []
        room = min(self.most - self._active, self.config.prefill_max_batch_size)
        left, prompts, earlier = budget, 0, 0
        while self.waiting and left and len(whole) < room:
            first = self.waiting[0]
            count = min(left, first.prompt - first.cached)
            earlier += count * first.cached
            first.cached, left, prompts = first.cached + count, left - count, prompts + 1
            if first.cached == first.prompt:
                whole.append(self.waiting.popleft())
        if prompts:
            seconds = self.times.prefill(prompts, budget - left, earlier)
            self._begin(seconds, len(whole), whole, [one for one in whole if one.new == 1])
            self._admit(whole)
        return prompts > 0

    def _admit(self, requests: list[Request]) -> None:
        self._active += len(requests)
        for one in requests:
            one.start, one.step_times = self._begun, self._step_times
            if one.new > 1:
                last = one.start + one.new - 2
                heappush(self._ends, (last, one.number, one))
                heappush(self._longest, (one.start - one.prompt, last))
                self._rows += 1
                self._cached += one.prompt

    def _begin(
        self,
        seconds: float,
        tokens: int,
        begins: list[Request],
        finishes: list[Request],
        is_decode: bool = False,
    ) -> None:
        self._free = max(self._free, self.now) + seconds
        self._in_flight.append(Step(self._free, tokens, begins, finishes, is_decode))

    def _collect(self, leave: int) -> list[Step]:
        """Wait until at most ``leave`` steps are in flight; return the ended ones, and free their slots."""
        got, in_flight = [], self._in_flight
        while in_flight and (len(in_flight) > leave or in_flight[0].ends <= self.now):
            step = in_flight.popleft()
            self.now = max(self.now, step.ends)
            self._active -= len(step.finishes)
            got.append(step)
        return got

    def _deliver(self, step: Step) -> None:
        if step.is_decode:
            self._step_times.append(self.now)
        for one in step.begins:
            one.first = self.now
