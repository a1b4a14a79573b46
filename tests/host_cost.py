"""The cost of the host around an engine whose device takes no time, or a given time per step.

``python -m tests.host_cost`` prints microseconds per step of 256 rows, and tokens per second, of
``OfflineScheduler``, ``LLM.generate`` with its texts, and a streaming manager with one inbox and with 256
coroutines. With ``--step-us 570`` the device takes that long per step while the host runs ahead. Only the
arithmetic of the model is replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import Callable
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


def offline(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> None:
    OfflineScheduler(engine).run(prompts, params)


def generate(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> None:
    llm = object.__new__(LLM)
    llm.served, llm._config, llm._lock = engine, SchedulerConfig(), threading.Lock()
    for output in llm.generate(["Hello"] * len(prompts), params, use_tqdm=True):
        assert output.outputs[0].text


def inbox(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> None:
    pieces: SimpleQueue = SimpleQueue()
    with StreamingManager(engine) as manager:
        for prompt in prompts:
            manager.add_request(prompt, params, pieces)
        left = len(prompts)
        while left:
            left -= pieces.get()[1] is None


def coroutines(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> None:
    async def read(prompt: list[int]) -> None:
        async for _ in manager.stream(prompt, params):
            pass

    async def read_all() -> None:
        await asyncio.gather(*map(read, prompts))

    with StreamingManager(engine) as manager:
        asyncio.run(read_all())


WAYS = {way.__name__: way for way in (offline, generate, inbox, coroutines)}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--step-us", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args(argv)
    engine = instant_engine(given.rows, given.step_us / 1e6)
    params = SamplingParams(temperature=0.0, max_tokens=given.new_tokens, ignore_eos=True)
    best = dict.fromkeys(WAYS, float("inf"))
    for turn in range(1 + given.repeats):
        for name, way in WAYS.items():
            start = perf_counter()
            way(engine, [[1]] * given.rows, params)
            best[name] = min(best[name], perf_counter() - start) if turn else best[name]
    for name, seconds in best.items():
        rate = given.rows * given.new_tokens / seconds
        print(f"{name:10} {seconds / given.new_tokens * 1e6:8.1f} us per step {rate:12,.0f} tok/s")


if __name__ == "__main__":
    main()
