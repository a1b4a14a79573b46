"""Simulate one replica of many without updating each row at each step.

All rows of a batch get their tokens together. So a request is represented by the indices of the decode steps
of its first and last token, and only requests that begin or end with a step are touched.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush

from rosellm.lab.records.serving_times import StepTimes
from rosellm.roseinfer.serving.admission import SchedulerConfig


@dataclass(slots=True, eq=False)
class Request:
    """One request and its progress; seconds on the simulation's clock, NaN until known.

    gap: the longest time between two of its tokens. start: the decode step of its second token. attempts:
    number of replicas that it was assigned to. A new attempt starts over; final values are those of the last
    one.
    """

    number: int
    arrival: float
    prompt: int
    new: int
    first: float = math.nan
    last: float = math.nan
    gap: float = 0.0
    attempts: int = 0
    cached: int = 0
    start: int = 0

    def begin(self) -> None:
        """Reset the state of an earlier attempt."""
        self.first = self.last = math.nan
        self.gap, self.cached = 0.0, 0
        self.attempts += 1


@dataclass(slots=True)
class Step:
    """A launched step. tokens: how many it generates. number: the decode step's index; −1 for a prefill."""

    ends: float
    tokens: int
    number: int
    begins: list[Request]
    finishes: list[Request]


@dataclass(slots=True)
class _Gaps:
    """The longest gap between tokens of consecutive decode steps, from any step to the latest.

    Gaps dominated by a later, longer one are discarded.
    """

    steps: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def add(self, step: int, gap: float) -> None:
        while self.gaps and self.gaps[-1] <= gap:
            self.gaps.pop()
            self.steps.pop()
        self.steps.append(step)
        self.gaps.append(gap)

    def longest_from(self, step: int) -> float:
        at = bisect_left(self.steps, step)
        return self.gaps[at] if at < len(self.gaps) else 0.0


class Replica:
    """A scheduler at its host's time ``now``; ``waiting``: requests assigned to it and not prefilled."""

    def __init__(self, times: StepTimes, config: SchedulerConfig, most: int, now: float = 0.0) -> None:
        self.times, self.config, self.most, self.now = times, config, most, now
        self.waiting: deque[Request] = deque()
        self._free = now
        self._active = self._rows = self._cached = self._begun = self._delivered = 0
        self._told = now  # when the latest decode step's tokens were delivered
        self._in_flight: deque[Step] = deque()
        self._joining: list[Request] = []  # first take part in the next decode
        self._ends: list[tuple[int, int, Request]] = []  # heap: last step of each decoding request
        self._longest: list[
            tuple[int, int]
        ] = []  # heap: step less context, negative for the longest; last step
        self._gaps = _Gaps()

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self._active)

    def tokens_of(self, request: Request) -> int:
        """Return how many of the request's tokens have been delivered by ``now``."""
        if math.isnan(request.first):
            return 0
        return 1 + min(request.new - 1, max(0, self._delivered - request.start))

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
        """Begin a decode and a prefill, collect what has ended, deliver it at ``now``; who is finished."""
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
        joining, self._joining = self._joining, []
        self._begin(seconds, rows, number, joining, finishes)

    def _prefill(self) -> bool:
        """Within the budget, the rest of a cut prompt first; whether there was anything."""
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
            self._begin(seconds, len(whole), -1, whole, [one for one in whole if one.new == 1])
            self._admit(whole)
        return prompts > 0

    def _admit(self, requests: list[Request]) -> None:
        self._active += len(requests)
        for one in requests:
            one.start = self._begun
            if one.new > 1:
                last = one.start + one.new - 2
                heappush(self._ends, (last, one.number, one))
                heappush(self._longest, (one.start - one.prompt, last))
                self._joining.append(one)
                self._rows += 1
                self._cached += one.prompt

    def _begin(
        self, seconds: float, tokens: int, number: int, begins: list[Request], finishes: list[Request]
    ) -> None:
        self._free = max(self._free, self.now) + seconds
        self._in_flight.append(Step(self._free, tokens, number, begins, finishes))

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
        now = self.now
        if step.number < 0:
            for one in step.begins:
                one.first = now
            for one in step.finishes:
                one.last = now
            return
        self._gaps.add(step.number, now - self._told)
        self._told, self._delivered = now, step.number + 1
        for one in step.begins:
            one.gap = now - one.first
        for one in step.finishes:
            one.last, one.gap = now, max(one.gap, self._gaps.longest_from(one.start + 1))
