"""Runner of an ``LLM`` with one engine in this process."""

from __future__ import annotations

from collections.abc import Sequence

from rosellm.roseinfer.cache.limits import Limits
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.run_all import Progress
from rosellm.roseinfer.serving.scheduler import OfflineScheduler


class OneEngine:
    """Runs calls of ``LLM.generate`` on ``engine``, which each call owns while it runs."""

    def __init__(self, engine: Engine, config: SchedulerConfig) -> None:
        self.engine, self._config = engine, config

    @property
    def limits(self) -> Limits:
        return self.engine.limits

    @property
    def rung(self) -> str | None:
        return self.engine.rung

    def encode_many(self, prompts: Sequence[str | list[int]], special: bool = True) -> list[list[int]]:
        """See ``Engine.encode_many``."""
        return self.engine.encode_many(prompts, special)

    def run(
        self, prompts: list[list[int]], params: list[SamplingParams], progress: Progress | None = None
    ) -> list[RequestOutput]:
        """See ``OfflineScheduler.run``. Raises ``BusyError`` while another scheduler owns the engine."""
        scheduler = OfflineScheduler(self.engine, self._config)
        self.engine.own(scheduler, "LLM.generate")
        try:
            return scheduler.run(prompts, params, progress)
        finally:
            self.engine.disown(scheduler)
