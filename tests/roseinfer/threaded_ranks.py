"""Two ranks in one process, a thread each: what a test replaces, it replaces for both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from threading import Thread
from typing import Any

import torch

from rosellm.models.loading import load_parts
from rosellm.models.part import Part
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.ranks.collectives import Collectives, connect, listen
from rosellm.roseinfer.ranks.members import Follower, Leader
from rosellm.roseinfer.ranks.watch import Watch
from tests.helpers import CPU


@contextmanager
def threaded_ranks(model: str, **options: Any) -> Iterator[tuple[Engine, list[Engine]]]:
    """Rank 0's engine and, once that has run something, the other's, whose thread ends at the end."""
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
    parts = load_parts(model, "cpu", part=leader.part)
    try:
        yield Engine(*parts, **options, group=leader), others
    finally:
        leader.close()
        thread.join(10)
    assert not errors and not thread.is_alive()
