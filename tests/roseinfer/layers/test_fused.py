"""Every variant of the layers gives the hidden states of the model itself."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rosellm.models.arch import Norm
from rosellm.models.attention import Attend, CausalAttention
from rosellm.models.model import Transformer
from rosellm.roseinfer.kernels import ring
from rosellm.roseinfer.kernels.linear import parts_of
from rosellm.roseinfer.kernels.table import TORCH, TRITON, TRITON_DEPENDENT
from rosellm.roseinfer.layers.fused import FewRowsLayers, Layers, build_layers
from tests.helpers import DTYPES, FAMILIES, ON_GPU, TRITON_DEVICES, random_model, small_config
from tests.roseinfer.kernels.kernel_checks import assert_near

MODELS = {family: change | {"n_layers": 1} for family, change in FAMILIES.items() if family != "qwen3"} | {
    "qwen3": FAMILIES["qwen3"],
    "small": {},
    "no bias": {"biases": ("qkv",), "n_layers": 1},  # no GELU is left to the epilogue
    "gqa": {"n_heads": 4, "n_kv_heads": 2, "n_layers": 1},
    "untied": {"tie_embeddings": False, "n_layers": 1},
    "wide": {"d_ff": 256, "n_layers": 1},
    "odd": {"d_model": 48, "n_heads": 3, "n_kv_heads": 1, "d_ff": 90, "norm": Norm("layer", 1e-3)},
}
# norm, activation, gemm
VARIANTS = {
    "plain": ("separate", "separate", "library"),
    "fused_norm": ("fused", "separate", "library"),
    "epilogue": ("fused", "epilogue", "library"),
    "small_m": ("fused", "epilogue", "small_m"),
}
TOLERANCE = 1e-4


def inputs_of(model: Transformer, lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor, Attend]:
    """Random tokens of sequences packed one after the other, and attention that positions them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])
    ids, positions = ids.int().to(model.device), positions.int().to(model.device)
    attention = CausalAttention(lengths, model.device, model.config.scale, model.config.window)
    return ids, positions, model.positioned(positions, attention)


def assert_gives_the_models_states(layers: Layers, model: Transformer, lengths: list[int]) -> None:
    ids, positions, attention = inputs_of(model, lengths)
    before = copy.deepcopy(model.state_dict())
    assert_near(layers(ids, positions, attention), model.layers(ids, positions, attention), TOLERANCE)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("shape", MODELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_gives_the_models_states(variant, shape, device):
    """By kernels, and on a CPU by their specs as well; the wide one's ``down`` comes in parts."""
    assert (parts_of(18, 32, MODELS[shape].get("d_ff", 128)) > 1) == (shape == "wide")
    model = random_model(1, small_config(**MODELS[shape])).to(device)
    specified = [[1], [5], [3, 1, 4], [40, 30]] if device == "cpu" else []
    for kernels, lengths in ((TORCH, specified), (TRITON, [[1], [17, 1]])):
        _, layers_for = build_layers(*VARIANTS[variant], model, kernels)
        for each in lengths:
            assert_gives_the_models_states(layers_for(sum(each)), model, each)


@pytest.mark.parametrize("kernels", [TRITON, TRITON_DEPENDENT], ids=["ordinary", "dependent"])
def test_where_weights_can_be_in_a_ring_2_to_64_rows_take_it_unless_the_kernel_is_a_readers(
    monkeypatch, kernels
):
    monkeypatch.setattr(ring, "runs_on", lambda device, dtype: True)
    model = random_model(0, small_config(d_model=1024, d_ff=4096, n_layers=1))
    layers_for, for_prefill = build_layers(*VARIANTS["small_m"], model, kernels)
    of_another = replace(kernels, some_rows_linear=lambda **operands: kernels.some_rows_linear(**operands))
    without, _ = build_layers(*VARIANTS["small_m"], model, of_another)
    assert isinstance(layers_for(1), FewRowsLayers) and isinstance(without(8), FewRowsLayers)
    for rows in (2, 64):
        assert layers_for(rows).products.parts_of(rows, 1024, 4096) == ring.parts_of(rows, 1024, 4096)
        assert layers_for(rows).products.qkv_parts_of(rows, 4096, 1024) == 2
    attending = replace(kernels, append_and_attend=lambda **operands: kernels.append_and_attend(**operands))
    with_another, _ = build_layers(*VARIANTS["small_m"], model, attending)
    for rows, others in ((65, layers_for), (64, for_prefill), (64, without), (64, with_another)):
        assert others(rows).products.qkv_parts_of(rows, 4096, 1024) == 1
    assert layers_for(8).products.parts_of(8, 1024, 4100) == parts_of(8, 1024, 4100)  # rows that TMA refuses
    assert ring.parts_of(8, 1024, 4100) != parts_of(8, 1024, 4100)
    assert without(64).products.parts_of is parts_of
    assert layers_for(65).products.parts_of(65, 1024, 4096) == parts_of(65, 1024, 4096)


@pytest.mark.parametrize("device", [ON_GPU])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ["small", "qwen2", "qwen3"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_at_a_real_width_gives_the_models_states(variant, shape, dtype, device):
    """Compared with the fp32 model: in half precision each variant rounds where the others do not."""
    width = {"d_model": 768, "n_heads": 12, "n_kv_heads": 4, "head_dim": 64, "d_ff": 3072}
    sizes = {"n_layers": 2, "vocab_size": 1000, "n_positions": 512}
    config = small_config(**MODELS[shape] | width | sizes)
    exact = random_model(8, config, std=0.02).to(device)
    model = copy.deepcopy(exact).to(dtype)
    exact.load_state_dict(model.state_dict())
    _, layers_for = build_layers(*VARIANTS[variant], model, TRITON)
    tolerance = {torch.float32: TOLERANCE, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]
    for lengths in ([1], [8], [16], [17], [64], [130], [60] * 5):
        ids, positions, attention = inputs_of(model, lengths)
        found = layers_for(sum(lengths))(ids, positions, attention)
        *_, exact_attention = inputs_of(exact, lengths)
        assert_near(found.float(), exact.layers(ids, positions, exact_attention), tolerance)
