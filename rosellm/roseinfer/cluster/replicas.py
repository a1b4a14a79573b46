"""Several engines as one: replicas as Ray actors, a GPU each, behind the interface of ``OneEngine``."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NoReturn

from rosellm.errors import ClusterError, OptionError, RoseError, told
from rosellm.models.loading import load_tokenizer_of, resolve_device
from rosellm.roseinfer.cluster.answers import Answers
from rosellm.roseinfer.cluster.known_prefixes import marks
from rosellm.roseinfer.cluster.replica import Facts, Order, Replica, Report
from rosellm.roseinfer.cluster.router import Routed, Router
from rosellm.roseinfer.cluster.runtime import Runtime
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.held_interrupt import held_interrupt
from rosellm.roseinfer.serving.scheduler import Progress

LOADS_WITHIN_S = 600.0
INTERRUPTED_WITHIN_S = 0.25
MOST_REPLICAS = 1024
MOST_DEATHS = 3
CALLS_AHEAD = 2  # one runs, the next waits in the replica's process: it is never idle
BATCHES_AHEAD = 4


@dataclass(eq=False, slots=True)
class Seat:
    """A replica's place: its actor, None once it stays dead, and the calls that it has not answered yet.

    The first call of an actor loads it; ``facts`` are its answer, None until then. orders: requests assigned
    to it and not sent yet. deaths: during the current run.
    """

    index: int
    actor: Any = None
    calls: deque[Any] = field(default_factory=deque)
    facts: Facts | None = None
    orders: list[Order] = field(default_factory=list)
    deaths: int = 0


class Replicas:
    """``n`` engines, each in a Ray actor with a GPU, or on a CPU with one core and one thread.

    A replica that dies is replaced: its unfinished requests run again elsewhere, to the same tokens if the
    numerics allow (in fp32, or ``deterministic``), and each is answered once. The new one takes requests as
    soon as it has loaded. One that dies more than ``MOST_DEATHS`` times during a run stays dead until the
    next one. The actors end with this object. Not thread-safe.

    address: of a Ray cluster, as for ``Runtime``. config, options: of each replica's scheduler, and of
    ``Engine.load``. Raises ``OptionError``, ``ClusterError``, ``DeviceError``, and what ``Engine.load`` does.
    """

    def __init__(
        self, model: str, n: int, address: str | None, config: SchedulerConfig, options: dict[str, Any]
    ) -> None:
        _check_count(n)
        if options["device"] not in ("auto", "cuda"):
            resolve_device(options["device"])
        self._tokenizer = load_tokenizer_of(model, options["load_format"])
        self._runtime = Runtime(address, n)
        self._ray = self._runtime.ray
        self._seats = [Seat(index) for index in range(n)]
        self._n_requests = 0
        self._end = weakref.finalize(self, _end, self._runtime, self._seats)
        self._end.atexit = False  # Ray ends what it runs for this process, perhaps earlier
        try:
            self._actor = self._describe(model, config, options)
            self._facts = self._load_all()
        except BaseException:
            self._end()
            raise
        self._caches = options["prefix_cache"]
        self._router = Router(BATCHES_AHEAD * self._facts.max_batch_size, self._facts.kv_blocks)
        for seat in self._seats:
            self._router.add(seat.index)

    @property
    def engine(self) -> NoReturn:
        raise RoseError(
            f"an LLM of {len(self._seats)} replicas has no engine in this process; "
            "make one without data_parallel_size and ray_address"
        )

    @property
    def rung(self) -> str | None:
        return self._facts.rung

    def encode_many(self, prompts: Sequence[str | list[int]], special: bool = True) -> list[list[int]]:
        """As ``Engine.encode_many``."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(self._tokenizer.encode_many(texts, special))
        return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]

    def run(
        self, prompts: list[list[int]], params: list[SamplingParams], progress: Progress | None = None
    ) -> list[RequestOutput]:
        """Results in the order of ``prompts``; as ``OfflineScheduler.run``.

        Raises ``ClusterError`` once all replicas stay dead. If anything raises, all requests are cancelled.
        """
        self._runtime.check_running()
        self._revive()
        self._check(prompts, params)
        answers = Answers(prompts, params, progress, self._n_requests)
        self._n_requests += len(prompts)
        try:
            self._submit(answers)
            while self._router.has_unfinished:
                self._give(answers)
                self._hear(answers)
        except BaseException:
            self._abort()
            raise
        return answers.results()

    def _describe(self, model: str, config: SchedulerConfig, options: dict[str, Any]) -> Any:
        """What makes one actor; the cluster has what all of them need."""
        device = options["device"]
        if device == "auto":
            device = "cuda" if self._runtime.has_gpu() else "cpu"
        on_gpu = device == "cuda"
        self._runtime.check_free("GPU" if on_gpu else "CPU", len(self._seats))
        remote = self._ray.remote(num_cpus=int(not on_gpu), num_gpus=int(on_gpu), max_restarts=0)(Replica)
        return lambda: remote.remote(model, config, options | {"device": device})

    def _load_all(self) -> Facts:
        for seat in self._seats:
            self._start(seat)
        try:
            found = self._ray.get([seat.calls.popleft() for seat in self._seats], timeout=LOADS_WITHIN_S)
        except self._ray.exceptions.RayTaskError as error:
            raise _raised(error) from None
        except self._ray.exceptions.GetTimeoutError:
            raise ClusterError(f"the replicas have not loaded within {LOADS_WITHIN_S:g} s") from None
        except self._ray.exceptions.RayActorError as error:
            raise ClusterError(f"a replica died as it was loaded: {_line(error)}") from error
        for seat, facts in zip(self._seats, found, strict=True):
            seat.facts = facts
        return found[0]

    def _start(self, seat: Seat) -> None:
        seat.actor = self._actor()
        seat.calls.append(seat.actor.load.remote())

    def _revive(self) -> None:
        for seat in self._seats:
            seat.deaths = 0
            if seat.actor is None:
                self._start(seat)

    def _check(self, prompts: list[list[int]], params: list[SamplingParams]) -> None:
        """Raises what an engine would for these requests."""
        refusal = self._refusal(prompts, params)
        try:
            if refusal is not None:
                raise refusal
        finally:
            del refusal  # or the error's traceback and this frame keep each other, the LLM and its actors

    def _refusal(self, prompts: list[list[int]], params: list[SamplingParams]) -> RoseError | None:
        while True:
            while not self._router.live:
                self._hear(None)
            seat = self._seats[self._router.live[0]]
            try:
                return self._ray.get(seat.actor.refusal.remote(prompts, params))
            except self._ray.exceptions.RayActorError as error:
                self._lose(seat, error)

    def _submit(self, answers: Answers) -> None:
        for order in answers.orders.values():
            known = marks(order.prompt, self._facts.block_size) if self._caches else ()
            routed = Routed(order.request_id, len(order.prompt), order.params.max_tokens, known)
            self._router.submit(routed)

    def _give(self, answers: Answers) -> None:
        """Send what the router assigns, and keep every replica with requests called."""
        for index, request_id in self._router.assign():
            self._seats[index].orders.append(answers.orders[request_id])
        for index in self._router.live:
            seat = self._seats[index]
            while len(seat.calls) < CALLS_AHEAD and (seat.orders or self._router.running(index)):
                seat.calls.append(seat.actor.advance.remote(seat.orders))
                seat.orders = []

    def _hear(self, answers: Answers | None) -> None:
        """Wait for an answer, and take it; answers of one replica are taken in the order of the calls."""
        first = {seat.calls[0]: seat for seat in self._seats if seat.calls}
        for call in self._wait(list(first)):
            seat = first[call]
            try:
                answer = self._ray.get(call)
            except self._ray.exceptions.RayTaskError as error:  # its engine may be broken: it is replaced
                was_loading = seat.facts is None
                self._lose(seat, error.cause)
                if not was_loading:
                    raise _raised(error) from None
            except self._ray.exceptions.RayError as error:  # its process, its node, or its answer is gone
                self._lose(seat, error)
            else:
                seat.calls.popleft()
                self._take(seat, answer, answers)

    def _wait(self, calls: list[Any]) -> list[Any]:
        """The first of these calls to be answered."""
        until = monotonic() + LOADS_WITHIN_S
        with held_interrupt() as let_interrupt_through:
            while True:
                done, _ = self._ray.wait(calls, timeout=INTERRUPTED_WITHIN_S)
                let_interrupt_through()
                if done:
                    return done
                if not self._router.live and monotonic() > until:
                    raise ClusterError(
                        f"all replicas have died, and none is back within {LOADS_WITHIN_S:g} s"
                    )

    def _take(self, seat: Seat, answer: Facts | Report, answers: Answers | None) -> None:
        if isinstance(answer, Facts):
            seat.facts = answer
            self._router.add(seat.index)
        elif answers is not None:
            for request_id, n_tokens in answer.generated.items():
                self._router.note(request_id, n_tokens)
            for request_id in answer.results:
                self._router.finish(request_id)
            answers.take(answer)

    def _lose(self, seat: Seat, error: BaseException) -> None:
        """A replica has died, or will now: replace it, unless it has died too often."""
        self._ray.kill(seat.actor)
        if seat.facts is not None:
            self._router.lose(seat.index)
        seat.actor = seat.facts = None
        seat.calls.clear()
        seat.orders = []
        seat.deaths += 1
        if seat.deaths <= MOST_DEATHS:
            self._start(seat)
        elif all(one.actor is None for one in self._seats):
            raise ClusterError(
                f"all {len(self._seats)} replicas have died {MOST_DEATHS + 1} times in this call; "
                f"the last one: {_line(error)}"
            )

    def _abort(self) -> None:
        """Forget all requests, here and in the replicas; calls that were made before are not waited for."""
        self._router.clear()
        for index in self._router.live:
            seat = self._seats[index]
            seat.calls.clear()
            seat.orders = []
            seat.actor.abort.remote()


def _end(runtime: Runtime, seats: list[Seat]) -> None:
    """End the actors, and Ray with the last that uses it; it may be shut down already."""
    if runtime.ray.is_initialized():
        for seat in seats:
            if seat.actor is not None:
                runtime.ray.kill(seat.actor)
    runtime.leave()


def _raised(error: Any) -> BaseException:
    """What a replica raised; where, it says itself, unless a user can cause it."""
    if not isinstance(error.cause, RoseError):
        error.cause.add_note(str(error))
    return error.cause


def _line(error: BaseException) -> str:
    return told(error).partition("\n")[0] + " (see Ray's logs)"


def _check_count(n: int) -> None:
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MOST_REPLICAS:
        raise OptionError(
            f"data_parallel_size is {told(n)}; it must be a whole number from 1 to {MOST_REPLICAS}"
        )
