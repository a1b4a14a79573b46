"""Several engines used as one: replicas as Ray actors with one or more GPUs each."""

from __future__ import annotations

import weakref
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack
from typing import Any, NoReturn

from rosellm.cluster.replica import SLICE_S, STREAMING_SLICE_S, Replica
from rosellm.cluster.router import Router
from rosellm.cluster.runtime import Runtime
from rosellm.cluster.scheduler import ReplicaScheduler
from rosellm.cluster.seats import Seats
from rosellm.errors import OptionError, RoseError, describe
from rosellm.models.loading import load_tokenizer_of, resolve_device
from rosellm.roseinfer.cache.limits import Limits
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.owned import Owned
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig, batch_size_of
from rosellm.roseinfer.serving.scheduler import Progress, run_all
from rosellm.roseinfer.tensor_parallel import check_cut
from rosellm.roseinfer.text import IncrementalText

INTERRUPTED_WITHIN_S = 0.25
MOST_REPLICAS = 1024
BATCHES_AHEAD = 4


class Replicas(Owned):
    """``n`` engines, each in a Ray actor with ``n_ranks`` GPUs of one host, or that many CPU cores.

    Scheduled by :class:`ReplicaScheduler`: a replica that dies is replaced and its requests continue
    elsewhere, with the same tokens if the numerics allow it (fp32, or ``deterministic``). The actors end with
    this object. Not thread-safe.

    address: see ``Runtime``. config: limits of each replica's scheduler. options: of each replica, for
    ``tensor_parallel.load_engine``. Raises ``OptionError``, ``ClusterError``, ``DeviceError``, and what
    ``load_engine`` does.
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
        self.tokenizer = load_tokenizer_of(model, options["load_format"])
        check_cut(n_ranks, model, options["load_format"])
        self._config = config
        ending = ExitStack()
        self._end = weakref.finalize(self, ending.close)
        self._end.atexit = False  # at exit Ray cleans up itself, possibly before this would run
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
        """Load the replicas, and route to all of them; mark_size: tokens per cacheable block, or 0."""
        self._facts = self.seats.load_all()
        limits, self._n_requests = self._facts.limits, 0
        self.mark_size = limits.block_size if prefix_cache else 0
        self.router = Router(BATCHES_AHEAD * self._facts.max_batch_size, limits.num_kv_blocks)
        for index in range(len(self.seats)):
            self.router.add(index)

    @property
    def engine(self) -> NoReturn:
        raise RoseError(
            f"an LLM of {len(self.seats)} replicas has no engine in this process; "
            "make one without data_parallel_size and ray_address"
        )

    @property
    def limits(self) -> Limits:
        return self._facts.limits

    @property
    def rung(self) -> str | None:
        return self._facts.rung

    def encode_many(self, prompts: SequenceOf[str | list[int]], special: bool = True) -> list[list[int]]:
        """See ``Engine.encode_many``."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(self.tokenizer.encode_many(texts, special))
        return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]

    def make_sequence(self, prompt: list[int], params: SamplingParams) -> Sequence:
        """See ``Engine.make_sequence``; the sequence tracks, in this process, a replica's request."""
        self.limits.check(prompt, params)
        self._n_requests += 1
        sequence = Sequence(self._n_requests, prompt, params, self._facts.eos_token_ids)
        sequence.num_cached_tokens = sequence.n_prompt
        if params.stops:
            sequence.text = IncrementalText(self.tokenizer, params.stops)
        return sequence

    def scheduler(self, config: SchedulerConfig) -> ReplicaScheduler:
        """Return a scheduler for requests that arrive over time.

        Raises ``ClusterError`` if Ray has been shut down, and the errors that ``OnlineScheduler`` raises.
        """
        self._runtime.check_running()
        batch_size_of(config, self._facts.max_batch_size)
        return ReplicaScheduler(self, config, STREAMING_SLICE_S, STREAMING_SLICE_S)

    def run(
        self, prompts: list[list[int]], params: list[SamplingParams], progress: Progress | None = None
    ) -> list[RequestOutput]:
        """See :func:`run_all`. Raises ``ClusterError`` if all replicas have died and none comes back."""
        self._runtime.check_running()
        scheduler = ReplicaScheduler(self, self._config, SLICE_S, INTERRUPTED_WITHIN_S)
        self.own(scheduler, "LLM.generate")
        try:
            return run_all(scheduler, prompts, params, progress)
        finally:
            self.disown(scheduler)


def check_replicas(n: int) -> None:
    """Raise ``OptionError`` unless ``n`` is a valid number of replicas."""
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MOST_REPLICAS:
        raise OptionError(
            f"data_parallel_size is {describe(n)}; it must be a whole number from 1 to {MOST_REPLICAS}"
        )
