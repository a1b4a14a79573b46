"""Every variant of the layers gives the hidden states of the model itself."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rosellm.models.arch import Norm
from rosellm.models.attention import Attend, CausalAttention
from rosellm.models.model import Projection, Transformer, activated
from rosellm.roseinfer.kernels.few_rows import FEW_ROWS
from rosellm.roseinfer.kernels.linear import parts_of
from rosellm.roseinfer.kernels.table import TORCH, TRITON, Kernels
from rosellm.roseinfer.layers import products as made
from rosellm.roseinfer.layers.fused import FewRowsLayers, FusedLayers, Layers, build_layers
from rosellm.roseinfer.layers.products import LibraryProducts, NormedWeights, PackedProducts, SomeRowsProducts
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
        layers_for = build_layers(*VARIANTS[variant], model, kernels)
        for each in lengths:
            assert_gives_the_models_states(layers_for(sum(each)), model, each)


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_the_number_of_rows_chooses_the_products(device):
    model = random_model(0).to(device)
    layers_for = build_layers(*VARIANTS["small_m"], model, TRITON)
    for rows in (1, FEW_ROWS):
        assert isinstance(layers_for(rows), FewRowsLayers)
    for rows, products in ((FEW_ROWS + 1, SomeRowsProducts), (256, SomeRowsProducts), (257, LibraryProducts)):
        assert isinstance(layers_for(rows), FusedLayers) and isinstance(layers_for(rows).products, products)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("rows", [4, 20])
@pytest.mark.parametrize("shape", ["small", "qwen3"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_inert_row_leaves_the_others_alone(variant, shape, rows, device):
    """Its position is negative; what attention gives for it is zero."""
    model = random_model(3, small_config(**MODELS[shape])).to(device)
    layers = build_layers(*VARIANTS[variant], model, TRITON)(rows)
    ids, positions, _ = inputs_of(model, [rows])
    inert = torch.arange(rows, device=device) % 3 == 1

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(model.config.group, dim=1) for x in (k, v))
        return torch.where(inert[:, None, None], 0, q + 2 * k + v)

    expected = model.layers(ids, positions, attend)
    found = layers(torch.where(inert, 0, ids), torch.where(inert, -1, positions), attend)
    assert found.isfinite().all()
    assert_near(found[~inert], expected[~inert], TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_onednn", [True, False])
def test_only_fp32_weights_are_packed_and_none_without_onednn(has_onednn, dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: has_onednn)
    model, is_packed = random_model(0).to(dtype), has_onednn and dtype == torch.float32
    products = build_layers(*VARIANTS["small_m"], model, TORCH)(1).products
    assert made.can_pack(model) == is_packed
    assert isinstance(products, PackedProducts if is_packed else LibraryProducts)


def normed_projection(kind: str, outputs: int, eps: float, bias: bool = False):
    """A norm of 48 and a projection of what it gives, both without values yet."""
    norm = (torch.nn.LayerNorm if kind == "layer" else torch.nn.RMSNorm)(48, eps=eps)
    return norm.requires_grad_(False), Projection(outputs, 48, bias).requires_grad_(False)


def assert_is_the_norm_and_then_the_projection(kernels: Kernels, x: Tensor, norm, projection) -> None:
    w = NormedWeights.of(projection, norm)
    found = kernels.few_rows_linear(x=x, weight=w.weight, bias=w.bias, norm=w.norm)
    exact_norm, exact = copy.deepcopy(norm).float(), copy.deepcopy(projection).float()
    assert_near(found, exact(exact_norm(x.float())).to(x.dtype))


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_of_normed_weights_is_the_norm_and_then_the_projection(dtype, bias, kind):
    """Over the projection's own weight: nothing is copied but vectors."""
    generator = torch.Generator().manual_seed(1)
    norm, projection = normed_projection(kind, 2000, 1e-2, bias)
    for parameter in (*norm.parameters(), *projection.parameters()):
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
    x = (0.1 * torch.randn(3, 48, generator=generator) + 0.05).to(dtype)
    assert_is_the_norm_and_then_the_projection(TORCH, x, norm, projection)
    w = NormedWeights.of(projection, norm)
    assert w.weight is projection.weight and (w.bias is not None) == (bias or kind == "layer")


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("rows", [1, 5])
def test_an_fp16_row_is_normed_where_it_times_the_scale_is_beyond_fp16(rows, kind, device):
    generator = torch.Generator().manual_seed(2)
    norm, projection = normed_projection(kind, 64, 1e-5)
    norm.weight.data = 30 * torch.rand(48, generator=generator)
    projection.weight.data = 0.01 * torch.randn(64, 48, generator=generator)
    x = 100 * torch.randn(rows, 48, generator=generator)
    x[:, 7], norm.weight[7] = 60_000.0, 30.0
    norm, projection, x = (one.to(device, torch.float16) for one in (norm, projection, x))
    assert_is_the_norm_and_then_the_projection(TRITON, x, norm, projection)


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_the_recipe_chooses_where_swiglu_is_computed(device):
    model, calls = random_model(0, small_config(**MODELS["llama"])).to(device), []

    def counted(*, x: Tensor) -> Tensor:
        calls.append(len(x))
        return TRITON.silu_mul(x=x)

    kernels, x = replace(TRITON, silu_mul=counted), torch.randn(5, 32, device=device)
    for variant, expected in (("fused_norm", []), ("epilogue", [5])):
        products = build_layers(*VARIANTS[variant], model, kernels)(300).products
        assert_near(products.up(0, x), activated(model.blocks[0].up(x), model.config))
        assert calls == expected


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_in_the_epilogue_is_the_tanh_form(dtype):
    projection = random_model(7).to("cuda", dtype).blocks[0].up
    x = torch.randn(40, 32, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).to(dtype)
    expected = F.gelu(projection(x).float(), approximate="tanh").to(dtype)
    assert_near(made._gelu_in_epilogue(projection, x), expected)


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
    layers_for = build_layers(*VARIANTS[variant], model, TRITON)
    tolerance = {torch.float32: TOLERANCE, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]
    for lengths in ([1], [8], [16], [17], [64], [130], [60] * 5):
        ids, positions, attention = inputs_of(model, lengths)
        found = layers_for(sum(lengths))(ids, positions, attention)
        *_, exact_attention = inputs_of(exact, lengths)
        assert_near(found.float(), exact.layers(ids, positions, exact_attention), tolerance)
