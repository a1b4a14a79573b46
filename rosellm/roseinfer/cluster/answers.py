"""The requests of one call, and what has come back of each."""

from __future__ import annotations

from dataclasses import replace
from secrets import randbits
from time import perf_counter

from rosellm.roseinfer.cluster.replica import Order, Report
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.scheduler import Progress


class Answers:
    """Collects the reports of replicas, each request's result once; a request may run again.

    prompts: token ids. Every request that draws gets its seed here: wherever it runs, and however often, its
    draws are the same. first_id: the requests are numbered from it. progress: as for
    ``OfflineScheduler.run``; tokens generated again do not count.
    """

    def __init__(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        progress: Progress | None = None,
        first_id: int = 0,
    ) -> None:
        orders = [
            Order(i, *both)
            for i, both in enumerate(zip(prompts, map(_seeded, params), strict=True), first_id)
        ]
        self.orders = {order.request_id: order for order in orders}
        self._results: dict[int, RequestOutput] = {}
        self._told = dict.fromkeys(self.orders, 0)
        self._arrival = perf_counter()
        self._progress = progress

    def take(self, report: Report) -> None:
        """Note what a replica has reported; its times are shifted to this process's clock."""
        shift = perf_counter() - report.now
        for request_id, n_tokens in report.generated.items():
            self._tell(request_id, n_tokens)
        for request_id, output in report.results.items():
            output.request_id = request_id
            times = output.metrics.token_times
            output.metrics.arrival, output.metrics.token_times = self._arrival, [t + shift for t in times]
            self._results[request_id] = output
            self._tell(request_id, len(output.token_ids))
            self._spare(self.orders[request_id].params.max_tokens - len(output.token_ids))

    def results(self) -> list[RequestOutput]:
        """In the order of the requests; all have ended."""
        return [self._results[request_id] for request_id in self.orders]

    def _tell(self, request_id: int, n_tokens: int) -> None:
        new = n_tokens - self._told[request_id]
        if new > 0:
            self._told[request_id] = n_tokens
            if self._progress is not None:
                self._progress.update(new)

    def _spare(self, n_tokens: int) -> None:
        if self._progress is not None:
            self._progress.total -= n_tokens


def _seeded(params: SamplingParams) -> SamplingParams:
    return params if params.is_greedy or params.seed is not None else replace(params, seed=randbits(63))
