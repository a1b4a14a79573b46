"""The products for few rows: specs against the definitions, kernels against the specs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rosellm.roseinfer.kernels import few_rows, linear
from rosellm.roseinfer.kernels.few_rows import (
    FEW_ROWS,
    FewRowsShape,
    NormPrologue,
    few_rows_linear,
    few_rows_linear_ref,
)
from rosellm.roseinfer.kernels.linear import (
    is_narrow,
    parts_of,
    some_rows_linear,
    some_rows_linear_ref,
    some_rows_shape,
)
from tests.helpers import TRITON_DEVICES
from tests.roseinfer.kernels.kernel_checks import (
    PLACES,
    assert_near,
    assert_untouched,
    clones,
    guarded_outputs,  # noqa: F401
)

EPS = 1e-5
OPTIONS = [
    (),
    ("rms",),
    ("layer",),
    ("gelu",),
    ("swiglu",),
    ("residual",),
    ("no bias",),
    ("layer", "gelu"),
    ("rms", "no bias"),
    ("rms", "swiglu", "no bias"),
    ("layer", "residual"),
    ("residual", "no bias"),
    ("layer", "gelu", "residual"),
    ("rms", "swiglu", "residual"),
]
pytestmark = pytest.mark.filterwarnings("ignore:overflow")
guarded = pytest.mark.usefixtures("guarded_outputs")

SOME_ROWS = 256


def make_case(rows: int, n: int, k: int, dtype=torch.float32, device: str = "cpu", seed: int = 0) -> dict:
    """Rows of different mean and size, results of about that size."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x = normal(rows, k) * (1 + normal(rows, 1).abs()) + normal(rows, 1)
    case = {"x": x, "weight": normal(n, k) * k**-0.5, "bias": normal(n)}
    return {name: value.to(device, dtype) for name, value in case.items()}


def with_options(case: dict, options: tuple[str, ...], seed: int = 0) -> dict:
    """A ``norm`` for "rms" and "layer", an ``activation``, a ``residual`` of the result's shape, no bias."""
    generator, case = torch.Generator().manual_seed(seed + 1), dict(case)
    n, k = case["weight"].shape
    scale = (1 + 0.3 * torch.randn(k, generator=generator)).to(case["weight"])
    if "rms" in options:
        case |= {"norm": NormPrologue(scale, EPS, gain=4.0)}
    if "layer" in options:
        case |= {"norm": NormPrologue(scale, EPS, case["weight"].float() @ scale.float(), gain=0.5)}
    case["activation"] = next((one for one in ("gelu", "swiglu") if one in options), "none")
    if "residual" in options:
        shape = len(case["x"]), n // 2 if "swiglu" in options else n
        case |= {"residual": torch.randn(shape, generator=generator).to(case["x"])}
    return case | ({"bias": None} if "no bias" in options else {})


def parameters(case: dict) -> dict:
    """The case with the fields of its norm among its values."""
    norm = case.get("norm")
    return case | ({} if norm is None else norm._asdict())


def assert_equals_spec(kernel, spec, case: dict, tolerance: float | None = None) -> None:
    """The same result, in the residual if there is one; no other argument is written."""
    before, expected = clones(parameters(case)), spec(**clones(case))
    found = kernel(**case)
    assert_near(found, expected, tolerance)
    if "residual" in case:
        assert found is case["residual"]
        before.pop("residual")
    assert_untouched(parameters(case), before)


# The specs.


def by_definition(case: dict) -> Tensor:
    """Norm without shift, product, bias, activation, residual sum, by torch's own functions, in fp64."""
    x, norm, bias = case["x"].double(), case.get("norm"), case.get("bias")
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


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("k", [32, 96, 768])
def test_the_spec_is_norm_then_product_then_activation_then_sum(k, options):
    case = with_options(make_case(5, 40, k, seed=k), options)
    expected = by_definition(case).float()
    found = few_rows_linear_ref(**case)
    assert_near(found, expected)
    assert (found is case.get("residual")) == ("residual" in options)


@pytest.mark.parametrize("options", [(), ("no bias",), ("gelu",), ("swiglu", "no bias")], ids=str)
def test_the_spec_for_some_rows_is_the_product(options):
    case = with_options(make_case(20, 40, 48), options)
    assert_near(some_rows_linear_ref(**case), by_definition(case).float())


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_the_parts_of_the_spec_are_products_over_ranges_in_order(parts):
    case = make_case(3, 8, 48)
    found = some_rows_linear_ref(x=case["x"].half(), weight=case["weight"].half(), parts=parts)
    assert found.dtype == torch.float32
    width = 48 // parts
    for part in range(parts):
        columns = slice(part * width, (part + 1) * width)
        expected = case["x"].half()[:, columns].double() @ case["weight"].half()[:, columns].double().t()
        assert_near(found[part], expected.float())


@pytest.mark.parametrize("rows", [1, 17, 33, 64, 129, SOME_ROWS])
@pytest.mark.parametrize("n", [8, 32, 768, 1024, 2048, 4096])
def test_parts_divide_the_inputs_and_are_not_for_outputs_wider_than_them(n, rows):
    for k in (32, 34, 50, 256, 768, 1000, 1024, 2048, 3072, 8960, 9728, 14336):
        parts = parts_of(rows, n, k)
        assert k % parts == 0 and (parts == 1 or k >= (2 * n if is_narrow(n, k) else n))
        assert parts == 1 or k // parts % 64 == 0
    assert parts_of(rows, 768, 3072) > 1 and parts_of(rows, 1024, 2048) > 1


# The kernel for few rows.


@guarded
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("k", [32, 48, 96, 768, 1200, 3072, 4100])
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 16])
def test_few_rows_equal_the_spec(rows, k, device, dtype):
    options = OPTIONS[(rows + k // 16) % len(OPTIONS)]
    case = make_case(rows, 40, k, dtype, device, seed=rows + k)
    assert_equals_spec(few_rows_linear, few_rows_linear_ref, with_options(case, options))


# Chunks of 32 or 64 elements: all in registers, some, or the first alone; of whole or parts of warps.
SHAPES = [
    FewRowsShape(block_n=16, slices=2, block_k=16, held=8, warps=4, stages=1),
    FewRowsShape(block_n=16, slices=4, block_k=16, held=1, warps=4, stages=3),
    FewRowsShape(block_n=8, slices=2, block_k=32, held=2, warps=2, stages=2),
    FewRowsShape(block_n=4, slices=1, block_k=32, held=3, warps=8, stages=2),
]


@guarded
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
@pytest.mark.parametrize("k", [32, 128, 256, 300])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_few_rows_cut_in_any_way_equal_the_spec(rows, k, shape, device, dtype):
    linear = partial(few_rows_linear, shape=lambda *_: shape)
    for options in (("rms", "swiglu"), ("layer", "residual"), ("no bias",)):
        case = make_case(rows, 42, k, dtype, device, seed=rows + k)
        assert_equals_spec(linear, few_rows_linear_ref, with_options(case, options))


# Rows and inputs of the weights: GPT-2, gpt2-xl, Qwen3-0.6B, Llama-3.2-1B, Llama-3.1-8B.
REAL_SIZES = [
    *((2304, 768), (768, 768), (3072, 768), (768, 3072)),
    *((4800, 1600), (1600, 1600), (6400, 1600), (1600, 6400)),
    *((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
    *((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
    *((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "k"), REAL_SIZES)
def test_weights_in_registers_are_at_most_half_of_them(n, k, dtype):
    """Of the 255 that a thread has, before any spills to memory."""
    for rows in range(1, FEW_ROWS + 1):
        cut = few_rows._few_rows_shape(rows, n, k, dtype)
        held = min(cut.held * cut.slices * cut.block_k, 2 * k) * cut.block_n * dtype.itemsize
        assert held / (4 * 32 * cut.warps) <= 128


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize(
    ("kernel", "spec", "rows"),
    [
        (few_rows_linear, few_rows_linear_ref, 3),
        (few_rows_linear, few_rows_linear_ref, 12),
        (some_rows_linear, some_rows_linear_ref, 40),
    ],
)
def test_a_row_that_is_not_finite_leaves_the_others_alone(kernel, spec, rows, device):
    case = make_case(rows, 40, 48, device=device)
    expected = spec(**case)
    case["x"][1] = float("nan")
    found = kernel(**case)
    others = [row for row in range(rows) if row != 1]
    assert_near(found[others], expected[others])
    assert found[1].isnan().all()


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("kernel", [few_rows_linear, some_rows_linear])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_an_activation_of_large_numbers_is_the_number_or_zero(activation, kernel, device):
    y = torch.tensor([30.0, 1e4, 1e15], device=device)[:, None]
    weight = torch.tensor([1.0, -1.0, 0.5, 0.5], device=device)[:, None].repeat(1, 32) / 32
    expected = y * torch.tensor([1.0, 0.0, 0.5, 0.5], device=device)
    if activation == "swiglu":
        expected = torch.cat((y * y / 2, torch.zeros_like(y)), dim=1)
    found = kernel(x=y.repeat(1, 32), weight=weight, activation=activation)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("device", ["reference", *TRITON_DEVICES])
@pytest.mark.parametrize("rows", [1, 8])
def test_equal_elements_have_a_finite_norm(rows, device):
    """The variance is a difference of two sums, and must not come out below 0."""
    linear = few_rows_linear_ref if device == "reference" else few_rows_linear
    case = make_case(rows, 40, 768, device="cpu" if device == "reference" else device)
    for seed in range(4):
        sizes = 10 ** (4 * torch.rand(rows, generator=torch.Generator().manual_seed(seed)))  # [rows]
        case["x"] = sizes[:, None].repeat(1, 768).to(case["x"])
        assert linear(**with_options(case, ("layer",))).isfinite().all()
    case["x"] = torch.zeros_like(case["x"])
    assert torch.equal(linear(**with_options(case, ("layer",))), case["bias"].expand(rows, -1))


# The kernel for some rows.


@guarded
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(
    ("rows", "k"),
    [(rows, k) for rows in (1, 17, 33, 64) for k in (32, 96, 768)] + [(65, 48), (129, 48), (200, 96)],
)
def test_some_rows_equal_the_spec(rows, k, device, dtype):
    case = make_case(rows, 40, k, dtype, device, seed=rows + k)
    linear = some_rows_linear
    assert_equals_spec(linear, some_rows_linear_ref, case)
    for options in (("gelu",), ("swiglu",), ("swiglu", "no bias")):
        assert_equals_spec(linear, some_rows_linear_ref, with_options(case, options))
    assert_equals_spec(linear, some_rows_linear_ref, {"x": case["x"], "weight": case["weight"], "parts": 4})


@guarded
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("tile", [(16, 32, 32, 4, 4), (16, 64, 16, 4, 2), (128, 16, 32, 4, 2)])
@pytest.mark.parametrize(("rows", "parts"), [(2, 1), (9, 2), (20, 8)])
def test_a_tile_of_any_size_gives_the_products_of_each_range(rows, parts, tile, device, dtype):
    case = make_case(rows, 72, 256, dtype, device, seed=rows)
    linear = partial(some_rows_linear, shape=lambda *_: tile)
    operands = {"x": case["x"], "weight": case["weight"], "parts": parts}
    assert_equals_spec(linear, some_rows_linear_ref, operands)


# A GPU's own.

PRODUCTS = [
    (2304, 768, ("layer",)),
    (768, 768, ("residual",)),
    (3072, 768, ("layer", "gelu")),
    (768, 3072, ("residual",)),
    (6144, 1024, ("rms", "swiglu", "no bias")),
    (1024, 3072, ("residual", "no bias")),
    (3072, 2048, ("rms", "no bias")),
    (2048, 8192, ("residual", "no bias")),
    (4096, 4096, ("rms", "swiglu", "no bias")),
    (1024, 14336, ("residual", "no bias")),
]


@guarded
@pytest.mark.gpu
@pytest.mark.parametrize(("device", "dtype"), PLACES[-3:])
@pytest.mark.parametrize(("n", "k", "options"), PRODUCTS)
def test_the_kernels_equal_the_spec_at_a_real_size(n, k, options, device, dtype):
    for rows in (1, 2, 5, 8, 9, 16):
        case = with_options(make_case(rows, n, k, dtype, device, seed=rows), options)
        assert_equals_spec(few_rows_linear, few_rows_linear_ref, case)
    kept = {"gelu", "swiglu", "no bias"}.intersection(options)
    for rows in (2, 9, 17, 32, 33, 64, 128, 129, SOME_ROWS):
        case = with_options(make_case(rows, n, k, dtype, device, seed=rows), tuple(kept))
        assert_equals_spec(some_rows_linear, some_rows_linear_ref, case)
        for parts in {parts_of(rows, n, k), parts_of(rows, 768, 3072)} - {1}:
            operands = {"x": case["x"], "weight": case["weight"], "parts": parts}
            # sums in fp32, of which a tensor core drops bits: off by 1.4e-5 over 7,168 products
            assert_equals_spec(some_rows_linear, some_rows_linear_ref, operands, 4e-5)


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [9, 17, 48, 100, SOME_ROWS])
@pytest.mark.parametrize(("n", "k"), [(1024, 2048), (4096, 4096), (2048, 8192), (28672, 4096), (768, 3072)])
def test_a_tile_fits_the_registers_and_the_shared_memory_of_an_h200(n, k, rows, parts):
    block_m, block_n, block_k, warps, stages = some_rows_shape(rows, n, k, torch.bfloat16, parts)
    assert block_m >= min(rows, 16) and block_m * block_n // (32 * warps) <= 64
    assert stages * (block_m + block_n) * block_k * 2 <= 232_448


@pytest.mark.parametrize(("limit", "stages"), [(None, 6), (232_448, 6), (65_536, 5), (1_000, 1)])
def test_a_pipeline_has_no_more_stages_than_shared_memory_holds(limit, stages, monkeypatch):
    monkeypatch.setattr(linear, "shared_memory", lambda device: limit)
    assert linear.fitting_stages(6, 64, 32, 64, torch.empty(1, dtype=torch.float16)) == stages
