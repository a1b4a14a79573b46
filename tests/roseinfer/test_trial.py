"""The trial that measures an engine's working memory: what it counts, and that it touches nothing."""

from __future__ import annotations

import weakref

import pytest
import torch

from rosellm.roseinfer import engine as engine_module
from rosellm.roseinfer.cache.device_state import ROUNDS
from rosellm.roseinfer.recipe import BEST_RUNG
from rosellm.roseinfer.steps.logprob_ring import SIZES
from rosellm.roseinfer.trial import DRIVER_BYTES, working_bytes
from tests.fake_memory import FakeMemory, GiB, MiB
from tests.helpers import random_model, small_engine
from tests.roseinfer.steps.fake_graphs import captured

__all__ = ["captured"]


class HungryStep:
    """Takes 5 GiB for a prefill, 1 GiB for its graphs and 3 MiB outside of torch for each; has 40."""

    def __init__(self, memory: FakeMemory, n_largest: int) -> None:
        self.memory, self.n_largest, self.captured = memory, n_largest, 0
        step = weakref.ref(self)  # a pool is held as long as its graphs
        memory.held = lambda: GiB * bool(step() is not None and step().captured)

    def rehearsals(self, n_tokens: int):
        return [lambda: self.memory.reserve(5 * GiB * n_tokens // 16384)]

    def largest_captures(self):
        return [self._capture] * self.n_largest

    def captures(self):
        return [self._capture] * (40 - self.captured) if self.n_largest else []

    def _capture(self) -> None:
        self.memory.driver = max(self.memory.driver, 700 * MiB)  # kernels, which stay loaded
        if not self.captured:
            self.memory.reserve(GiB)
        self.captured += 1
        self.memory.driver += 3 * MiB
        weakref.finalize(self, release, self.memory)


def release(memory: FakeMemory) -> None:
    memory.driver -= 3 * MiB


@pytest.mark.parametrize(
    ("n_tokens", "n_largest", "n_bytes"),
    [(16384, 4, 6 * GiB + (4 * 3 * MiB + DRIVER_BYTES) * 10), (8192, 0, 5 * GiB // 2)],
)
def test_prefill_pool_and_every_graph_count_but_not_the_kernels_that_stay_loaded(
    n_tokens, n_largest, n_bytes
):
    memory = FakeMemory()
    assert working_bytes(lambda: HungryStep(memory, n_largest), n_tokens, memory) == n_bytes
    assert memory.driver == 700 * MiB * (n_largest > 0)


@pytest.mark.parametrize("rung", ["packed_prefill", BEST_RUNG])
def test_rehearsals_and_captures_write_no_block_and_no_row_but_the_spare_one(captured, rung):
    engine = small_engine(random_model(0), recipe=rung, warm_up=False)
    cache, step = engine.blocks, engine.step
    for tensor in (cache.k_cache, cache.v_cache):
        tensor.fill_(float("nan"))
    rows, ring = step.worker.state.rows.clone(), step.worker.state.ring.clone()
    step.worker.counts.fill_(-5)
    step.worker.logprobs._words.fill_(-5)
    runs = step.rehearsals(300) + step.largest_captures() + step.captures()
    with torch.inference_mode():
        for run in runs:
            run()
    assert cache.k_cache.isnan().all() and cache.v_cache.isnan().all()
    assert torch.equal(step.worker.state.rows, rows)
    own = slice(0, step.worker.n_rows)
    assert torch.equal(step.worker.state.ring[:, own], ring[:, own])
    assert (step.worker.counts == -5).all() and (step.worker.logprobs._words[:ROUNDS] == -5).all()


@pytest.mark.parametrize("rung", ["packed_prefill", BEST_RUNG])
def test_an_engine_tries_the_largest_prefill_and_decode_steps_on_one_block(captured, monkeypatch, rung):
    memory = FakeMemory()
    monkeypatch.setattr(engine_module, "GPUMemory", lambda *_: memory)
    engine = small_engine(random_model(0), recipe=rung, max_batch_size=5, warm_up=False)
    tried, build = [], engine._step_on
    monkeypatch.setattr(
        engine, "_step_on", lambda blocks: tried.append((blocks, build(blocks))) or tried[-1][1]
    )
    assert engine._working_bytes() > 0
    assert [blocks.max_blocks_per_layer for blocks, _ in tried] == [1, 1]
    for _, step in tried:
        assert max(step.worker.prompts._layer_runs) == (384, "few")  # 5 sequences of 64 tokens
        assert {bucket for bucket, _, _ in step.worker._steps} == {5}
        assert {mode for _, mode, _ in step.worker._steps} == set(step.worker.next_tokens.chooser.modes)
        assert max(step.worker.logprobs._runs) == SIZES[-1]
        assert len(step.largest_captures()) == 2  # those steps are captured: one prefill, one ring
        assert list(step.worker.logprobs._runs) == [SIZES[-1]]
