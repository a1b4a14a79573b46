"""How long a request may be, and what memory has room for."""

from __future__ import annotations

import re

import pytest
import torch

from rosellm.errors import OptionError, PromptError, describe
from rosellm.roseinfer import trial
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import BEST_RUNG
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.trial import kv_blocks_within_memory
from tests.fake_memory import FakeMemory
from tests.helpers import generate, random_model, random_prompts, small_config, small_engine

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
    message = "13 prompt tokens and 8 new ones exceed max_model_len's 20 positions"
    with pytest.raises(PromptError, match=re.escape(message)):
        engine.make_sequence(prompt, SamplingParams(max_tokens=8))
    whole = small_engine(random_model(0), recipe=rung)
    with pytest.raises(PromptError, match="1 prompt tokens and 64 new ones exceed the model's 64 positions"):
        whole.make_sequence([1], SamplingParams(max_tokens=64))
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
    advice = f": max_model_len={fits} is the most that fits$" if fits else ": not even one token fits.*$"
    needs = "a request of 64 tokens needs 8 KV blocks of 8 tokens per layer; memory has room for"
    with pytest.raises(OptionError, match=f"^{needs} {n_blocks}{advice}"):
        small_engine(random_model(0))
    if fits:
        engine = small_engine(random_model(0), max_model_len=fits)
        assert engine.num_kv_blocks == n_blocks
        assert len(generate(engine, [[1, 2]], fits - 2)[0]) == fits - 2
        with pytest.raises(OptionError, match=f"max_model_len={fits}"):
            small_engine(random_model(0), max_model_len=fits + 1)


@pytest.mark.parametrize("bad", ["no", 1, None, torch.tensor(True)], ids=type)
@pytest.mark.parametrize("option", ["prefix_cache", "deterministic", "warm_up"])
def test_an_option_that_is_on_or_off_is_true_or_false_and_nothing_else(option, bad):
    with pytest.raises(OptionError) as refusal:
        small_engine(random_model(0), **{option: bad})
    assert str(refusal.value) == f"{option} is {describe(bad)}; use True or False"


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
