"""The scheduler of replicas: requests are added at any time, whoever runs them, and whoever dies."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import Protocol

from rosellm.errors import RoseError, told
from rosellm.models.loading import AnyTokenizer
from rosellm.roseinfer.cluster.known_prefixes import marks
from rosellm.roseinfer.cluster.replica import Facts, Gain, Order, Report
from rosellm.roseinfer.cluster.router import Routed, Router
from rosellm.roseinfer.cluster.seats import Death, Seat, Seats
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.asked import check_prompts, each_made


class Fleet(Protocol):
    """What a scheduler needs of the replicas; ``mark_size``: tokens of a block that may be cached, or 0."""

    seats: Seats
    router: Router
    tokenizer: AnyTokenizer
    mark_size: int

    def check_owner(self, scheduler: object) -> None: ...
    def make_sequence(self, prompt: list[int], params: SamplingParams) -> Sequence: ...


class ReplicaScheduler:
    """The interface of ``OnlineScheduler``, over replicas; the only user of them while it has requests.

    A replica that dies is replaced, and its requests go on elsewhere from the tokens that are known here:
    none comes twice, and what was delivered stays. One that dies more than ``seats.MOST_DEATHS`` times stays
    dead until another scheduler begins. An engine that raises is replaced too, and :meth:`step` raises its
    error.

    slice_s: a replica runs for so long, then reports, and hears of new and cancelled requests; two such calls
    are on their way. patience_s: the longest :meth:`step`. ``n_tokens``, ``n_spared``: as of
    ``OfflineScheduler``. Not thread-safe.
    """

    n_tokens = n_spared = 0

    def __init__(self, fleet: Fleet, config: SchedulerConfig, slice_s: float, patience_s: float) -> None:
        fleet.check_owner(self)
        self._fleet, self._config = fleet, config
        self._seats, self._router = fleet.seats, fleet.router
        self._slice_s, self._patience_s = slice_s, patience_s
        self.finished: dict[int, RequestOutput] = {}
        self.requests: dict[int, Sequence] = {}
        self._has_begun = False

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def add_requests(
        self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
    ) -> list[int]:
        """As ``OnlineScheduler.add_requests``."""
        check_prompts(prompts)
        return [self.submit(sequence) for sequence in each_made(self._fleet.make_sequence, prompts, params)]

    def submit(self, sequence: Sequence) -> int:
        """Queue a sequence that ``Replicas.make_sequence`` made, and keep it up to date from now on."""
        if not self._has_begun:
            self._begin()
        sequence.metrics.arrival = perf_counter()
        self.requests[sequence.request_id] = sequence
        size = self._fleet.mark_size
        known = marks(sequence.tokens, size) if size else ()
        n_new = sequence.params.max_tokens
        self._router.submit(Routed(sequence.request_id, sequence.n_prompt, n_new, known))
        return sequence.request_id

    def step(self) -> list[Sequence]:
        """Send requests, and hear one replica; the sequences that got tokens, ended or failed.

        Raises ``ClusterError`` once all replicas stay dead.
        """
        if not self.requests:
            return []
        self._give()
        heard = self._seats.hear(self._patience_s)
        return [] if heard is None else self._take(*heard)

    def cancel(self, request_id: int) -> bool:
        """As ``OnlineScheduler.cancel``."""
        sequence = self.requests.get(request_id)
        if sequence is None:
            if request_id not in self.finished:
                _raise_unknown(request_id)
            return False
        replica = self._router.withdraw(request_id)
        if replica is not None:
            self._seats[replica].cancelled.append(request_id)
        sequence.cancel()
        self._store_result(sequence)
        return True

    def cancel_all(self) -> None:
        """Cancel all requests; the replicas hear of it when more are added."""
        self._has_begun = False
        self._router.clear()
        for sequence in list(self.requests.values()):
            sequence.cancel()
            self._store_result(sequence)

    def take_result(self, request_id: int) -> RequestOutput:
        """The result of a finished request, which is then forgotten."""
        if request_id in self.requests:
            raise RoseError(f"request {request_id} has not ended yet")
        if request_id not in self.finished:
            _raise_unknown(request_id)
        return self.finished.pop(request_id)

    def _begin(self) -> None:
        self._has_begun = True
        self._router.clear()
        self._seats.begin(self._config)

    def _give(self) -> None:
        """Send what the router assigns, and keep every replica with requests called."""
        for index, request_id in self._router.assign():
            self._seats[index].orders.append(_order(self.requests[request_id]))
        for index in self._router.live:
            self._seats.keep_busy(self._seats[index], bool(self._router.running(index)), self._slice_s)

    def _take(self, seat: Seat, answer: Facts | Report | Death) -> list[Sequence]:
        if isinstance(answer, Facts):
            self._router.add(seat.index)
            return []
        if isinstance(answer, Death):
            return self._lose(seat, answer)
        shift = perf_counter() - answer.now
        gains = {i: gain for i, gain in answer.gains.items() if i in self.requests}  # others were cancelled
        return [self._grow(self.requests[request_id], gain, shift) for request_id, gain in gains.items()]

    def _grow(self, sequence: Sequence, gain: Gain, shift: float) -> Sequence:
        for token in gain.tokens:
            sequence.commit(token, 1)
            sequence.follow_text()
        if sequence.logprobs is not None:
            sequence.logprobs += gain.logprobs or []
        sequence.metrics.token_times += [time + shift for time in gain.times]
        sequence.metrics.preemptions += gain.preemptions if gain.finish_reason else 0
        sequence.finish_reason, sequence.error = gain.finish_reason, gain.error
        self.n_tokens += len(gain.tokens)
        if sequence.is_finished:
            self._router.finish(sequence.request_id)
            self._store_result(sequence)
        else:
            self._router.note(sequence.request_id, sequence.n_output)
        return sequence

    def _lose(self, seat: Seat, death: Death) -> list[Sequence]:
        if seat.facts is not None:
            self._router.lose(seat.index)
        try:
            self._seats.lose(seat, death)
            if death.is_error:
                raise death.error
        finally:
            del death  # or its traceback and this frame keep each other, and the actors
        return []

    def _store_result(self, sequence: Sequence) -> None:
        del self.requests[sequence.request_id]
        self.finished[sequence.request_id] = RequestOutput.of(sequence, self._fleet.tokenizer)
        self.n_spared += sequence.max_length - len(sequence.tokens)


def _order(sequence: Sequence) -> Order:
    """The request as it stands, with the seed that it draws with wherever it runs."""
    params = sequence.params if sequence.params.is_greedy else replace(sequence.params, seed=sequence.seed)
    return Order(sequence.request_id, sequence.prompt, params, sequence.output, sequence.logprobs)


def _raise_unknown(request_id: int) -> None:
    raise RoseError(f"request {told(request_id)} is unknown: it was never added, or its result was taken")
