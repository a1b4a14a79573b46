"""Faults to plant, so that it is seen that they are found."""

from __future__ import annotations

import pytest

from rosellm.roseinfer.cache.kv_blocks import KVBlocks
from rosellm.roseinfer.cache.prefix_cache import PrefixCache
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.serving.streaming import StreamingManager


def leak_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    free_blocks = KVBlocks.free_blocks

    def free_all_but_one(self, ids) -> None:
        free_blocks(self, ids[: max(len(ids) - 1, 1)])

    monkeypatch.setattr(KVBlocks, "free_blocks", free_all_but_one)


def share_a_block_that_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "_own_tail", lambda self, block_ids, n_tokens: n_tokens)


def keep_the_blocks_of_the_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Engine.release

    def keep(self, sequence) -> None:
        if sequence.finish_reason != "cancelled":
            release(self, sequence)

    monkeypatch.setattr(Engine, "release", keep)


def swallow_text(monkeypatch: pytest.MonkeyPatch) -> None:
    deliver = StreamingManager._deliver

    def swallow(self, stream, piece: str, now: float) -> None:
        deliver(self, stream, "" if len(stream.tokens) % 8 == 0 else piece, now)

    monkeypatch.setattr(StreamingManager, "_deliver", swallow)
