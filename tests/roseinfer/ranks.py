"""What the tests of several ranks share: engines of theirs, and which processes they are."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from rosellm.lab.running.interruption import is_running
from rosellm.models.arch import Arch
from rosellm.models.weights import save_model
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.outputs import RequestOutput
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.scheduler import OfflineScheduler
from rosellm.roseinfer.tensor_parallel import load_engine
from rosellm.rosetrainer.bpe import train_tokenizer
from tests.helpers import random_model

WITHIN_S, LOADED_WITHIN_S = 60.0, 120.0  # on a busy machine; a few seconds on an idle one


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


@contextmanager
def program(*arguments: str, **options: Any) -> Iterator[subprocess.Popen]:
    """A Python of its own session, which is killed at the end with all that it has started."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def spawned_by(process: subprocess.Popen, n_processes: int) -> list[int]:
    """Process ids of the ranks that a program has started, as soon as there are that many."""

    def pids() -> list[int]:
        all_there_are = [one.info for one in psutil.process_iter(["pid", "ppid", "cmdline"])]
        children = [one for one in all_there_are if one["ppid"] == process.pid]
        return [child["pid"] for child in children if "spawn_main" in " ".join(child["cmdline"] or [])]

    seconds_until(lambda: len(pids()) == n_processes, LOADED_WITHIN_S)
    return pids()


def have_ended(pids: list[int]) -> bool:
    return not any(map(is_running, pids))


def seconds_until(condition: Callable[[], object], at_most: float = WITHIN_S) -> float:
    """Fails if that takes longer."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < at_most
        time.sleep(0.05)
    return time.monotonic() - start
