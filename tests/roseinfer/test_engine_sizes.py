"""How long a request may be, and what memory has room for."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch

from rosellm.errors import OptionError, PromptError, describe
from rosellm.roseinfer import trial
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import BEST_RUNG
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.trial import kv_blocks_within_memory
from tests.fake_memory import FakeMemory
from tests.helpers import generate, random_model, random_prompts, small_engine

BLOCK = 8
RUNGS = ["dense", "one_table", BEST_RUNG]


@pytest.fixture
def room_for(monkeypatch):
    """Memory for that many KV blocks of ``random_model(0)``."""

    def leave(n_blocks: int) -> None:
        block_bytes = BLOCK * random_model(0).config.kv_bytes_per_token(4)
        monkeypatch.setattr(trial, "CPU_KV_BYTES", n_blocks * block_bytes)

    return leave


@pytest.mark.parametrize("rung", RUNGS)
def test_a_request_may_be_as_long_as_max_model_len_and_no_longer(rung):
    engine = small_engine(random_model(0), recipe=rung, max_model_len=20)
    (prompt,) = random_prompts([13])
    expected = generate(small_engine(random_model(0), recipe=rung), [prompt], 7)
    assert generate(engine, [prompt], 7) == expected
    told = "13 prompt tokens and 8 new ones exceed max_model_len's 20 positions"
    with pytest.raises(PromptError, match=re.escape(told)):
        engine.make_sequence(prompt, SamplingParams(max_tokens=8))


@pytest.mark.parametrize(("n_blocks", "fits"), [(7, 56), (1, 8)])
def test_where_one_request_has_no_room_the_longest_that_fits_is_told_and_fits(room_for, n_blocks, fits):
    room_for(n_blocks)
    told = f"a request of 64 tokens needs 8 KV blocks of 8 tokens per layer; memory has room for {n_blocks}"
    with pytest.raises(OptionError, match=rf"^{told}: max_model_len={fits} is the most that fits$"):
        small_engine(random_model(0))
    engine = small_engine(random_model(0), max_model_len=fits)
    assert engine.num_kv_blocks == n_blocks
    assert len(generate(engine, [[1, 2]], fits - 2)[0]) == fits - 2
    with pytest.raises(OptionError, match=f"max_model_len={fits}"):
        small_engine(random_model(0), max_model_len=fits + 1)


def test_where_not_one_block_has_room_a_smaller_block_is_advised(room_for):
    room_for(0)
    with pytest.raises(OptionError, match="memory has room for 0: not even one token fits") as told:
        small_engine(random_model(0))
    assert "\n" not in str(told.value) and "max_model_len=0" not in str(told.value)


def test_blocks_that_are_asked_for_are_not_questioned(room_for):
    room_for(0)
    assert small_engine(random_model(0), num_kv_blocks=3).num_kv_blocks == 3


@pytest.mark.parametrize("bad", ["no", "", 1, 0, None, 10**5000, torch.tensor(True)], ids=type)
@pytest.mark.parametrize("option", ["prefix_cache", "deterministic", "warm_up"])
def test_an_option_that_is_on_or_off_is_true_or_false_and_nothing_else(option, bad):
    with pytest.raises(OptionError) as refusal:
        small_engine(random_model(0), **{option: bad})
    assert str(refusal.value) == f"{option} is {describe(bad)}; use True or False"


def use_memory(monkeypatch, memory: FakeMemory) -> None:
    monkeypatch.setattr(trial, "GPUMemory", lambda *_: memory)


class FakeGPU:
    """What a budget asks of a model on a GPU."""

    device, dtype = torch.device("cuda"), torch.float32

    def __init__(self) -> None:
        self.config = random_model(0).config


@pytest.mark.parametrize("utilization", [0.25, 0.5, 0.9, 1, 1.0])
def test_on_a_gpu_the_share_is_of_all_its_memory_less_what_is_used_and_will_be(monkeypatch, utilization):
    total, used = 100 << 30, 10 << 30
    use_memory(monkeypatch, FakeMemory(total, held=lambda: used))
    gpt = FakeGPU()
    blocks = kv_blocks_within_memory(gpt, 1 << 60, BLOCK, 16, utilization)
    held = blocks * BLOCK * gpt.config.kv_bytes_per_token(4)
    assert utilization * total - used - (2 << 30) < held < utilization * total - used - (1 << 30)


def test_a_measured_need_is_left_free_and_measured_only_where_it_may_matter(monkeypatch):
    block_bytes = BLOCK * FakeGPU().config.kv_bytes_per_token(4)
    use_memory(monkeypatch, FakeMemory(1000 * block_bytes, held=lambda: 100 * block_bytes))
    measured = []

    def measure(wanted: int) -> int:
        measured.append(wanted)
        return 300 * block_bytes

    def blocks(wanted: int) -> int:
        return kv_blocks_within_memory(FakeGPU(), wanted, BLOCK, 16, 0.9, partial(measure, wanted))

    assert [blocks(n) for n in (10, 400, 401, 500, 501, 9999)] == [10, 400, 401, 500, 500, 500]
    assert measured == [401, 500, 501, 9999]


def test_where_the_trial_runs_out_of_memory_there_is_no_room(monkeypatch):
    use_memory(monkeypatch, FakeMemory())

    def measure() -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert kv_blocks_within_memory(FakeGPU(), 1 << 60, BLOCK, 16, 0.9, measure) == 0


@pytest.mark.gpu
def test_a_gpus_share_is_kept():
    gpt = random_model(0).to("cuda")
    total = torch.cuda.mem_get_info()[1]
    small, large = (
        Engine(gpt, max_batch_size=1 << 22, gpu_memory_utilization=share, recipe="dense").num_kv_blocks
        for share in (0.2, 0.3)
    )
    per_block = 64 * gpt.config.kv_bytes_per_token(4)
    assert (large - small) * per_block <= 0.31 * total
