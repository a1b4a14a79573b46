"""Embeddings, residual sum with norm, SwiGLU: specs against the definitions, kernels against the specs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rosellm.models.quantized import CODES
from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.kernels.norm import add_norm, add_norm_ref, embed_ref, silu_mul, silu_mul_ref
from tests.helpers import random_model
from tests.roseinfer.kernels import kernel_checks as check

EPS, VOCAB, LENGTH = 1e-5, 50, 20
MODEL = random_model(0)
pytestmark = check.guarded


def embed_case(rows: int, width: int, dtype=torch.float32, device: str = "cpu") -> dict:
    """Ids and positions as columns of a device state; every third row inert."""
    normal, generator = check.normals(rows), torch.Generator().manual_seed(width)
    state = DeviceState(rows, 5, torch.device(device))
    state.tokens.copy_(torch.randint(VOCAB, (rows,), generator=generator))
    state.positions.copy_(torch.randint(LENGTH, (rows,), generator=generator))
    state.positions[2::3] = -1
    tokens, places = (normal(n, width).to(device, dtype) for n in (VOCAB, LENGTH))
    return {"ids": state.tokens, "positions": state.positions, "tokens": tokens, "places": places}


def norm_case(
    rows: int, width: int, parts: int, dtype=torch.float32, device: str = "cpu", without: tuple[str, ...] = ()
) -> dict:
    """Rows of different mean and size; the parts of the sum are fp32, as ``some_rows_linear`` gives them.

    An RMSNorm is ``without`` a shift.
    """
    normal = check.normals(width + parts)
    x = normal(rows, width) * (1 + normal(rows, 1).abs()) + 3 * normal(rows, 1)
    case = {"x": x, "scale": 1 + 0.3 * normal(width), "shift": normal(width), "bias": normal(width)}
    case = {name: value.to(device, dtype) for name, value in case.items()}
    delta = normal(parts, rows, width).to(device, torch.float32 if parts > 1 else dtype)
    case |= {"eps": EPS} | ({"delta": delta} if parts else {"bias": None})
    return case | dict.fromkeys(without)


def test_the_spec_of_the_embedding_is_the_models_own():
    """An inert row reads place 0."""
    seen = []
    ids, positions = torch.tensor([3, 7, 100, 0]), torch.tensor([0, 63, 5, -1])
    MODEL.blocks[0].register_forward_pre_hook(lambda block, arguments: seen.append(arguments[0]))
    MODEL(ids, positions.clamp_min(0), lambda layer, q, k, v: q)
    tables = {"tokens": MODEL.token_embedding.weight, "places": MODEL.position_embedding.weight}
    assert torch.equal(embed_ref(ids=ids.int(), positions=positions.int(), **tables), seen[0])


@check.every_place
@pytest.mark.parametrize("form", [None, *CODES])
@pytest.mark.parametrize("has_places", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(1, 32), (7, 48), (3, 1000)])
def test_the_embedding_kernel_equals_the_spec(rows, width, has_places, form, device, dtype):
    case = embed_case(rows, width, dtype, device)
    if form is not None:
        case |= {"tokens": check.quantized(case["tokens"], form), "dtype": dtype}
    if not has_places:
        case["places"] = None
        case["positions"].fill_(1 << 30)
    check.assert_equals_spec("embed", case)


@pytest.mark.parametrize("without", [(), ("shift", "bias")], ids=["layer", "rms"])
@pytest.mark.parametrize("parts", [0, 1, 4])
def test_the_spec_is_the_sum_and_then_torchs_norm(parts, without):
    case = norm_case(5, 48, parts, without=without)
    x, scale = case["x"].double(), case["scale"].double()
    if parts:
        x = x + case["delta"].double().sum(dim=0) + (0 if without else case["bias"].double())
    if without:
        expected = F.rms_norm(x, (48,), scale, EPS)
    else:
        expected = F.layer_norm(x, (48,), scale, case["shift"].double(), EPS)
    check.assert_near(add_norm_ref(**case), expected.float())
    check.assert_near(case["x"], x.float())


@check.every_place
@pytest.mark.parametrize("without", [(), ("shift",), ("bias",), ("shift", "bias")], ids=str)
@pytest.mark.parametrize("parts", [0, 1, 8])
@pytest.mark.parametrize(("rows", "width"), [(1, 32), (5, 48), (17, 768), (2, 1000), (3, 5120)])
def test_the_norm_kernel_equals_the_spec(rows, width, parts, without, device, dtype):
    check.assert_equals_spec(
        "add_norm", norm_case(rows, width, parts, dtype, device, without), written=("x",)
    )


@check.every_twin
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_norm_is_of_the_sum_as_it_is_held(kernels, dtype, device):
    """Half precision holds only even numbers there."""
    case = norm_case(5, 48, 2, dtype, device)
    case["x"] += 2048
    found, held = kernels.add_norm(**case), case["x"]
    rest = {"scale": case["scale"], "shift": case["shift"], "eps": EPS}
    assert held.dtype == found.dtype == dtype
    check.assert_near(found, kernels.add_norm(x=held.clone(), **rest))


@check.every_device
def test_a_large_mean_costs_the_norm_no_digits(device):
    """Deviations are summed after the mean is taken off."""
    case = norm_case(4, 768, 0, device=device)
    x = case["x"] + 4096.0
    exact = F.layer_norm(x.double(), (768,), case["scale"].double(), case["shift"].double(), EPS)
    check.assert_near(add_norm(**case | {"x": x}), exact.float(), 1e-3)


@check.every_place
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 32), (5, 48), (17, 1000), (2, 1024), (3, 3072)])
def test_the_kernel_for_silu_and_its_spec_are_torchs_silu_times_the_other_half(rows, width, device, dtype):
    x = 3 * check.normals(width)(rows, 2 * width).to(device, dtype)
    gate, up = x.double().split(width, dim=1)
    check.assert_near(silu_mul_ref(x=x), (F.silu(gate) * up).to(dtype))
    check.assert_equals_spec("silu_mul", {"x": x})


@pytest.mark.filterwarnings("ignore:overflow")
@check.every_device
def test_silu_of_large_numbers_is_the_number_or_zero(device):
    x = torch.tensor([[1e4, -1e4, 1e30, -1e30, 2.0, 2.0, 2.0, 2.0]], device=device)
    expected = torch.tensor([[2e4, 0.0, 2e30, 0.0]], device=device)
    assert torch.equal(silu_mul(x=x), expected)
