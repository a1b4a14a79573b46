"""What the tests of several ranks share: engines of theirs, and which processes they are."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from rosellm.models.arch import Arch
from rosellm.models.tokenizer import train_tokenizer
from rosellm.models.weights import save_model
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.scheduler import OfflineScheduler
from rosellm.roseinfer.tensor_parallel import load_engine
from tests.helpers import random_model

WITHIN_S = 10.0


def ranks_of(model: str, n_ranks: int, **options: Any) -> Engine:
    """An engine on so many processes of the CPU, in fp32."""
    small = {"block_size": 16, "max_batch_size": 8, "max_model_len": 240}
    return load_engine(model, tensor_parallel_size=n_ranks, device="cpu", **(small | options))


def saved(arch: Arch, folder: Path) -> str:
    """A checkpoint of random weights."""
    save_model(random_model(1, arch), folder)
    train_tokenizer(["some text"], 258).save(folder)
    return str(folder)


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]):
    """The scheduler after all have run, and their outputs."""
    scheduler = OfflineScheduler(engine)
    return scheduler, scheduler.run(prompts, params)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def other_ranks() -> list[int]:
    """Process ids of the ranks that this process started and that live."""
    return [child.pid for child in multiprocessing.active_children() if child.name.startswith("rank ")]


def have_ended(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)


def seconds_until(condition: Callable[[], object], at_most: float = WITHIN_S) -> float:
    """Fails if that takes longer."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < at_most
        time.sleep(0.05)
    return time.monotonic() - start
