"""Sizes of an engine: the longest request, the blocks that there is room for, and the trial that measures."""

from __future__ import annotations

import weakref

import pytest
import torch

from rosellm.errors import OptionError, PromptError
from rosellm.roseinfer import engine as engine_module, trial
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import BEST_RUNG
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.steps.logprob_ring import SIZES
from rosellm.roseinfer.trial import DRIVER_BYTES, kv_blocks_within_memory, working_bytes
from tests.fake_memory import FakeMemory, GiB, MiB
from tests.helpers import generate, random_model, random_prompts, small_config, small_engine
from tests.roseinfer.steps.fake_graphs import captured  # noqa: F401

# How long a request may be, and what memory has room for.

BLOCK = 8


@pytest.fixture
def room_for(monkeypatch):
    """Memory for that many KV blocks of ``random_model(0)``."""

    def leave(n_blocks: int) -> None:
        block_bytes = BLOCK * random_model(0).config.kv_bytes_per_token(4)
        monkeypatch.setattr(trial, "CPU_KV_BYTES", n_blocks * block_bytes)

    return leave


@pytest.mark.parametrize("rung", ["dense", "one_table", BEST_RUNG])
def test_a_request_may_be_as_long_as_max_model_len_and_no_longer(rung):
    engine = small_engine(random_model(0), recipe=rung, max_model_len=20)
    (prompt,) = random_prompts([13])
    expected = generate(small_engine(random_model(0), recipe=rung), [prompt], 7)
    assert generate(engine, [prompt], 7) == expected
    assert generate(engine, [prompt], 8) == expected
    with pytest.raises(PromptError, match="20 prompt tokens leave no room .*: max_model_len is 20"):
        engine.make_sequence([1] * 20, SamplingParams(max_tokens=8))
    whole = small_engine(random_model(0), recipe=rung)
    assert (whole.max_model_len, whole.num_kv_blocks, engine.num_kv_blocks) == (64, 16 * 8, 16 * 3)


@pytest.mark.parametrize(
    ("room", "options", "n_blocks"), [(20, {}, 20), (0, {"num_kv_blocks": 3}, 3), (999, {}, 16 * 8)]
)
def test_there_are_the_blocks_that_are_asked_for_or_that_memory_has_room_for(
    room_for, room, options, n_blocks
):
    room_for(room)
    assert small_engine(random_model(0), **options).num_kv_blocks == n_blocks


@pytest.mark.parametrize(("n_blocks", "fits"), [(7, 56), (1, 8), (0, 0)])
def test_where_one_request_has_no_room_the_error_names_the_longest_that_fits_and_it_fits(
    room_for, n_blocks, fits
):
    room_for(n_blocks)
    if not fits:
        with pytest.raises(OptionError, match="no room for even one block of 8 tokens"):
            small_engine(random_model(0))
    else:
        with pytest.warns(UserWarning, match=f"max_model_len is {fits}: .* room for {fits} tokens"):
            assert small_engine(random_model(0)).max_model_len == fits
        engine = small_engine(random_model(0), max_model_len=fits)
        assert engine.num_kv_blocks == n_blocks
        assert len(generate(engine, [[1, 2]], fits - 2)[0]) == fits - 2
        with pytest.raises(OptionError, match=f"use at most {fits}"):
            small_engine(random_model(0), max_model_len=fits + 1)


@pytest.mark.parametrize("option", ["prefix_cache", "deterministic", "warm_up"])
def test_an_option_that_is_on_or_off_is_true_or_false_and_nothing_else(option):
    with pytest.raises(OptionError, match=f"^{option} is 1; use True or False$"):
        small_engine(random_model(0), **{option: 1})


class FakeGPU:
    """What a budget asks of a model on a GPU."""

    device, dtype, config = torch.device("cuda"), torch.float32, small_config()
    block_bytes = BLOCK * config.kv_bytes_per_token(4)


@pytest.fixture
def blocks_within(monkeypatch):
    """Blocks of ``FakeGPU`` in a share of that memory."""

    def count(total: int, used: int, wanted: int, share: float, measure=None) -> int:
        monkeypatch.setattr(trial, "GPUMemory", lambda *_: FakeMemory(total, held=lambda: used))
        return kv_blocks_within_memory(FakeGPU, wanted, BLOCK, 16, share, *[measure] * (measure is not None))

    return count


@pytest.mark.parametrize("share", [0.25, 1])
def test_on_a_gpu_the_share_is_of_all_its_memory_less_what_is_used_and_will_be(blocks_within, share):
    total, used = 100 << 30, 10 << 30
    held = blocks_within(total, used, 1 << 60, share) * FakeGPU.block_bytes
    assert share * total - used - (2 << 30) < held < share * total - used - (1 << 30)
    assert blocks_within(total, used, 50, 0.05) == 0  # smaller than the weights


def test_a_measured_need_is_left_free_and_measured_only_where_it_may_matter(blocks_within):
    measured = []

    def blocks(wanted: int) -> int:
        def measure() -> int:
            measured.append(wanted)
            return 300 * FakeGPU.block_bytes

        return blocks_within(1000 * FakeGPU.block_bytes, 100 * FakeGPU.block_bytes, wanted, 0.9, measure)

    assert [blocks(n) for n in (400, 401, 9999)] == [400, 401, 500]
    assert measured == [401, 9999]


def test_where_the_trial_runs_out_of_memory_there_is_no_room(blocks_within):
    def measure() -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert blocks_within(100 << 30, 0, 1 << 60, 0.9, measure) == 0


def test_what_a_dropped_engine_held_is_free_for_the_next(monkeypatch):
    class Dropped: ...

    dropped = Dropped()
    dropped.step = dropped  # engines, too, are circles
    held = weakref.ref(dropped)
    del dropped
    memory = FakeMemory(64 * GiB, held=lambda: 64 * GiB * (held() is not None))
    monkeypatch.setattr(trial, "GPUMemory", lambda *_: memory)
    assert kv_blocks_within_memory(FakeGPU, 100, BLOCK) == 100


@pytest.mark.gpu
def test_a_gpus_share_is_kept():
    gpt = random_model(0).to("cuda")
    total = torch.cuda.mem_get_info()[1]
    small, large = (
        Engine(gpt, max_batch_size=1 << 22, gpu_memory_utilization=share, recipe="dense").num_kv_blocks
        for share in (0.6, 0.7)  # other tests may run on the same GPU
    )
    per_block = 64 * gpt.config.kv_bytes_per_token(4)
    assert (large - small) * per_block <= 0.31 * total


# What an engine takes beside its cache.


class HungryStep:
    """Takes 5 GiB for a prefill, 1 GiB for its graphs and 3 MiB outside of torch for each; has 40."""

    def __init__(self, memory: FakeMemory, n_largest: int) -> None:
        self.memory, self.n_largest, self.captured = memory, n_largest, 0
        step = weakref.ref(self)  # a pool is held as long as its graphs
        memory.held = lambda: GiB * bool(step() is not None and step().captured)

    def warm_ups(self, rows: int | None):
        return [self._load] * self.n_largest

    def rehearsals(self, n_tokens: int):
        return [lambda: self.memory.reserve(5 * GiB * n_tokens // 16384)]

    def largest_captures(self):
        return [self._capture] * self.n_largest

    def captures(self):
        return [self._capture] * (40 - self.captured) if self.n_largest else []

    def _load(self) -> None:
        self.memory.driver = max(self.memory.driver, 700 * MiB)  # kernels, which stay loaded

    def _capture(self) -> None:
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
    step.worker.logprobs._ring.fill_(-5)
    runs = step.rehearsals(300) + step.largest_captures() + step.captures()
    with torch.inference_mode():
        for run in runs:
            run()
    assert cache.k_cache.isnan().all() and cache.v_cache.isnan().all()
    assert torch.equal(step.worker.state.rows, rows)
    own = slice(0, step.worker.n_rows)
    assert torch.equal(step.worker.state.ring[:, own], ring[:, own])
    assert (step.worker.counts == -5).all() and (step.worker.logprobs._ring == -5).all()


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
    (_, loaded), (_, step) = tried
    assert list(loaded.worker.prompts._layer_runs) == [(384, "few")] and not loaded.worker._steps
    assert max(step.worker.prompts._layer_runs) == (384, "few")  # 5 sequences of 64 tokens
    assert {bucket for bucket, _, _ in step.worker._steps} == {5}
    assert {mode for _, mode, _ in step.worker._steps} == set(step.worker.next_tokens.chooser.modes(5))
    assert max(step.worker.logprobs._runs) == SIZES[-1]
    assert len(step.largest_captures()) == 2  # those steps are captured: one prefill, one ring
    assert list(step.worker.logprobs._runs) == [SIZES[-1]]
