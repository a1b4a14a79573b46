"""What the tests of several ranks share: their engines, in processes or in threads, and how processes end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from pathlib import Path
from threading import Thread, Timer
from typing import Any

import psutil
import pytest
import torch

from rosellm import LLM, SamplingParams
from rosellm.errors import RankError
from rosellm.models.arch import Arch
from rosellm.models.loading import load_parts
from rosellm.models.part import Part
from rosellm.models.weights import save_model
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.ranks.collectives import Collectives, connect, listen
from rosellm.roseinfer.ranks.members import Follower, Leader
from rosellm.roseinfer.ranks.watch import Watch
from rosellm.roseinfer.serving.scheduler import OfflineScheduler
from rosellm.roseinfer.tensor_parallel import load_engine
from rosellm.rosetrainer.bpe import train_tokenizer
from tests.helpers import CPU, random_model

WITHIN_S, LOADED_WITHIN_S = 60.0, 120.0  # on a busy machine; a few seconds on an idle one
Params = SamplingParams | list[SamplingParams]


def ranks_of(model: str, n_ranks: int, **options: Any) -> Engine:
    """An engine on that many processes of the CPU, in fp32."""
    small = {"block_size": 16, "max_batch_size": 8, "max_model_len": 240}
    return load_engine(model, tensor_parallel_size=n_ranks, device="cpu", **(small | options))


@contextmanager
def threaded_ranks(model: str, **options: Any) -> Iterator[tuple[Engine, list[Engine]]]:
    """Rank 0's engine and, once it has run something, rank 1's: both in this process, a thread each.

    What a test replaces, it replaces for both.
    """
    parts = load_parts(model, "cpu", part=Part(0, 2))  # before the thread: transformers' imports may not race
    store, port = listen()
    ours, theirs = Pipe()
    errors: list[BaseException] = []
    others: list[Engine] = []

    @torch.inference_mode()
    def follow() -> None:
        try:
            follower = Follower(Part(1, 2), theirs)
            follower.collectives = Collectives(connect(port), follower.part, CPU)
            others.append(Engine(load_parts(model, "cpu", part=follower.part)[0], **options, group=follower))
            follower.follow(others[0].step.worker.call)
        except BaseException as error:
            errors.append(error)
            raise

    thread = Thread(target=follow, daemon=True)
    thread.start()
    leader = Leader(Part(0, 2), [ours], Watch([], [], [0, 0], lambda: None), ours.close)
    leader.collectives = Collectives(store, leader.part, CPU)
    try:
        yield Engine(*parts, **options, group=leader), others
    finally:
        leader.close()
        thread.join(10)
    assert not errors and not thread.is_alive()


def saved(arch: Arch, folder: Path) -> str:
    """A checkpoint of random weights."""
    save_model(random_model(1, arch), folder)
    train_tokenizer(["some text"], 258).save(folder)
    return str(folder)


def tokens_of(engine: Engine, prompts: list[list[int]], params: Params) -> list[list[int]]:
    return [output.token_ids for output in OfflineScheduler(engine).run(prompts, params)]


def logits_of(engine: Engine, prompts: list[list[int]], params: SamplingParams, n_steps: int) -> torch.Tensor:
    """Logits ``[1 + n_steps, B, V]`` of a prefill and the decode steps after it."""
    sequences = [engine.make_sequence(prompt, params) for prompt in prompts]
    engine.prefill(sequences)
    logits = [engine.step.last_logits().clone()]
    for _ in range(n_steps):
        engine.decode(sequences)
        logits.append(engine.step.last_logits().clone())
    for sequence in sequences:
        engine.release(sequence)
    return torch.stack(logits)


def assert_ends(llm: LLM, prompts: list, pid: int, how: signal.Signals, after_s: float, error: str) -> None:
    """A signal to a rank while requests run ends the engine within seconds, with that error and for good."""
    params, sent = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True), []

    def end() -> None:
        sent.append(time.monotonic())
        os.kill(pid, how)

    Timer(after_s, end).start()
    with pytest.raises(RankError, match=error):
        while True:
            llm.generate(prompts, params, use_tqdm=False)
    assert time.monotonic() - sent[0] < WITHIN_S
    with pytest.raises(RankError, match=error):
        llm.generate(prompts, params, use_tqdm=False)


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def other_ranks() -> list[int]:
    """Process ids of the ranks that this process started and that live."""
    return [child.pid for child in multiprocessing.active_children() if child.name.startswith("rank ")]


@contextmanager
def program(*arguments: str, **options: Any) -> Iterator[subprocess.Popen]:
    """A Python of its own session, which is killed at the end with all that it has started."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, *arguments], start_new_session=True, **pipes, **options)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def spawned_by(process: subprocess.Popen, n_processes: int) -> list[int]:
    """Process ids of the ranks that a program has started, as soon as there are that many."""

    def pids() -> list[int]:
        running = [one.info for one in psutil.process_iter(["pid", "ppid", "cmdline"])]
        children = [one for one in running if one["ppid"] == process.pid]
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
