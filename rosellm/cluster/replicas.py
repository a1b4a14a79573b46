"""Several engines used as one: replicas as Ray actors, and the scheduler of their requests."""

from __future__ import annotations

import weakref
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack
from dataclasses import replace
from time import perf_counter
from typing import Any, NoReturn

from rosellm.cluster.known_prefixes import marks
from rosellm.cluster.replica import SLICE_S, STREAMING_SLICE_S, Facts, Gain, Order, Replica, Report
from rosellm.cluster.router import Routed, Router
from rosellm.cluster.runtime import Runtime
from rosellm.cluster.seats import Death, Seat, Seats
from rosellm.errors import OptionError, RoseError, describe
from rosellm.models.loading import load_tokenizer_of, resolve_device
from rosellm.roseinfer.cache.limits import new_sequence
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.owned import Owned
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig, batch_size_of
from rosellm.roseinfer.serving.scheduler import Progress, Scheduler, run_all
from rosellm.roseinfer.tensor_parallel import check_cut

INTERRUPTED_WITHIN_S = 0.25
MOST_REPLICAS = 1024
BATCHES_AHEAD = 4


class Replicas(Owned):
    """Engine replicas, each in a Ray actor.

    model: hub id or folder.
    n: number of replicas.
    n_ranks: number of GPUs of each replica, all on one host; without GPUs, number of CPU cores.
    address: address of the Ray cluster; None starts a local one (see ``Runtime``).
    config: limits of each replica's scheduler.
    options: arguments of ``tensor_parallel.load_engine`` for every replica.

    :class:`ReplicaScheduler` schedules the requests. A dead replica is replaced and its requests continue
    elsewhere, with the same tokens if the numerics allow it (fp32, or ``deterministic``). The actors end with
    this object. Not thread-safe. Raises ``OptionError``, ``ClusterError``, ``DeviceError``, and what
    ``load_engine`` raises.
    """

    def __init__(
        self,
        model: str,
        n: int,
        n_ranks: int,
        address: str | None,
        config: SchedulerConfig,
        options: dict[str, Any],
    ) -> None:
        super().__init__()
        check_replicas(n)
        if options["device"] not in ("auto", "cuda"):
            resolve_device(options["device"])
        self.tokenizer = load_tokenizer_of(model, options["load_format"], options.get("tokenizer"))
        check_cut(n_ranks, model, options["load_format"])
        self._config = config
        ending = ExitStack()
        self._end = weakref.finalize(self, ending.close)
        self._end.atexit = False  # at exit, Ray ends the actors itself, possibly before this would run
        try:
            self._runtime = runtime = Runtime(address, n * n_ranks)
            ending.callback(runtime.leave)
            device = options["device"] if options["device"] != "auto" else runtime.device()
            places = runtime.reserve("GPU" if device == "cuda" else "CPU", n, n_ranks)
            ending.callback(places.free)
            of_each = model, n_ranks, options | {"device": device}
            self.seats = Seats(runtime.ray, n, lambda index: places.actor(index, Replica, *of_each))
            ending.callback(self.seats.end)
            self._load(options["prefix_cache"])
        except BaseException:
            self._end()
            raise

    def _load(self, prefix_cache: bool) -> None:
        """Load the replicas and start routing to them; without ``prefix_cache``, no prompt is marked."""
        self._facts, self._n_requests = self.seats.load_all(), 0
        self.rung, self.limits = self._facts.rung, self._facts.limits
        self.mark_size = self.limits.block_size if prefix_cache else 0
        self.router = Router(BATCHES_AHEAD * self._facts.max_batch_size, self.limits.num_kv_blocks)
        for index in range(len(self.seats)):
            self.router.add(index)

    @property
    def engine(self) -> NoReturn:
        raise RoseError(
            f"an LLM of {len(self.seats)} replicas has no engine in this process; "
            "make one without data_parallel_size and ray_address"
        )

    def encode_many(self, prompts: SequenceOf[str | list[int]], special: bool = True) -> list[list[int]]:
        """Tokenize the text prompts, as ``Engine.encode_many`` does; prompts of token ids are unchanged.

        special: whether special tokens are added.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(self.tokenizer.encode_many(texts, special))
        return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]

    def make_sequence(self, prompt: list[int], params: SamplingParams) -> Sequence:
        """Return a new sequence that mirrors, in this process, a request that a replica will run.

        Raises what ``Limits.check`` raises for an invalid request.
        """
        self._n_requests += 1
        eos = self._facts.eos_token_ids
        sequence = new_sequence(self._n_requests, prompt, params, self.limits, eos, self.tokenizer)
        sequence.num_cached_tokens = sequence.n_prompt
        return sequence

    def scheduler(self, config: SchedulerConfig) -> ReplicaScheduler:
        """Return a scheduler for requests that arrive over time.

        Raises ``ClusterError`` if Ray has been shut down, and the errors that ``OnlineScheduler`` raises.
        """
        self._runtime.check_running()
        batch_size_of(config, self._facts.max_batch_size)
        return ReplicaScheduler(self, config, STREAMING_SLICE_S, STREAMING_SLICE_S)

    def run(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        progress: Progress | None = None,
        firsts: list[int] | None = None,
    ) -> list[RequestOutput]:
        """Serve the requests and return their outputs, in the order of ``prompts`` (see :func:`run_all`).

        firsts: without effect; each replica prefills the equal prompts that it is sent once.

        Raises ``ClusterError`` if all replicas have died and none comes back.
        """
        self._runtime.check_running()
        scheduler = ReplicaScheduler(self, self._config, SLICE_S, INTERRUPTED_WITHIN_S)
        self.own(scheduler, "LLM.generate")
        try:
            return run_all(scheduler, prompts, params, progress)
        finally:
            self.disown(scheduler)


class ReplicaScheduler(Scheduler):
    """A scheduler of requests over replicas.

    config: limits of each replica's scheduler.
    slice_s: seconds that a replica runs per call, before it reports its tokens and receives new and cancelled
        requests; two calls are kept in flight.
    patience_s: maximum seconds that :meth:`step` waits for an answer.

    While it has requests, no other scheduler may use the replicas. A dead replica is replaced and its
    requests continue elsewhere from the tokens known here: no token is delivered twice or revoked. A replica
    that has died more than ``seats.MOST_DEATHS`` times stays dead until another scheduler begins. If an
    engine raises an error, its replica is replaced too, and :meth:`step` raises the error. Not thread-safe.
    """

    def __init__(self, fleet: Replicas, config: SchedulerConfig, slice_s: float, patience_s: float) -> None:
        super().__init__(fleet)
        self.engine: Replicas = fleet
        self._config, self._seats, self._router = config, fleet.seats, fleet.router
        self._slice_s, self._patience_s = slice_s, patience_s
        self._has_begun = False

    def _queue(self, sequence: Sequence) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._router.clear()
            self._seats.begin(self._config)
        size = self.engine.mark_size
        known = marks(sequence.tokens, size) if size else ()
        n_new = sequence.max_length - sequence.n_prompt
        self._router.submit(Routed(sequence.request_id, sequence.n_prompt, n_new, known))

    def step(self) -> list[Sequence]:
        """Send requests and process one replica's answer; return the sequences that received tokens or ended.

        The list is empty if no replica answers within ``patience_s``. Raises ``ClusterError`` if all replicas
        have died and none comes back, or the error that a replica's engine raised.
        """
        if not self.requests:
            return []
        self._send()
        answered = self._seats.next_answer(self._patience_s)
        return [] if answered is None else self._take(*answered)

    def _withdraw(self, request: Sequence) -> None:
        replica = self._router.withdraw(request.request_id)
        if replica is not None:
            self._seats[replica].cancelled.append(request.request_id)
        self._store_result(request)

    def cancel_all(self) -> None:
        """Cancel all requests here; the replicas cancel them when the next request is submitted."""
        self._has_begun = False
        self._router.clear()
        for sequence in list(self.requests.values()):
            sequence.cancel()
            self._store_result(sequence)

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
        gains = {i: gain for i, gain in answer.gains.items() if i in self.requests}  # drop cancelled requests
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
        sequence.num_cached_prompt_tokens = gain.num_cached_tokens
        sequence.prompt_logprobs = gain.prompt_logprobs or sequence.prompt_logprobs
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


def _order(sequence: Sequence) -> Order:
    """Return the order to continue a request; it has a seed, so that every replica draws the same tokens."""
    params = sequence.params if sequence.params.is_greedy else replace(sequence.params, seed=sequence.seed)
    return Order(sequence.request_id, sequence.prompt, params, sequence.output, sequence.logprobs)


def check_replicas(n: int) -> None:
    """Raise ``OptionError`` unless ``n`` is a valid number of replicas."""
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MOST_REPLICAS:
        raise OptionError(
            f"data_parallel_size is {describe(n)}; it must be a whole number from 1 to {MOST_REPLICAS}"
        )
