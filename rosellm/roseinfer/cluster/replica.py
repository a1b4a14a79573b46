"""A replica: an engine in a process of its own, which a driver in another process calls."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

from rosellm.errors import RoseError
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.scheduler import OnlineScheduler

SLICE_S = 0.05


@dataclass(frozen=True, slots=True)
class Order:
    """A request as the driver knows it."""

    request_id: int
    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Facts:
    """What the driver needs to know of a loaded replica; ``kv_blocks``: how many there are a layer."""

    rung: str | None
    max_batch_size: int
    block_size: int
    kv_blocks: int


@dataclass(frozen=True, slots=True)
class Report:
    """Of one call: results by request id, and how many tokens the others that have begun have by now.

    now: when the report was made, in the replica's ``time.perf_counter`` seconds.
    """

    now: float
    results: dict[int, RequestOutput]
    generated: dict[int, int]


class Replica:
    """The class of the actor; its calls run one after another, in the order in which they were made.

    The engine is not loaded by the constructor, whose errors Ray would make texts of. model, options: the
    arguments of ``Engine.load``.
    """

    def __init__(self, model: str, config: SchedulerConfig, options: dict[str, Any]) -> None:
        self._model, self._config, self._options = model, config, options
        self._ids: dict[int, int] = {}  # the scheduler's id of a request → the driver's

    def load(self) -> Facts:
        """Load the engine. Raises what ``Engine.load`` does."""
        engine = Engine.load(self._model, **self._options)
        self._scheduler = OnlineScheduler(engine, self._config)
        return Facts(engine.rung, engine.max_batch_size, engine.block_size, engine.num_kv_blocks)

    def refusal(self, prompts: list[list[int]], params: list[SamplingParams]) -> RoseError | None:
        """Why not all of these requests can run; None if they can."""
        try:
            self._scheduler.make_sequences(prompts, params)
        except RoseError as error:
            return error
        return None

    def advance(self, orders: list[Order]) -> Report:
        """Begin these requests, and run all for ``SLICE_S`` seconds, or until none is left."""
        scheduler = self._scheduler
        for order in orders:
            self._ids[scheduler.add_request(order.prompt, order.params)] = order.request_id
        until = perf_counter() + SLICE_S
        while scheduler.has_unfinished and perf_counter() < until:
            scheduler.step()
        return self._report()

    def abort(self) -> None:
        """End all requests, and forget them."""
        self._scheduler.cancel_all()
        self._report()

    def _report(self) -> Report:
        scheduler, ids = self._scheduler, self._ids
        results = {ids.pop(own): scheduler.take_result(own) for own in list(scheduler.finished)}
        running = scheduler.requests.values()
        generated = {ids[one.request_id]: one.n_output for one in running if one.n_output}
        return Report(perf_counter(), results, generated)
