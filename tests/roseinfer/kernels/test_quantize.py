"""Codes of weights and activations are the nearest; what is not finite stays so."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rosellm.models.quantized import CODES, FINER, LARGEST, QuantizedRows, RowFormat, packed, unpacked
from rosellm.roseinfer.kernels.table import TORCH, TRITON
from tests.helpers import INTERPRETED, ON_GPU
from tests.roseinfer.kernels import kernel_checks as check

pytestmark = check.guarded
# Triton's interpreter rounds to fp8 wrongly, just below powers of 2.
TWINS = [
    *(pytest.param(TORCH, "cpu", name, id=f"reference-{name}") for name in CODES),
    pytest.param(TRITON, *INTERPRETED.values, "int8", id="interpreted-int8", marks=INTERPRETED.marks),
    *(pytest.param(TRITON, *ON_GPU.values, name, id=f"gpu-{name}", marks=ON_GPU.marks) for name in CODES),
]
every_format = pytest.mark.parametrize(("kernels", "device", "name"), TWINS)


def assert_quantised(rows: QuantizedRows, exact: Tensor, form: RowFormat) -> None:
    """Each element is off by at most half of its last digit's step, and a little more for the rounding."""
    dtype = CODES[form.name]
    assert rows.codes.shape == (len(exact), form.digits, exact.shape[1]) and rows.codes.dtype == dtype
    exact = exact.double()
    scales = exact.abs().amax(1, keepdim=True) / LARGEST[dtype]
    assert torch.allclose(rows.scales.double()[:, None], scales, rtol=1e-5)
    finer = FINER[dtype] ** (1 - form.digits)
    most = 0.51 * scales if form.name == "int8" else exact.abs() / 15.9 + scales / 1000
    assert ((rows.dequantized().double() - exact).abs() <= 1.01 * most * finer + 2e-7 * exact.abs()).all()


@check.every_twin
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_weight_of_4_bits_is_rounded_to_nearest_with_the_scales_of_least_error(
    dtype, kernels, device, monkeypatch
):
    monkeypatch.setattr("rosellm.models.quantized.SLICE", 5 * 384)
    weight = check.normals()(37, 384) * torch.logspace(-3, 3, 37)[:, None]
    weight[3, 128:256] = 0
    held = check.quantized(weight.to(device, dtype), "int4")
    assert held.shape == weight.shape and held.scales.dtype == dtype
    found = kernels.dequantize(weight=held, dtype=torch.float32).cpu()
    assert torch.equal(found, held.dequantized().cpu())
    assert torch.equal(held[3:9].dequantized().cpu(), found[3:9])
    groups = weight.to(dtype).double().unflatten(1, (3, 128))
    own = found.double().unflatten(1, (3, 128))
    steps = held.scales.cpu().double().t()[:, :, None]
    nearest = (groups[..., None] - steps[..., None] * torch.arange(-8, 8)).abs().amin(3)
    assert ((own - groups).abs() - nearest <= 1e-5 * steps.abs()).all()
    furthest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    for end in (7, 7.5, 8, 8.5, 9, 9.5, 10):
        scales = torch.where(furthest == 0, 1, furthest / -end)
        others = (groups / scales).round().clamp(-8, 7) * scales
        assert (nearest.square().sum(2) <= 1.01 * (others - groups).square().sum(2)).all()


def test_two_codes_are_in_a_byte_in_the_order_that_tensor_cores_read():
    codes = torch.arange(256).view(2, 128).remainder(16).sub(8).to(torch.int8)
    codes[1] = codes[1].flip(0)
    bytes_of_rows = packed(codes).tolist()
    for row, own in zip(codes.tolist(), bytes_of_rows, strict=True):
        for w, c, i in product(range(4), repeat=3):
            low, high = row[32 * w + 4 * c + i], row[32 * w + 16 + 4 * c + i]
            assert own[16 * c + 4 * w + i] == low % 16 + high % 16 * 16
    assert torch.equal(unpacked(packed(codes)), codes)


@check.every_twin
@pytest.mark.parametrize("form", CODES)
def test_a_quantised_weight_is_nearest_among_the_codes_times_the_scale_of_its_row(form, kernels, device):
    weight = check.normals()(9, 1088) * torch.logspace(-4, 4, 9)[:, None]
    weight[3] = 0
    codes = torch.arange(-127, 128) if form == "int8" else torch.arange(256).to(torch.uint8).view(CODES[form])
    codes = codes.float()[codes.float().isfinite()].sort().values
    scales = weight.abs().amax(1).double() / codes.max()
    nearest = (weight.double()[:, :, None] - scales[:, None, None] * codes).abs().amin(2)
    found = kernels.dequantize(weight=check.quantized(weight.to(device), form), dtype=torch.float32).cpu()
    assert ((found - weight).abs() <= nearest + 1e-4 * scales[:, None]).all()


@every_format
@pytest.mark.parametrize("digits", [1, 2])
def test_rows_are_quantised_after_their_activation(name, digits, kernels, device):
    form = RowFormat(name, digits)
    x = check.normals()(7, 600).to(device) * torch.logspace(-3, 3, 7, device=device)[:, None]
    gate, up = x.double().chunk(2, dim=1)
    exact = {"none": x, "gelu": F.gelu(x.double(), approximate="tanh"), "swiglu": F.silu(gate) * up}
    for activation, wanted in exact.items():
        assert_quantised(kernels.quantize(x=x, form=form, activation=activation), wanted, form)
    rounded = kernels.quantize(x=x.half(), form=form, activation="gelu")
    assert rounded.dtype == torch.float16
    check.assert_near(rounded.dequantized(), QuantizedRows.of(exact["gelu"].half(), form).dequantized(), 0.04)


@every_format
@pytest.mark.parametrize("digits", [1, 2])
def test_a_norm_is_quantised_as_it_is_computed(digits, name, kernels, device):
    form = RowFormat(name, digits)
    x, scale, delta = (
        check.normals(seed)(*size).to(device) for seed, size in enumerate([(5, 300), (300,), (2, 5, 300)])
    )
    case = {"delta": delta, "scale": scale, "shift": None, "eps": 1e-5}
    wanted, held = kernels.add_norm(x=x.clone(), **case), x.clone()
    assert_quantised(kernels.add_norm(x=held, **case, form=form), wanted, form)
    check.assert_near(held, x + delta.sum(0))


@every_format
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_products_of_a_row_that_is_not_finite_are_not_finite_and_those_of_others_are(
    name, bad, kernels, device
):
    x = check.normals()(3, 64).to(device)
    x[1, 5] = bad
    rows = kernels.quantize(x=x, form=RowFormat(name, 2))
    products = rows.codes.float().sum((1, 2)) * rows.scales
    assert not products[1].isfinite() and products[[0, 2]].isfinite().all()
