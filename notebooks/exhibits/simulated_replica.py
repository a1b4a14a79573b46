"""Simulate one replica, round by round, as its scheduler works."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import NamedTuple

from rosellm.cluster.replica import SLICE_S
from rosellm.lab.records.serving_times import StepTimes
from rosellm.roseinfer.request import RequestMetrics
from rosellm.roseinfer.serving.admission import SchedulerConfig


@dataclass(frozen=True)
class Fleet:
    """Equal replicas: their number, their step times, and the most requests that one runs at once.

    report_s: interval at which the router is updated on a replica's progress; it is notified at once when a
    request ends.
    """

    n: int
    times: StepTimes
    most: int = 256
    config: SchedulerConfig = field(default_factory=SchedulerConfig)
    report_s: float = SLICE_S

    def of(self, n: int) -> Fleet:
        """Return a fleet of ``n`` of these replicas."""
        return replace(self, n=n)


@dataclass(eq=False, kw_only=True)
class Request(RequestMetrics):
    """A request of ``prompt`` tokens that gets ``new`` tokens, and its progress.

    Times are seconds on the simulation's clock; those of decoded tokens are known once the last one is given.
    attempts: replicas that it was assigned to; each starts over. cached: prompt tokens prefilled. joined: its
    replica's decode steps before its first one.
    """

    number: int
    prompt: int
    new: int
    attempts: int = 0
    cached: int = 0
    joined: int = 0

    def start_over(self) -> None:
        """Forget the progress on an earlier replica."""
        self.token_times, self.cached = [], 0
        self.attempts += 1

    @property
    def first(self) -> float:
        """When the first token was delivered."""
        return self.token_times[0]

    @property
    def last(self) -> float:
        """When the last token was delivered."""
        return self.token_times[-1]


class Step(NamedTuple):
    """A launched step: when the device ends it, how many tokens it gives, and which requests then end.

    prefilled: the requests whose first tokens it gives; None: a decode step.
    """

    ends: float
    n_tokens: int
    finishes: list[Request]
    prefilled: list[Request] | None = None


class Replica:
    """A scheduler at its host's time ``now``, with the requests that wait for prefill and that decode.

    running: the requests assigned to it, by number. is_idle: it has no next round. reported: when the router
    was last updated on its progress.

    Each round launches a decode step, then a prefill within the scheduler's budgets. Tokens are delivered at
    the round's end, once its finished steps are collected. KV blocks never run out. Every decode step has a
    row of each decoding request, so that a step costs the same whatever their number: a request's tokens are
    those of ``new - 1`` successive steps.
    """

    def __init__(self, fleet: Fleet, now: float) -> None:
        self.times, self.config, self.most, self.now = fleet.times, fleet.config, fleet.most, now
        self.is_idle, self.reported = True, 0.0
        self.running: dict[int, Request] = {}
        self.waiting: deque[Request] = deque()
        self._decoding: list[tuple[int, int, Request]] = []  # a heap: last step, number, request
        self._longest: list[tuple[int, int]] = []  # a heap: joined - prompt, last step; some have ended
        self._contexts = 0  # of all rows, before the first decode step: the sum of prompt - joined
        self._n_decodes = self._n_running = 0
        self._given: list[float] = []  # when the tokens of each decode step were delivered
        self._free = now  # when the device has done all launched steps
        self._in_flight: deque[Step] = deque()

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self._n_running)

    def give(self, request: Request) -> None:
        """Queue the request for prefill."""
        self.waiting.append(request)

    def resume(self, request: Request) -> None:
        """Admit a prefilled request of at least two tokens, its first token given; queue it if full."""
        if self._n_running == self.most:
            return self.give(request)
        request.token_times, request.cached = [self.now], request.prompt
        self._n_running += 1
        self._join(request)

    def progress(self, request: Request) -> int:
        """Return how many tokens the running request has been given."""
        return len(request.token_times) and 1 + max(0, len(self._given) - request.joined)

    def round(self) -> list[Request]:
        """Launch a decode and a prefill, deliver the ended steps at ``now``; return the finished requests."""
        has_decoded = self._decode()
        ended = self._collect(self.times.run_ahead)
        has_prefilled = self._prefill()
        ended += self._collect(self.times.run_ahead if has_decoded or has_prefilled else 0)
        for step in ended:
            self._deliver(step)
        self.now += self.times.host(sum(step.n_tokens for step in ended))
        return [one for step in ended for one in step.finishes]

    def _deliver(self, step: Step) -> None:
        if step.prefilled is None:
            self._given.append(self.now)
            for one in step.finishes:
                one.token_times += self._given[one.joined : one.joined + one.new - 1]
        else:
            for one in step.prefilled:
                one.token_times.append(self.now)

    def _join(self, request: Request) -> None:
        """Give the request a row of the next ``new - 1`` decode steps."""
        request.joined = self._n_decodes
        last = self._n_decodes + request.new - 2
        heappush(self._decoding, (last, request.number, request))
        heappush(self._longest, (request.joined - request.prompt, last))
        self._contexts += request.prompt - request.joined

    def _decode(self) -> bool:
        rows, step = len(self._decoding), self._n_decodes
        if not rows:
            return False
        while self._longest[0][1] < step:
            heappop(self._longest)
        cached, longest = self._contexts + rows * step, step - self._longest[0][0]
        finishes = []
        while self._decoding and self._decoding[0][0] == step:
            *_, one = heappop(self._decoding)
            self._contexts -= one.prompt - one.joined
            finishes.append(one)
        self._n_decodes += 1
        self._launch(self.times.decode(rows, cached, longest), rows, finishes)
        return True

    def _prefill(self) -> bool:
        """Prefill within the budget, the rest of a chunked prompt first."""
        left = whole_budget = self.config.prefill_token_budget
        if self._n_running:
            left = min(whole_budget, self.config.prefill_chunk or whole_budget)
        room = min(self.most - self._n_running, self.config.prefill_max_batch_size)
        whole: list[Request] = []
        prompts = tokens = earlier = 0
        while self.waiting and left and len(whole) < room:
            first = self.waiting[0]
            count = min(left, first.prompt - first.cached)
            prompts, tokens, earlier = prompts + 1, tokens + count, earlier + count * first.cached
            first.cached, left = first.cached + count, left - count
            if first.cached == first.prompt:
                whole.append(self.waiting.popleft())
        if prompts:
            finishes = [one for one in whole if one.new == 1]
            self._launch(self.times.prefill(prompts, tokens, earlier), len(whole), finishes, whole)
            self._n_running += len(whole)
            for one in whole:
                if one.new > 1:
                    self._join(one)
        return prompts > 0

    def _launch(
        self, seconds: float, n_tokens: int, finishes: list[Request], prefilled: list[Request] | None = None
    ) -> None:
        self._free = max(self._free, self.now) + seconds
        self._in_flight.append(Step(self._free, n_tokens, finishes, prefilled))

    def _collect(self, leave: int) -> list[Step]:
        """Wait until at most ``leave`` steps are in flight; return the ended ones, and free their slots."""
        ended, in_flight = [], self._in_flight
        while in_flight and (len(in_flight) > leave or in_flight[0].ends <= self.now):
            step = in_flight.popleft()
            self.now = max(self.now, step.ends)
            self._n_running -= len(step.finishes)
            ended.append(step)
        return ended
