"""The scheduler of replicas: requests may be added at any time, and survive replicas that die."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

from rosellm.cluster.known_prefixes import marks
from rosellm.cluster.replica import Facts, Gain, Order, Report
from rosellm.cluster.router import Routed
from rosellm.cluster.seats import Death, Seat
from rosellm.errors import RoseError, describe
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.prompts import check_prompts, each_made

if TYPE_CHECKING:
    from rosellm.cluster.replicas import Replicas


class ReplicaScheduler:
    """The interface of ``OnlineScheduler`` over replicas; their only user while it has requests.

    A replica that dies is replaced, and its requests continue elsewhere from the tokens known here: no token
    is delivered twice, and delivered ones stay. One that dies more than ``seats.MOST_DEATHS`` times stays
    dead until another scheduler begins. An engine that raises is replaced too, and :meth:`step` raises its
    error.

    slice_s: how long a replica runs per call before it reports and receives new and cancelled requests; two
    such calls are kept in flight. patience_s: the longest :meth:`step`. ``n_tokens``, ``n_spared``: see
    ``OfflineScheduler``. Not thread-safe.
    """

    n_tokens = n_spared = 0

    def __init__(self, fleet: Replicas, config: SchedulerConfig, slice_s: float, patience_s: float) -> None:
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
        """See ``OnlineScheduler.add_requests``."""
        check_prompts(prompts)
        return [self.submit(sequence) for sequence in each_made(self._fleet.make_sequence, prompts, params)]

    def submit(self, sequence: Sequence) -> int:
        """Queue a sequence made by ``Replicas.make_sequence``, and update it from now on."""
        if not self._has_begun:
            self._has_begun = True
            self._router.clear()
            self._seats.begin(self._config)
        sequence.metrics.arrival = perf_counter()
        self.requests[sequence.request_id] = sequence
        size = self._fleet.mark_size
        known = marks(sequence.tokens, size) if size else ()
        n_new = sequence.params.max_tokens
        self._router.submit(Routed(sequence.request_id, sequence.n_prompt, n_new, known))
        return sequence.request_id

    def step(self) -> list[Sequence]:
        """Send requests and process one replica's answer; return the sequences that got tokens or ended.

        The list is empty if no replica answers within ``patience_s``. Raises ``ClusterError`` if all replicas
        have died and none comes back, or the error that a replica's engine raised.
        """
        if not self.requests:
            return []
        self._send()
        answered = self._seats.next_answer(self._patience_s)
        return [] if answered is None else self._take(*answered)

    def cancel(self, request_id: int) -> bool:
        """See ``OnlineScheduler.cancel``."""
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
        """Cancel all requests; the replicas are informed when more are added."""
        self._has_begun = False
        self._router.clear()
        for sequence in list(self.requests.values()):
            sequence.cancel()
            self._store_result(sequence)

    def take_result(self, request_id: int) -> RequestOutput:
        """Return the result of a finished request, and forget it; raises ``RoseError`` if there is none."""
        if request_id in self.requests:
            raise RoseError(f"request {request_id} has not ended yet")
        if request_id not in self.finished:
            _raise_unknown(request_id)
        return self.finished.pop(request_id)

    def _send(self) -> None:
        """Send the requests that the router assigns, and keep every replica with requests busy."""
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
            del death  # breaks the cycle of traceback and frame, which would keep actors alive
        return []

    def _store_result(self, sequence: Sequence) -> None:
        del self.requests[sequence.request_id]
        self.finished[sequence.request_id] = RequestOutput.of(sequence, self._fleet.tokenizer)
        self.n_spared += sequence.max_length - len(sequence.tokens)


def _order(sequence: Sequence) -> Order:
    """Return the request's current state, with its seed, so that any replica draws the same tokens."""
    params = sequence.params if sequence.params.is_greedy else replace(sequence.params, seed=sequence.seed)
    return Order(sequence.request_id, sequence.prompt, params, sequence.output, sequence.logprobs)


def _raise_unknown(request_id: int) -> None:
    raise RoseError(f"request {describe(request_id)} is unknown: it was never added, or its result was taken")
