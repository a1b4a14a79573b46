"""What the host costs around an engine whose device takes no time, or a given time a step.

``python -m tests.host_cost`` prints microseconds a step of 256 rows, and a token, of ``OfflineScheduler``,
``LLM.generate`` with its texts, and a streaming manager with one inbox, 256 reading threads and 256
coroutines; with ``--step-us 570`` the device takes that long a step while the host runs ahead, and tokens a
second are compared. Everything but the model's arithmetic is the product's own.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from time import perf_counter, sleep
from types import SimpleNamespace

import numpy as np
import torch

from rosellm import LLM, SamplingParams
from rosellm.models.tokenizer import load_dummy_tokenizer
from rosellm.roseinfer.cache.device_state import ROUND, ROUNDS
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.scheduler import OfflineScheduler
from rosellm.roseinfer.serving.streaming import StreamingManager
from rosellm.roseinfer.steps.worker import Worker
from tests.helpers import random_model, small_config

VOCAB, POSITIONS, DISTINCT = 50257, 1024, 2048


class Device:
    """A device that ends each step ``step_s`` after the one before it, or after it was begun."""

    def __init__(self, step_s: float) -> None:
        self.step_s, self.begun, self.end = step_s, 0, 0.0

    def clock(self) -> SimpleNamespace:
        """Stands in for ``Worker.clock``."""
        self.end = max(self.end, perf_counter()) + self.begun * self.step_s
        self.begun, end = 0, self.end

        def wait() -> None:
            while (left := end - perf_counter()) > 0:
                sleep(left)

        clock = SimpleNamespace(wait=wait, has_ended=lambda: perf_counter() >= end, end=end)
        clock.seconds_since = lambda other: end - other.end
        return clock


class InstantWorker(Worker):
    """A worker without a model: fixed tokens, which come when ``clock`` says."""

    instant: Device

    def step(self, bucket: int, mode: str, variant: str) -> Callable[[], torch.Tensor]:
        ring, rounds, rows = self.state.ring.numpy(), self.state.rows.numpy()[:, ROUND], np.arange(bucket)

        def run() -> torch.Tensor:
            ring[rounds[:bucket], rows] = (rounds[:bucket] * 523 + rows * 97) % DISTINCT
            rounds[:bucket] = (rounds[:bucket] + 1) % ROUNDS
            self.instant.begun += 1
            return self.state.rows

        return run


def instant_engine(rows: int, step_s: float = 0.0) -> Engine:
    """An engine of ``rows`` rows with GPT-2's vocabulary, on the CPU, whose steps cost only the host."""
    config = small_config(vocab_size=VOCAB, n_positions=POSITIONS, n_layers=1, n_heads=1, d_model=8)
    engine = Engine(random_model(0, config), load_dummy_tokenizer(config), max_batch_size=rows)
    worker = engine.step.worker
    worker.__class__, worker.instant = InstantWorker, Device(step_s)
    worker.clock = worker.instant.clock
    worker.prompts.layers = lambda inputs: torch.zeros(len(inputs.ids), config.d_model)
    worker.next_tokens.chooser = _FirstTokens()
    return engine


class _FirstTokens:
    def mode(self, _params: list[SamplingParams]) -> str:
        return "greedy"

    def __call__(self, hidden: torch.Tensor, state: object, mode: str) -> tuple[None, torch.Tensor]:
        return None, torch.full((len(hidden), 1), 7, dtype=torch.int32)


@dataclass
class Work:
    engine: Engine
    prompts: list
    params: SamplingParams

    def offline(self) -> None:
        OfflineScheduler(self.engine).run(self.prompts, self.params)

    def generate(self, texts: bool = True) -> None:
        llm = object.__new__(LLM)
        llm.served, llm._config, llm._lock = self.engine, SchedulerConfig(), threading.Lock()
        outputs = llm.generate(["Hello"] * len(self.prompts), self.params, use_tqdm=True)
        if texts:
            [output.outputs[0].text for output in outputs]

    def readers(self) -> None:
        with StreamingManager(self.engine) as manager:
            ids = [manager.add_request(prompt, self.params) for prompt in self.prompts]
            threads = [threading.Thread(target=self._read, args=(manager, one)) for one in ids]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    @staticmethod
    def _read(manager: StreamingManager, request_id: int) -> None:
        for _ in manager.stream_text(request_id):
            pass

    def inbox(self) -> None:
        with StreamingManager(self.engine) as manager:
            inbox: SimpleQueue = SimpleQueue()
            for prompt in self.prompts:
                manager.add_request(prompt, self.params, inbox)
            left = len(self.prompts)
            while left:
                left -= inbox.get()[1] is None

    def coroutines(self) -> None:
        with StreamingManager(self.engine) as manager:
            asyncio.run(self._gather(manager))

    async def _gather(self, manager: StreamingManager) -> None:
        await asyncio.gather(*(self._aread(manager, prompt) for prompt in self.prompts))

    async def _aread(self, manager: StreamingManager, prompt: list[int]) -> None:
        async for _ in manager.stream(prompt, self.params):
            pass


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--step-us", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="offline,generate,inbox,readers,coroutines")
    given = parser.parse_args(argv)
    engine = instant_engine(given.rows, given.step_us / 1e6)
    params = SamplingParams(temperature=0.0, max_tokens=given.new_tokens, ignore_eos=True)
    work = Work(engine, [[1]] * given.rows, params)
    names = given.only.split(",")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(1 + given.repeats):
        for name in names:
            start = perf_counter()
            getattr(work, name)()
            seconds[name] += [perf_counter() - start] if turn else []
    first = min(seconds[names[0]])
    for name in names:
        best = min(seconds[name])
        step_us = best / given.new_tokens * 1e6
        print(
            f"{name:9} {step_us:8.1f} us a step {step_us / given.rows:6.3f} us a token "
            f"{given.rows * given.new_tokens / best:12,.0f} tok/s {first / best:6.1%}"
        )


if __name__ == "__main__":
    main()
