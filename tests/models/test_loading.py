"""What an engine is made of: the parts that a name, a device and a dtype stand for, KV blocks that fit."""

from __future__ import annotations

import pytest
import torch

from rosellm.errors import CheckpointError, DeviceError
from rosellm.lab.records.bench import get_model
from rosellm.models.families import KNOWN_SHAPES
from rosellm.models.loading import load_parts, resolve_device, resolve_dtype
from rosellm.models.weights import SHIPPED
from rosellm.roseinfer.cache import budget
from rosellm.roseinfer.cache.budget import kv_blocks_within_memory
from rosellm.roseinfer.engine import Engine
from tests.helpers import CPU, random_model


def test_the_shipped_model_comes_with_its_own_tokenizer():
    gpt, tokenizer = load_parts(SHIPPED, "cpu")
    assert (gpt.device, gpt.dtype) == (CPU, torch.float32)
    assert tokenizer.decode(tokenizer.encode("def f(x):")) == "def f(x):"
    assert (tokenizer.vocab_size, tokenizer.eos_token_id) == (gpt.config.vocab_size, gpt.config.eos_token_id)


def test_a_dummy_has_the_shape_dtype_and_end_of_text_of_its_model():
    gpt, tokenizer = load_parts("gpt2", "cpu", "bfloat16", "dummy")
    assert gpt.config is KNOWN_SHAPES["gpt2"] and gpt.dtype == torch.bfloat16
    assert (tokenizer.vocab_size, tokenizer.eos_token_id) == (50257, 50256)


def test_engine_and_lab_load_the_same_weights():
    parts = load_parts(SHIPPED, "cpu", load_format="dummy")[0].state_dict()
    engine = Engine.load(SHIPPED, device="cpu", load_format="dummy", recipe="dense", num_kv_blocks=1)
    for model in (engine.model, get_model(SHIPPED, "cpu", load_format="dummy")):
        assert all(torch.equal(weight, parts[name]) for name, weight in model.state_dict().items())


def test_an_unknown_load_format_device_or_dtype_is_refused_by_name():
    with pytest.raises(CheckpointError, match="load_format 'pickle' is unknown; use 'auto' or 'dummy'"):
        load_parts(SHIPPED, "cpu", load_format="pickle")
    with pytest.raises(DeviceError, match="device 'tpu' is unknown"):
        load_parts(SHIPPED, "tpu")
    with pytest.raises(DeviceError, match="dtype 'int8' is unknown"):
        load_parts(SHIPPED, "cpu", "int8")


def test_an_absent_gpu_is_refused_and_auto_takes_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == CPU and resolve_dtype("auto", CPU) == torch.float32
    with pytest.raises(DeviceError, match="device 'cuda' is not available on this machine; use device='cpu'"):
        resolve_device("cuda")


def test_the_kv_cache_takes_what_is_wanted_within_its_share_of_memory(monkeypatch):
    gpt = random_model(0)
    block_bytes = 8 * gpt.config.kv_bytes_per_token(4)
    monkeypatch.setattr(budget, "CPU_KV_BYTES", 10 * block_bytes + 1)
    assert [kv_blocks_within_memory(gpt, wanted, 8) for wanted in (3, 10, 11)] == [3, 10, 10]
    assert kv_blocks_within_memory(gpt, 50, 8 * 11) == 1


@pytest.mark.gpu
def test_the_kv_cache_leaves_a_share_of_the_gpu_free():
    gpt = random_model(0).to("cuda")
    free = torch.cuda.mem_get_info()[0]
    blocks = kv_blocks_within_memory(gpt, 1 << 60, 8)
    assert blocks * 8 * gpt.config.kv_bytes_per_token(4) == pytest.approx(0.6 * free, rel=0.02)
