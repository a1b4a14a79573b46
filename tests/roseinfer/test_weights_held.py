"""An engine on a GPU holds its model's weights once, whichever kernels read them."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rosellm.models.arch import Arch
from rosellm.models.families.table import KNOWN_SHAPES
from rosellm.models.model import Transformer
from rosellm.models.quantized import WEIGHT_FORMS, bytes_per_weight
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import LADDER
from tests.helpers import TRITON_DEVICES
from tests.roseinfer.steps.fake_graphs import captured  # noqa: F401

SHAPES = {
    "gpt2": replace(KNOWN_SHAPES["gpt2"], n_layers=4, vocab_size=8_192),
    "qwen3": replace(KNOWN_SHAPES["Qwen/Qwen3-0.6B"], n_layers=3, vocab_size=8_192, n_positions=1024),
}
OFTEN = ("dense", "one_table", "fused_head", "small_gemm", "split_kv")
RUNGS = [  # all but an exhibit
    pytest.param(rung, marks=[] if rung in OFTEN else pytest.mark.slow)
    for rung in LADDER
    if rung != "persistent_kernel"
]
MOST = 1.03  # times the weights' bytes
BUFFERS = 8 << 20  # bytes of inputs, hidden states, angles and counts, for the sizes below
SIZES = {"max_batch_size": 4, "max_model_len": 256, "num_kv_blocks": 16, "warm_up": False}


def held(device: torch.device) -> int:
    """Bytes of all tensors on the device, as asked for: what the allocator rounds up is not an engine's."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    storages = [x.untyped_storage() for x in gc.get_objects() if type(x) in (Tensor, torch.nn.Parameter)]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.device == device}.values())


def beside_its_cache(rung: str, arch: Arch, device: torch.device, quantization: str | None = None) -> int:
    """Bytes that a model and its engine take, less the KV cache."""
    torch.ones(2, 2, device=device) @ torch.ones(2, 2, device=device)  # the library's workspace is there
    before = held(device)
    model = Transformer.allocate(arch, device, torch.float16, quantization=quantization)
    for parameter in model.parameters():
        parameter.fill_(0.01)
    engine = Engine(model, recipe=rung, kernels="triton", **SIZES)
    return held(device) - before - engine.blocks.k_cache.nbytes - engine.blocks.v_cache.nbytes


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("arch", SHAPES.values(), ids=SHAPES)
def test_an_engine_holds_the_weights_once(arch, rung, device):
    weights = torch.float16.itemsize * arch.n_parameters
    assert weights <= beside_its_cache(rung, arch, torch.device(device)) <= MOST * weights + BUFFERS


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("form", WEIGHT_FORMS)
def test_an_engine_with_quantised_weights_holds_their_bytes_once(form, device):
    arch = SHAPES["qwen3"]
    saved = torch.float16.itemsize - bytes_per_weight(form, torch.float16)
    weights = 2 * arch.n_parameters - saved * arch.n_layers * sum(n * k for n, k in arch.shapes.values())
    weights -= arch.vocab_size * arch.d_model  # the head's, which have 8 bits
    assert (
        weights <= beside_its_cache("split_kv", arch, torch.device(device), form) <= MOST * weights + BUFFERS
    )
