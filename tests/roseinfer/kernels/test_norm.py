"""Embeddings, residual sum with norm, SwiGLU: specs against the definitions, kernels against the specs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.kernels.norm import add_norm, add_norm_ref, embed, embed_ref, silu_mul, silu_mul_ref
from tests.helpers import TRITON_DEVICES, random_model
from tests.roseinfer.kernels.kernel_checks import (
    PLACES,
    assert_near,
    assert_untouched,
    clones,
    guarded_outputs,  # noqa: F401
)

EPS = 1e-5
VOCAB, LENGTH = 50, 20
guarded = pytest.mark.usefixtures("guarded_outputs")


def embed_case(rows: int, width: int, dtype=torch.float32, device: str = "cpu", seed: int = 0) -> dict:
    """Ids and positions as columns of a device state; every third row inert."""
    generator = torch.Generator().manual_seed(seed)
    state = DeviceState(rows, 5, torch.device(device))
    state.tokens.copy_(torch.randint(VOCAB, (rows,), generator=generator))
    state.positions.copy_(torch.randint(LENGTH, (rows,), generator=generator))
    state.positions[2::3] = -1
    tokens, places = (torch.randn(n, width, generator=generator).to(device, dtype) for n in (VOCAB, LENGTH))
    return {"ids": state.tokens, "positions": state.positions, "tokens": tokens, "places": places}


def norm_case(
    rows: int, width: int, parts: int, dtype=torch.float32, device: str = "cpu", seed: int = 0
) -> dict:
    """Rows of different mean and size; the parts of the sum are fp32, as ``some_rows_linear`` gives them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x = normal(rows, width) * (1 + normal(rows, 1).abs()) + 3 * normal(rows, 1)
    case = {"x": x, "scale": 1 + 0.3 * normal(width), "shift": normal(width), "bias": normal(width)}
    case = {name: value.to(device, dtype) for name, value in case.items()}
    delta = normal(parts, rows, width).to(device, torch.float32 if parts > 1 else dtype)
    return case | {"eps": EPS} | ({"delta": delta} if parts else {"bias": None})


def without(case: dict, *names: str) -> dict:
    """The case with None for these; an RMSNorm has no shift."""
    return case | dict.fromkeys(names)


def assert_add_norm_equals_spec(case: dict) -> None:
    """The same norm and the same new x; no other argument is written."""
    before, theirs = clones(case), clones(case)
    expected = add_norm_ref(**theirs)
    found = add_norm(**case)
    assert_near(case["x"], theirs["x"])
    assert_near(found, expected)
    before.pop("x")
    assert_untouched(case, before)


# Embeddings.


def test_the_spec_of_the_embedding_is_the_models_own():
    model = random_model(0)
    ids, positions = torch.tensor([3, 7, 100, 0]), torch.tensor([0, 63, 5, 9])
    seen = []

    def attend(layer, q, k, v):
        return q

    model.blocks[0].register_forward_pre_hook(lambda block, arguments: seen.append(arguments[0]))
    model(ids, positions, attend)
    tables = {"tokens": model.token_embedding.weight, "places": model.position_embedding.weight}
    assert torch.equal(embed_ref(ids=ids.int(), positions=positions.int(), **tables), seen[0])


def test_an_inert_row_reads_place_0():
    case = embed_case(6, 8)
    assert (case["positions"] < 0).sum() == 2
    expected = embed_ref(**case | {"positions": case["positions"].clamp_min(0)})
    assert torch.equal(embed_ref(**case), expected)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("kernel", [embed_ref, embed])
def test_without_places_the_tokens_alone_are_embedded(kernel, device):
    case = embed_case(7, 48, device=device)
    expected = case["tokens"][case["ids"].long()]
    case["positions"].fill_(1 << 30)
    assert torch.equal(kernel(**without(case, "places")), expected)


# Residual sum and norm.


@pytest.mark.parametrize("missing", [(), ("shift", "bias")], ids=["layer", "rms"])
@pytest.mark.parametrize("parts", [0, 1, 4])
def test_the_spec_is_the_sum_and_then_torchs_norm(parts, missing):
    case = without(norm_case(5, 48, parts), *missing)
    x, scale = case["x"].double(), case["scale"].double()
    if parts:
        x = x + case["delta"].double().sum(dim=0) + (0 if missing else case["bias"].double())
    layer_norm = lambda: F.layer_norm(x, (48,), scale, case["shift"].double(), EPS)  # noqa: E731
    expected = F.rms_norm(x, (48,), scale, EPS) if missing else layer_norm()
    assert_near(add_norm_ref(**case), expected.float())
    assert_near(case["x"], x.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_norm_is_of_the_sum_as_it_is_held(dtype):
    case = norm_case(5, 48, 2, dtype)
    found = add_norm_ref(**case)
    held = case["x"]
    assert held.dtype == found.dtype == dtype
    rest = {"scale": case["scale"], "shift": case["shift"], "eps": EPS}
    assert torch.equal(found, add_norm_ref(x=held.clone(), **rest))


@guarded
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("missing", [(), ("shift",), ("bias",), ("shift", "bias")], ids=str)
@pytest.mark.parametrize("parts", [0, 1, 8])
@pytest.mark.parametrize(("rows", "width"), [(1, 32), (5, 48), (17, 768), (2, 1000), (3, 5120)])
def test_the_norm_kernel_equals_the_spec(rows, width, parts, missing, device, dtype):
    case = norm_case(rows, width, parts, dtype, device, seed=width + parts)
    assert_add_norm_equals_spec(without(case, *missing))


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_the_kernels_norm_is_of_the_sum_as_it_is_held(device):
    """Half precision holds only even numbers there."""
    case = norm_case(5, 48, 2, torch.float16, device)
    case["x"] += 2048
    assert_add_norm_equals_spec(case)


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_a_large_mean_costs_the_norm_no_digits(device):
    """Deviations are summed after the mean is taken off."""
    case = norm_case(4, 768, 0, device=device)
    x = case["x"] + 4096.0
    exact = F.layer_norm(x.double(), (768,), case["scale"].double(), case["shift"].double(), EPS)
    assert_near(add_norm(**case | {"x": x}), exact.float(), 1e-3)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("value", [0.0, 4.0, -1024.0])
def test_the_norm_of_equal_elements_is_the_shift(value, device):
    case = norm_case(2, 64, 0, device=device)
    case["x"] = torch.full_like(case["x"], value)
    assert torch.equal(add_norm(**case), case["shift"].expand(2, -1))


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_the_rms_norm_of_zeros_is_zero(device):
    case = without(norm_case(2, 64, 0, device=device), "shift")
    assert torch.equal(add_norm(**case | {"x": torch.zeros_like(case["x"])}), torch.zeros_like(case["x"]))


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_a_row_that_is_not_finite_leaves_the_others_alone(device):
    case = norm_case(4, 48, 2, device=device)
    case["delta"][1, 2, 5] = float("inf")
    theirs = clones(case)
    expected, found = add_norm_ref(**theirs), add_norm(**case)
    assert_near(found[[0, 1, 3]], expected[[0, 1, 3]])
    assert found[2].isnan().all()


# SwiGLU.


def gates(rows: int, width: int, dtype=torch.float32, device: str = "cpu") -> Tensor:
    return (3 * torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(width))).to(
        device, dtype
    )


def test_the_spec_is_torchs_silu_times_the_other_half():
    x = gates(5, 48)
    gate, up = x.double().split(48, dim=1)
    assert_near(silu_mul_ref(x=x), (F.silu(gate) * up).float())


@guarded
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 32), (5, 48), (17, 1000), (2, 1024), (3, 3072)])
def test_the_kernel_for_silu_equals_the_spec(rows, width, device, dtype):
    x = gates(rows, width, dtype, device)
    before = x.clone()
    assert_near(silu_mul(x=x), silu_mul_ref(x=before))
    assert torch.equal(x, before)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_silu_of_large_numbers_is_the_number_or_zero(device):
    x = torch.tensor([[1e4, -1e4, 1e30, -1e30, 2.0, 2.0, 2.0, 2.0]], device=device)
    expected = torch.tensor([[2e4, 0.0, 2e30, 0.0]], device=device)
    assert torch.equal(silu_mul(x=x), expected)


# A GPU's own.
