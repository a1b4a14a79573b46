"""The products for few rows: specs against the definitions, kernels against the specs."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rosellm.roseinfer.kernels import linear
from rosellm.roseinfer.kernels.linear import (
    FEW_ROWS,
    SOME_ROWS,
    few_rows_linear_ref,
    fold_norm,
    make_few_rows_linear,
    make_some_rows_linear,
    parts_of,
    some_rows_linear_ref,
)
from tests.helpers import TRITON_DEVICES
from tests.roseinfer.kernels.kernel_checks import (
    PLACES,
    assert_near,
    assert_replays_equal_ordinary_launches,
    assert_untouched,
    clones,
    guarded_outputs,  # noqa: F401
)

EPS = 1e-5
OPTIONS = [
    (),
    ("norm",),
    ("gelu",),
    ("residual",),
    ("norm", "gelu"),
    ("norm", "residual"),
    ("norm", "gelu", "residual"),
]
pytestmark = pytest.mark.filterwarnings("ignore:overflow")
guarded = pytest.mark.usefixtures("guarded_outputs")


def make_case(rows: int, n: int, k: int, dtype=torch.float32, device: str = "cpu", seed: int = 0) -> dict:
    """Rows of different mean and size, results of about that size."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x = normal(rows, k) * (1 + normal(rows, 1).abs()) + normal(rows, 1)
    case = {"x": x, "weight": normal(n, k) * k**-0.5, "bias": normal(n)}
    return {name: value.to(device, dtype) for name, value in case.items()}


def with_options(case: dict, options: tuple[str, ...], seed: int = 0) -> dict:
    """``column_sums`` and ``eps`` for "norm", ``gelu``, and a ``residual`` of the result's shape."""
    case = dict(case)
    if "norm" in options:
        case |= {"column_sums": case["weight"].float().sum(dim=1), "eps": EPS}
    if "gelu" in options:
        case |= {"gelu": True}
    if "residual" in options:
        shape = len(case["x"]), len(case["weight"])
        residual = torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1))
        case |= {"residual": residual.to(case["x"])}
    return case


def assert_equals_spec(kernel, spec, case: dict) -> None:
    """The same result, in the residual if there is one; no other argument is written."""
    before, expected = clones(case), spec(**clones(case))
    found = kernel(**case)
    assert_near(found, expected)
    if "residual" in case:
        assert found is case["residual"]
        before.pop("residual")
    assert_untouched(case, before)


# The specs.


def by_definition(case: dict) -> Tensor:
    """LayerNorm without scale and shift, product, bias, GELU, residual sum, by torch's own functions."""
    x = case["x"].double()
    if "column_sums" in case:
        x = F.layer_norm(x, x.shape[1:], eps=case["eps"])
    y = F.linear(x, case["weight"].double(), case["bias"].double())
    y = F.gelu(y, approximate="tanh") if case.get("gelu") else y
    return y + case["residual"].double() if "residual" in case else y


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("k", [32, 96, 768])
def test_the_spec_is_norm_then_product_then_gelu_then_sum(k, options):
    case = with_options(make_case(5, 40, k, seed=k), options)
    expected = by_definition(case).float()
    found = few_rows_linear_ref(**case)
    assert_near(found, expected)
    assert (found is case.get("residual")) == ("residual" in options)


def test_a_norm_folded_into_the_weights_is_the_norm_before_the_product():
    case = make_case(6, 48, 64)
    generator = torch.Generator().manual_seed(1)
    scale, shift = 1 + 0.3 * torch.randn(64, generator=generator), torch.randn(64, generator=generator)
    normed = F.layer_norm(case["x"].double(), (64,), scale.double(), shift.double(), EPS)
    expected = F.linear(normed, case["weight"].double(), case["bias"].double())
    weight, bias = fold_norm(case["weight"], case["bias"], scale, shift)
    folded = with_options({"x": case["x"], "weight": weight, "bias": bias}, ("norm",))
    assert_near(few_rows_linear_ref(**folded), expected.float())


def test_folding_a_transposed_weight_gives_rows_in_their_order():
    weight = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
    bias, scale, shift = torch.zeros(48), torch.full((32,), 2.0), torch.ones(32)
    folded, moved = fold_norm(weight.t(), bias, scale, shift)
    assert folded.is_contiguous() and torch.equal(folded, 2 * weight.t())
    assert_near(moved, weight.sum(dim=0))


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_spec_for_some_rows_is_the_product(bias, gelu):
    case = make_case(20, 40, 48) | {"gelu": gelu}
    case |= {} if bias else {"bias": None}
    y = F.linear(case["x"].double(), case["weight"].double(), case["bias"].double() if bias else None)
    expected = F.gelu(y, approximate="tanh") if gelu else y
    assert_near(some_rows_linear_ref(**case), expected.float())


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
@pytest.mark.parametrize("n", [8, 32, 768])
def test_parts_divide_the_inputs_and_are_for_wide_ones_only(n, rows):
    for k in (32, 34, 50, 256, 768, 1000, 3072):
        parts = parts_of(rows, n, k)
        assert k % parts == 0 and (parts == 1 or k >= 2 * n)
    assert parts_of(rows, 768, 3072) > 1


# The kernel for few rows.


@guarded
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("k", [32, 48, 96, 768, 1200, 3072])
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 16])
def test_few_rows_equal_the_spec(rows, k, device, dtype):
    options = OPTIONS[(rows + k // 16) % len(OPTIONS)]
    case = make_case(rows, 40, k, dtype, device, seed=rows + k)
    assert_equals_spec(make_few_rows_linear(), few_rows_linear_ref, with_options(case, options))


@guarded
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 13])
def test_few_rows_with_every_option_equal_the_spec(rows, options, device, dtype):
    case = make_case(rows, 33, 32, dtype, device, seed=rows)
    assert_equals_spec(make_few_rows_linear(), few_rows_linear_ref, with_options(case, options))


@guarded
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("seed", range(8))
def test_few_rows_equal_the_spec_over_random_shapes(seed, device, dtype):
    rng = random.Random(seed)
    shape = rng.randrange(1, FEW_ROWS + 1), rng.randrange(1, 100), rng.randrange(1, 200)
    case = with_options(make_case(*shape, dtype, device, seed), rng.choice(OPTIONS), seed)
    assert_equals_spec(make_few_rows_linear(), few_rows_linear_ref, case)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("rows", [1, 5, 9])
def test_the_rows_after_a_residual_are_not_written(rows, device):
    case = make_case(rows, 40, 32, device=device)
    held = torch.randn(rows + 4, 40, generator=torch.Generator().manual_seed(2)).to(device)
    before = held.clone()
    make_few_rows_linear()(**case, residual=held[:rows])
    assert torch.equal(held[rows:], before[rows:])
    assert_near(held[:rows], few_rows_linear_ref(**case, residual=before[:rows]))


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize(
    ("make", "spec", "rows"),
    [
        (make_few_rows_linear, few_rows_linear_ref, 3),
        (make_few_rows_linear, few_rows_linear_ref, 12),
        (make_some_rows_linear, some_rows_linear_ref, 40),
    ],
)
def test_a_row_that_is_not_finite_leaves_the_others_alone(make, spec, rows, device):
    case = make_case(rows, 40, 48, device=device)
    expected = spec(**case)
    case["x"][1] = float("nan")
    found = make()(**case)
    others = [row for row in range(rows) if row != 1]
    assert_near(found[others], expected[others])
    assert found[1].isnan().all()


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("make", [make_few_rows_linear, make_some_rows_linear])
def test_gelu_of_large_numbers_is_the_number_or_zero(make, device):
    x = torch.tensor([30.0, 1e4, 1e20], device=device)[:, None].repeat(1, 32)
    weight = torch.tensor([1.0, -1.0, 0.5], device=device)[:, None].repeat(1, 32) / 32
    found = make()(x=x, weight=weight, bias=torch.zeros(3, device=device), gelu=True)
    y = torch.tensor([30.0, 1e4, 1e20], device=device)[:, None] * torch.tensor([1.0, 0.0, 0.5], device=device)
    torch.testing.assert_close(found, y, rtol=1e-6, atol=0)


@pytest.mark.parametrize("device", ["reference", *TRITON_DEVICES])
@pytest.mark.parametrize("rows", [1, 8])
def test_equal_elements_have_a_finite_norm(rows, device):
    """The variance is a difference of two sums, and must not come out below 0."""
    linear = few_rows_linear_ref if device == "reference" else make_few_rows_linear()
    case = make_case(rows, 40, 768, device="cpu" if device == "reference" else device)
    for seed in range(4):
        sizes = 10 ** (4 * torch.rand(rows, generator=torch.Generator().manual_seed(seed)))  # [rows]
        case["x"] = sizes[:, None].repeat(1, 768).to(case["x"])
        assert linear(**with_options(case, ("norm",))).isfinite().all()
    case["x"] = torch.zeros_like(case["x"])
    assert torch.equal(linear(**with_options(case, ("norm",))), case["bias"].expand(rows, -1))


# The kernel for some rows.


@guarded
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(
    ("rows", "k"),
    [(rows, k) for rows in (1, 17, 33, 64) for k in (32, 96, 768)] + [(65, 48), (129, 48), (200, 96)],
)
def test_some_rows_equal_the_spec(rows, k, device, dtype):
    case = make_case(rows, 40, k, dtype, device, seed=rows + k)
    linear = make_some_rows_linear()
    assert_equals_spec(linear, some_rows_linear_ref, case)
    assert_equals_spec(linear, some_rows_linear_ref, case | {"gelu": True})
    assert_equals_spec(linear, some_rows_linear_ref, {"x": case["x"], "weight": case["weight"], "parts": 4})


@guarded
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("seed", range(8))
def test_some_rows_equal_the_spec_over_random_shapes(seed, device, dtype):
    rng = random.Random(seed)
    parts, n = rng.choice((1, 2, 3, 8)), rng.randrange(1, 80)
    k = n if seed < 2 else rng.randrange(1, 60)
    case = make_case(rng.randrange(1, 80), n, parts * k, dtype, device, seed) | {"parts": parts}
    case["bias"] = case["bias"] if parts == 1 else None
    assert_equals_spec(make_some_rows_linear(), some_rows_linear_ref, case)


# A GPU's own.

GPT2_PRODUCTS = [
    (2304, 768, ("norm",)),
    (768, 768, ("residual",)),
    (3072, 768, ("norm", "gelu")),
    (768, 3072, ("residual",)),
]


@guarded
@pytest.mark.gpu
@pytest.mark.parametrize(("device", "dtype"), PLACES[-3:])
@pytest.mark.parametrize(("n", "k", "options"), GPT2_PRODUCTS)
def test_the_kernels_equal_the_spec_at_a_real_size(n, k, options, device, dtype):
    for rows in (1, 2, 5, 8, 9, 16):
        case = with_options(make_case(rows, n, k, dtype, device, seed=rows), options)
        assert_equals_spec(make_few_rows_linear(), few_rows_linear_ref, case)
    for rows in (17, 32, 33, 64, 128, 129, SOME_ROWS):
        case = make_case(rows, n, k, dtype, device, seed=rows)
        assert_equals_spec(make_some_rows_linear(), some_rows_linear_ref, case | {"gelu": "gelu" in options})
        parts = {"x": case["x"], "weight": case["weight"], "parts": parts_of(rows, 768, 3072)}
        assert_equals_spec(make_some_rows_linear(), some_rows_linear_ref, parts)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 8, 16])
def test_dependent_launches_in_a_replayed_graph_equal_ordinary_ones(rows, dtype):
    up, down = (make_case(rows, n, k, dtype, "cuda", seed=n) for n, k in ((3072, 768), (768, 3072)))
    sums, x, ones = up["weight"].float().sum(dim=1), up["x"], torch.ones(768, device="cuda", dtype=dtype)

    def refill(seed: int) -> None:
        x.copy_(make_case(rows, 1, 768, dtype, "cuda", seed)["x"])

    def chain(kernels) -> tuple[Tensor, ...]:
        few, some, add_norm = kernels.few_rows_linear, kernels.some_rows_linear, kernels.add_norm
        hidden = few(x=x, weight=up["weight"], bias=up["bias"], column_sums=sums, eps=EPS, gelu=True)
        few(x=hidden, weight=down["weight"], bias=down["bias"], residual=x)
        normed = add_norm(x=x, scale=ones, shift=ones, eps=EPS)
        wide = some(x=normed, weight=up["weight"], bias=up["bias"], gelu=True)
        parts = some(x=wide, weight=down["weight"], parts=4)
        return hidden, wide, parts, add_norm(x=x, delta=parts, bias=ones, scale=ones, shift=ones, eps=EPS), x

    assert_replays_equal_ordinary_launches(chain, refill)


@pytest.mark.parametrize(("limit", "stages"), [(None, 6), (232_448, 6), (65_536, 5), (1_000, 1)])
def test_a_pipeline_has_no_more_stages_than_shared_memory_holds(limit, stages, monkeypatch):
    monkeypatch.setattr(linear, "shared_memory", lambda device: limit)
    assert linear.fitting_stages(6, 64, 32, 64, torch.empty(1, dtype=torch.float16)) == stages
