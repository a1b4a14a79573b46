"""Run requests that are all known upfront to completion, on one engine or on replicas."""

from __future__ import annotations

from typing import Any, Protocol

from rosellm.frozen_heap import frozen_heap
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.request import Sequence
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.held_interrupt import held_interrupt


class Progress(Protocol):
    """The part of tqdm's interface that is used."""

    total: Any

    def update(self, n: int) -> object: ...


class RunsAll(Protocol):
    """A scheduler that ``run_all`` can drive.

    ``n_tokens``: tokens generated so far; ``n_spared``: see ``OfflineScheduler``.
    """

    n_tokens: int
    n_spared: int
    finished: dict[int, RequestOutput]

    @property
    def has_unfinished(self) -> bool: ...
    def add_requests(
        self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
    ) -> list[int]: ...
    def step(self) -> list[Sequence]: ...
    def cancel_all(self) -> None: ...
    def take_result(self, request_id: int) -> RequestOutput: ...


def run_all(
    scheduler: RunsAll,
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams],
    progress: Progress | None = None,
) -> list[RequestOutput]:
    """See ``OfflineScheduler.run``."""
    with frozen_heap(), held_interrupt() as let_interrupt_through:
        ids = scheduler.add_requests(prompts, params)
        try:
            while scheduler.has_unfinished:
                n_tokens, n_spared = scheduler.n_tokens, scheduler.n_spared
                scheduler.step()
                let_interrupt_through()
                if progress is not None:
                    progress.total -= scheduler.n_spared - n_spared
                    progress.update(scheduler.n_tokens - n_tokens)
        except BaseException:
            scheduler.cancel_all()
            for request_id in ids:
                scheduler.finished.pop(request_id, None)
            raise
        return [scheduler.take_result(request_id) for request_id in ids]
