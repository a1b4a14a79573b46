"""The products for few rows: specs against the definitions, kernels against the specs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rosellm.models.quantized import CODES
from rosellm.roseinfer.kernels.few_rows import FewRowsShape, NormPrologue
from rosellm.roseinfer.kernels.linear import parts_of, some_rows_linear_ref
from rosellm.roseinfer.kernels.table import TORCH, TRITON
from tests.roseinfer.kernels import kernel_checks as check

EPS = 1e-5
OPTIONS = [
    *((), ("rms",), ("layer",), ("gelu",), ("swiglu",), ("residual",), ("no bias",)),
    *(("layer", "gelu"), ("rms", "no bias"), ("rms", "swiglu", "no bias"), ("layer", "residual")),
    *(("residual", "no bias"), ("layer", "gelu", "residual"), ("rms", "swiglu", "residual")),
]
pytestmark = [check.guarded, pytest.mark.filterwarnings("ignore:overflow")]
SOME_ROWS = 256


def make_case(
    rows: int, n: int, k: int, options: tuple[str, ...] = (), dtype=torch.float32, device: str = "cpu"
) -> dict:
    """Rows of different mean and size, results of about that size.

    options: "rms" or "layer" for a ``norm``, an ``activation``, a ``residual`` like the result, no bias.
    """
    normal = check.normals(rows + k)
    x = normal(rows, k) * (1 + normal(rows, 1).abs()) + normal(rows, 1)
    weight, scale = normal(n, k) * k**-0.5, 1 + 0.3 * normal(k)
    case = {"x": x, "weight": weight, "bias": None if "no bias" in options else normal(n)}
    if "residual" in options:
        case["residual"] = normal(rows, n // 2 if "swiglu" in options else n)
    case = {name: value if value is None else value.to(device, dtype) for name, value in case.items()}
    scale = scale.to(case["weight"])
    if "rms" in options:
        case["norm"] = NormPrologue(scale, EPS, gain=4.0)
    if "layer" in options:
        case["norm"] = NormPrologue(scale, EPS, case["weight"].float() @ scale.float(), gain=0.5)
    return case | {"activation": next((one for one in ("gelu", "swiglu") if one in options), "none")}


def products_of(case: dict, parts: int) -> dict:
    """The product with its bias, its sum over K in parts."""
    return {name: case[name] for name in ("x", "weight", "bias")} | {"parts": parts}


def assert_few_rows_equal_spec(case: dict, **options) -> None:
    """The result is in the residual if there is one."""
    check.assert_equals_spec(
        "few_rows_linear", case, written=("residual",) if "residual" in case else (), **options
    )


def by_definition(case: dict) -> Tensor:
    """Norm without shift, product, bias, activation, residual sum, by torch's own functions, in fp64."""
    x, norm, bias = case["x"].double(), case.get("norm"), case["bias"]
    if norm is not None:
        scale, width = norm.scale.double() * norm.gain, x.shape[1:]
        rms = norm.sums is None
        x = F.rms_norm(x, width, scale, EPS) if rms else F.layer_norm(x, width, scale, eps=EPS)
    y = F.linear(x, case["weight"].double(), None if bias is None else bias.double())
    if case["activation"] == "gelu":
        y = F.gelu(y, approximate="tanh")
    if case["activation"] == "swiglu":
        y = F.silu(y[:, : y.shape[1] // 2]) * y[:, y.shape[1] // 2 :]
    return y + case["residual"].double() if "residual" in case else y


def assert_the_spec_is_its_definition(name: str, case: dict) -> None:
    """In place of the residual if there is one."""
    expected, found = by_definition(case).float(), getattr(TORCH, name)(**case)
    check.assert_near(found, expected)
    assert (found is case.get("residual")) == ("residual" in case)


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_the_parts_of_the_spec_are_products_over_ranges_in_order(parts):
    case = products_of(make_case(3, 8, 48, dtype=torch.float16), parts)
    x, weight = (case[name].double().split(48 // parts, dim=1) for name in ("x", "weight"))
    expected = torch.stack([a @ b.t() for a, b in zip(x, weight, strict=True)])
    expected[0] += case["bias"].double()
    check.assert_near(some_rows_linear_ref(**case), expected.float())


# Chunks of 32 or 64 elements: all in registers, some, or the first alone; of whole or parts of warps.
SHAPES = [
    None,
    FewRowsShape(block_n=16, slices=2, block_k=16, held=8, warps=4, stages=1),
    FewRowsShape(block_n=16, slices=4, block_k=16, held=1, warps=4, stages=3),
    FewRowsShape(block_n=8, slices=2, block_k=32, held=2, warps=2, stages=2),
    FewRowsShape(block_n=4, slices=1, block_k=32, held=3, warps=8, stages=2),
]

WIDE_SHAPES = [
    None,
    SHAPES[2],
    FewRowsShape(block_n=4, slices=1, block_k=128, held=3, warps=8, stages=2),
    FewRowsShape(block_n=8, slices=2, block_k=64, held=2, warps=2, stages=2),
]


@check.every_place
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape or ["chosen"])))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_few_rows_cut_in_any_way_equal_the_spec(options, shape, device, dtype):
    """Each of these numbers of rows meets each number of inputs."""
    turn = len(SHAPES) * OPTIONS.index(options) + SHAPES.index(shape)
    rows, k = (1, 2, 5, 8, 9, 16)[turn % 6], (32, 48, 96, 128, 300, 768, 1010)[turn % 7]
    chosen = {"shape": lambda *_: shape} if shape else {}
    assert_the_spec_is_its_definition("few_rows_linear", make_case(rows, 42, k, options))
    assert_few_rows_equal_spec(make_case(rows, 42, k, options, dtype, device), **chosen)


@check.every_place
@pytest.mark.parametrize("form", CODES)
@pytest.mark.parametrize("shape", WIDE_SHAPES, ids=lambda shape: "-".join(map(str, shape or ["chosen"])))
def test_products_of_quantised_weights_equal_the_spec(shape, form, device, dtype):
    """The spec dequantises the weights first."""
    turn = WIDE_SHAPES.index(shape)
    chosen = {"shape": lambda *_: shape} if shape else {}
    rows, k = (1, 16, 1, 5)[turn], (192, 128, 1024, 320)[turn]
    for options in ((), ("rms", "swiglu"), ("residual", "no bias")):
        case = make_case(rows, 42, k, options, dtype, device)
        case["weight"] = check.quantized(case["weight"], form)
        assert_few_rows_equal_spec(case, **chosen)
    case = make_case(20, 42, k, (), dtype, device)
    case["weight"] = check.quantized(case["weight"], form)
    check.assert_equals_spec("some_rows_linear", products_of(case, 1))


@check.every_device
@pytest.mark.parametrize(
    ("name", "rows"), [("few_rows_linear", 3), ("few_rows_linear", 12), ("some_rows_linear", 40)]
)
def test_a_row_that_is_not_finite_leaves_the_others_alone(name, rows, device):
    case = make_case(rows, 40, 48, device=device)
    expected = getattr(TORCH, name)(**case)
    case["x"][1] = float("nan")
    found = getattr(TRITON, name)(**case)
    others = [row for row in range(rows) if row != 1]
    check.assert_near(found[others], expected[others])
    assert found[1].isnan().all()


@check.every_device
@pytest.mark.parametrize("name", ["few_rows_linear", "some_rows_linear"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_an_activation_of_large_numbers_is_the_number_or_zero(activation, name, device):
    y = torch.tensor([30.0, 1e4, 1e15], device=device)[:, None]
    weight = torch.tensor([1.0, -1.0, 0.5, 0.5], device=device)[:, None].repeat(1, 32) / 32
    expected = y * torch.tensor([1.0, 0.0, 0.5, 0.5], device=device)
    if activation == "swiglu":
        expected = torch.cat((y * y / 2, torch.zeros_like(y)), dim=1)
    found = getattr(TRITON, name)(x=y.repeat(1, 32), weight=weight, activation=activation)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@check.every_twin
@pytest.mark.parametrize("rows", [1, 8])
def test_equal_elements_have_a_finite_norm(rows, kernels, device):
    """The variance is a difference of two sums, and must not come out below 0."""
    case = make_case(rows, 40, 768, ("layer",), device=device)
    for seed in range(4):
        sizes = 10 ** (4 * torch.rand(rows, generator=torch.Generator().manual_seed(seed)))  # [rows]
        case["x"] = sizes[:, None].repeat(1, 768).to(device)
        assert kernels.few_rows_linear(**case).isfinite().all()
    case["x"] = torch.zeros_like(case["x"])
    assert torch.equal(kernels.few_rows_linear(**case), case["bias"].expand(rows, -1))


@check.every_place
@pytest.mark.parametrize(
    ("rows", "k"), [(1, 768), (17, 32), (33, 96), (64, 768), (65, 48), (129, 48), (200, 96)]
)
@pytest.mark.parametrize("options", [(), ("gelu",), ("swiglu",), ("swiglu", "no bias")], ids=str)
def test_some_rows_equal_the_spec(options, rows, k, device, dtype):
    assert_the_spec_is_its_definition("some_rows_linear", make_case(rows, 40, k, options))
    check.assert_equals_spec("some_rows_linear", make_case(rows, 40, k, options, dtype, device))


@check.every_place
@pytest.mark.parametrize("tile", [None, (16, 32, 32, 4, 4), (16, 64, 16, 4, 2), (128, 16, 32, 4, 2)])
@pytest.mark.parametrize(("rows", "parts"), [(2, 1), (9, 2), (20, 8), (64, 4)])
def test_a_tile_of_any_size_gives_the_products_of_each_range(rows, parts, tile, device, dtype):
    case = products_of(make_case(rows, 72, 128 * parts, (), dtype, device), parts)
    chosen = {"shape": lambda *_: tile} if tile else {}
    check.assert_equals_spec("some_rows_linear", case, **chosen)


PRODUCTS = [
    *((2304, 768, ("layer",)), (768, 768, ("residual",)), (3072, 768, ("layer", "gelu"))),
    *((768, 3072, ("residual",)), (6144, 1024, ("rms", "swiglu", "no bias"))),
    *((1024, 3072, ("residual", "no bias")), (3072, 2048, ("rms", "no bias"))),
    *((2048, 8192, ("residual", "no bias")), (4096, 4096, ("rms", "swiglu", "no bias"))),
    (1024, 14336, ("residual", "no bias")),
]


@pytest.mark.gpu
@check.every_gpu_place
@pytest.mark.parametrize(("n", "k", "options"), PRODUCTS)
def test_the_kernels_equal_the_spec_at_a_real_size(n, k, options, device, dtype):
    for rows in (1, 2, 5, 8, 9, 16):
        assert_few_rows_equal_spec(make_case(rows, n, k, options, dtype, device))
    kept = {"gelu", "swiglu", "no bias"}.intersection(options)
    for rows in (2, 9, 17, 32, 33, 64, 128, 129, SOME_ROWS):
        case = make_case(rows, n, k, tuple(kept), dtype, device)
        check.assert_equals_spec("some_rows_linear", case)
        for parts in {parts_of(rows, n, k), 2} - {1}:
            # sums in fp32, of which a tensor core drops bits: off by 1.4e-5 over 7,168 products
            check.assert_equals_spec("some_rows_linear", products_of(case, parts), tolerance=4e-5)
