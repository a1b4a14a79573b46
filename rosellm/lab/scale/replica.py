"""Simulate one replica, round by round, as its scheduler works."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from rosellm.lab.records.serving_times import StepTimes
from rosellm.roseinfer.request import RequestMetrics
from rosellm.roseinfer.serving.admission import SchedulerConfig


@dataclass(eq=False, kw_only=True)
class Request(RequestMetrics):
    """A request of ``prompt`` tokens that gets ``new`` tokens, and its progress.

    Times are seconds on the simulation's clock. attempts: replicas that it was assigned to; each starts over.
    cached: prompt tokens prefilled. begun: tokens whose steps have been launched.
    """

    number: int
    prompt: int
    new: int
    attempts: int = 0
    cached: int = 0
    begun: int = 0

    def start_over(self) -> None:
        """Forget the progress on an earlier replica."""
        self.token_times, self.cached, self.begun = [], 0, 0
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
    """A launched step: when the device ends it, which requests get a token, and which of them then end."""

    ends: float
    requests: list[Request]
    finishes: list[Request]


class Replica:
    """A scheduler at its host's time ``now``, with the requests that wait for prefill and that decode.

    Each round launches a decode step, then a prefill within the budgets of ``config``. Tokens are delivered
    at the round's end, once its finished steps are collected. At most ``most`` requests run at once; KV
    blocks never run out.
    """

    def __init__(self, times: StepTimes, config: SchedulerConfig, most: int, now: float = 0.0) -> None:
        self.times, self.config, self.most, self.now = times, config, most, now
        self.waiting: deque[Request] = deque()
        self.decoding: list[Request] = []
        self._n_running = 0
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
        request.token_times, request.cached, request.begun = [self.now], request.prompt, 1
        self._n_running += 1
        self.decoding.append(request)

    def round(self) -> list[Request]:
        """Launch a decode and a prefill, deliver the ended steps at ``now``; return the finished requests."""
        has_decoded = self._decode()
        ended = self._collect(self.times.run_ahead)
        has_prefilled = self._prefill()
        ended += self._collect(self.times.run_ahead if has_decoded or has_prefilled else 0)
        given = [one for step in ended for one in step.requests]
        for one in given:
            one.token_times.append(self.now)
        self.now += self.times.host(len(given))
        return [one for step in ended for one in step.finishes]

    def _decode(self) -> bool:
        rows = self.decoding
        if rows:
            contexts = [one.prompt + one.begun - 1 for one in rows]
            self._launch(self.times.decode(len(rows), sum(contexts), max(contexts)), rows)
            self.decoding = [one for one in rows if one.begun < one.new]
        return bool(rows)

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
            self._launch(self.times.prefill(prompts, tokens, earlier), whole)
            self._n_running += len(whole)
            self.decoding += [one for one in whole if one.new > 1]
        return prompts > 0

    def _launch(self, seconds: float, requests: list[Request]) -> None:
        self._free = max(self._free, self.now) + seconds
        for one in requests:
            one.begun += 1
        finishes = [one for one in requests if one.begun == one.new]
        self._in_flight.append(Step(self._free, requests, finishes))

    def _collect(self, leave: int) -> list[Step]:
        """Wait until at most ``leave`` steps are in flight; return the ended ones, and free their slots."""
        ended, in_flight = [], self._in_flight
        while in_flight and (len(in_flight) > leave or in_flight[0].ends <= self.now):
            step = in_flight.popleft()
            self.now = max(self.now, step.ends)
            self._n_running -= len(step.finishes)
            ended.append(step)
        return ended
