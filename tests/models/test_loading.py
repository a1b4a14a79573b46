"""What an engine is made of: the parts that a name, a device and a dtype stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rosellm.errors import CheckpointError, DeviceError
from rosellm.models import loading
from rosellm.models.checkpoint import SHIPPED
from rosellm.models.loading import DTYPES, arch_of, load_parts, resolve_device, resolve_dtype
from rosellm.models.weights import save_model
from rosellm.roseinfer.engine import Engine
from tests.helpers import CPU, MODERN, generate, random_model, small_config, uncached_greedy

GPU = torch.device("cuda")


def test_an_absent_gpu_is_refused_and_auto_takes_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == CPU
    with pytest.raises(DeviceError, match="device 'cuda' is not available on this machine; use device='cpu'"):
        resolve_device("cuda")


@pytest.mark.parametrize(
    ("own", "on_gpu"),
    [("bfloat16", "bfloat16"), ("float32", "float32"), ("float64", "float32"), (None, "float16")],
)
def test_auto_is_the_checkpoints_own_dtype_on_a_gpu_and_float32_on_a_cpu(own, on_gpu):
    arch = small_config(dtype=own)
    assert (resolve_dtype("auto", GPU, arch), resolve_dtype("auto", CPU, arch)) == (
        DTYPES[on_gpu],
        torch.float32,
    )
    assert all(resolve_dtype(name, GPU, arch) == dtype for name, dtype in DTYPES.items())


def test_a_checkpoint_of_16_bits_runs_in_fp32_on_a_cpu(tmp_path):
    config = small_config(vocab_size=4096, **MODERN)
    save_model(random_model(0, config), tmp_path, torch.bfloat16)
    load_parts(SHIPPED, "cpu")[1].save(tmp_path)
    engine = Engine.load(str(tmp_path), device="cpu", num_kv_blocks=8)
    assert engine.config.dtype == "bfloat16"
    assert engine.model.dtype == engine.blocks.k_cache.dtype == torch.float32
    rounded = random_model(0, config).to(torch.bfloat16).to(torch.float32)
    prompt = [3, 1, 4, 1, 5]
    assert generate(engine, [prompt], 8) == [uncached_greedy(rounded, prompt, 8)]


def unnamed(folder: Path, dtype: torch.dtype) -> None:
    """A checkpoint whose config names no dtype, as GPT-2's."""
    save_model(random_model(0, small_config(vocab_size=4096)), folder, dtype)
    load_parts(SHIPPED, "cpu")[1].save(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["torch_dtype"]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_where_the_config_names_no_dtype_that_of_files_of_16_bits_is_asked_for(tmp_path, monkeypatch, dtype):
    unnamed(tmp_path, dtype)
    asked = []
    monkeypatch.setattr(loading, "resolve_dtype", lambda *given: asked.append(given) or torch.float32)
    load_parts(str(tmp_path), "cpu")
    assert asked[-1][2].dtype == (str(dtype).removeprefix("torch.") if dtype.itemsize == 2 else None)
    assert arch_of(str(tmp_path), "dummy").dtype is None


@pytest.mark.gpu
def test_on_a_gpu_a_checkpoint_of_bfloat16_that_names_no_dtype_runs_in_it(tmp_path):
    unnamed(tmp_path, torch.bfloat16)
    assert load_parts(str(tmp_path), "cuda")[0].dtype == torch.bfloat16


def test_an_unknown_dtype_is_refused_before_anything_is_fetched(monkeypatch):
    monkeypatch.setattr(loading, "checkpoint_folder", lambda _: pytest.fail("fetched"))
    with pytest.raises(DeviceError, match="dtype 'int8' is unknown"):
        load_parts("some/model", "cpu", "int8")
    with pytest.raises(CheckpointError, match="load_format 'pickle' is unknown"):
        load_parts(SHIPPED, "cpu", load_format="pickle")
