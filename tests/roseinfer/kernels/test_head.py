"""The head that keeps the best token: the spec against the sampler, the kernel against the spec."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rosellm.models.quantized import HEAD_FORM, QuantizedRows, RowFormat, full
from rosellm.roseinfer.cache.device_state import INERT, DeviceState
from rosellm.roseinfer.kernels.draw import draw
from rosellm.roseinfer.kernels.head import best_tokens, best_tokens_ref
from rosellm.roseinfer.kernels.noise import gumbel_noise
from rosellm.roseinfer.sampling import NOT_FINITE
from tests.roseinfer.kernels.kernel_checks import (
    TOLERANCE,
    every_device,
    every_gpu_place,
    every_place,
    every_twin,
    guarded,
    normals,
    quantized,
)

pytestmark = guarded
LARGEST_SEED = 2**63 - 1
FORM = RowFormat(HEAD_FORM, 2)
TEMPERATURES = [0.0, 0.5, 1.0, 0.0, 3.0]


def make_case(
    rows: int,
    vocab: int,
    width: int = 32,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    temperatures: list[float] = TEMPERATURES,
) -> dict:
    """Logits of deviation 2; what is random about a row comes from a device state's columns."""
    normal, generator = normals(seed), torch.Generator().manual_seed(seed)
    state = DeviceState(rows, 3, torch.device(device))
    state.temperatures.copy_(torch.tensor((temperatures * rows)[:rows]))
    state.seeds.copy_(torch.randint(LARGEST_SEED, (rows,), generator=generator))
    state.positions.copy_(torch.randint(1000, (rows,), generator=generator))
    return {
        "hidden": normal(rows, width).to(device, dtype),
        "weight": (2 * normal(vocab, width) / width**0.5).to(device, dtype),
        "temperature": state.temperatures,
        "seeds": state.seeds,
        "positions": state.positions,
    }


def logits_of(case: dict) -> Tensor:
    """As fp32 sums: ``[M, V]``."""
    return full(case["hidden"]).float() @ full(case["weight"]).float().t()


def quantised_case(case: dict, with_rows: bool) -> dict:
    """The same with a head in 8 bits, and hidden states too, if ``with_rows``."""
    hidden = QuantizedRows.of(case["hidden"], FORM) if with_rows else case["hidden"]
    return case | {"hidden": hidden, "weight": quantized(case["weight"], HEAD_FORM)}


def scores_of(case: dict) -> Tensor:
    """What is greatest for the token chosen: ``[M, V]`` fp32."""
    noise = gumbel_noise(case["seeds"], case["positions"] + 1, len(case["weight"]))
    return logits_of(case).float() + case["temperature"][:, None] * noise


def best_of_tiles(values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest index of the highest value of every row, as ``advance`` takes it: ``[M]`` each."""
    best = values.max(dim=1).values
    return best, torch.where(values == best[:, None], indices, 2**31 - 1).amin(dim=1)


def tolerance_of(case: dict) -> float:
    """Sums of codes are as exact as of fp32; but tensor cores drop bits of those in FP8."""
    if isinstance(case["hidden"], Tensor):
        return TOLERANCE[case["hidden"].dtype]
    return TOLERANCE[torch.float32 if case["weight"].form == "int8" else torch.float16]


def assert_equals_spec(case: dict, **sampled: bool) -> None:
    """The same best value; the token is the spec's, or one as good to within rounding; tiles are in order."""
    expected, index = (x[:, 0] for x in best_tokens_ref(**case, **sampled))
    values, indices = best_tokens(**case, **sampled)
    assert values.shape == indices.shape and values.dtype == torch.float32 and indices.dtype == torch.int32
    scores = scores_of(case)
    slack = tolerance_of(case) * scores.abs().amax(dim=1, keepdim=True)
    assert ((scores.gather(1, indices.long()) - values).abs() <= slack).all()
    if indices.shape[1] > 1:
        assert (indices.diff(dim=1) > 0).all()
    best, token = best_of_tiles(values, indices)
    assert ((best - expected).abs() <= slack[:, 0]).all()
    sure = scores.topk(2).values.diff(dim=1)[:, 0].abs() > 2 * slack[:, 0]
    assert torch.equal(token[sure], index[sure])
    if tolerance_of(case) < 1e-4:
        assert sure.float().mean() > 0.9


# The spec.


@pytest.mark.parametrize("seed", range(3))
def test_the_spec_draws_the_tokens_of_the_sampler(seed):
    """Of the same seeds and positions; but where the two best are as good as equal."""
    case = make_case(300, 101, seed=seed)
    rules = [torch.full((300,), x) for x in (0, 1.0, 0)]
    expected = draw(logits_of(case), case["temperature"], *rules, case["seeds"], case["positions"] + 1)
    sure = scores_of(case).topk(2).values.diff(dim=1)[:, 0].abs() > 1e-4
    assert sure.float().mean() > 0.98
    assert torch.equal(best_tokens_ref(**case)[1][sure, 0], expected[sure])


# The kernel.


@every_place
@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize(("vocab", "width"), [(101, 32), (129, 48), (64, 96), (300, 768), (3, 20)])
@pytest.mark.parametrize("rows", [1, 5, 17, 40])
def test_the_kernel_equals_the_spec(rows, vocab, width, sampled, device, dtype):
    temperatures = TEMPERATURES if sampled else [0.0]
    case = make_case(rows, vocab, width, dtype, device, seed=rows + vocab, temperatures=temperatures)
    assert_equals_spec(case, sampled=sampled)


@every_place
@pytest.mark.parametrize("with_rows", [True, False], ids=["codes by codes", "codes by elements"])
@pytest.mark.parametrize(
    ("rows", "vocab", "width"), [(1, 300, 768), (5, 129, 48), (17, 3, 16), (40, 101, 32), (70, 200, 96)]
)
def test_of_a_quantised_head_the_kernel_equals_the_spec(rows, vocab, width, with_rows, device, dtype):
    case = make_case(rows, vocab, width, dtype, device, seed=rows)
    assert_equals_spec(quantised_case(case, with_rows))


@every_device
def test_of_equal_logits_the_first_wins_in_a_tile_and_across_tiles(device):
    case = make_case(4, 300, device=device, temperatures=[0.0])
    case["hidden"] = case["hidden"].mul(8).round()  # whole numbers add up alike in any order
    case["weight"] = case["weight"].mul(100).round()[:10].repeat(30, 1)
    expected = best_tokens_ref(**case)
    _, token = best_of_tiles(*best_tokens(**case))
    assert (token < 10).all() and torch.equal(token, expected[1][:, 0])
    case["hidden"] = torch.zeros_like(case["hidden"])
    assert (best_of_tiles(*best_tokens(**case))[1] == 0).all()


@every_twin
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_logits_are_compared_as_fp32_sums(dtype, kernels, device):
    """1 + 2**-12 would be 1 in half precision, where the first of equals wins."""
    case = make_case(1, 3, 2, dtype, device, temperatures=[0.0])
    case["hidden"] = case["hidden"].new_tensor([[1.0, 2.0**-12]])
    case["weight"] = case["weight"].new_tensor([[0.5, 0.0], [1.0, 0.0], [1.0, 1.0]])
    assert best_of_tiles(*kernels.best_tokens(**case)) == (1.0 + 2.0**-12, 2)


@every_twin
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("is_quantised", [False, True])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_row_without_probabilities_gives_no_token_and_becomes_inert(
    is_quantised, bad, temperature, kernels, device
):
    """NaN or +inf anywhere, or nothing but -inf; the other rows go on."""
    state = DeviceState(3, 4, torch.device(device))
    state.temperatures.fill_(temperature)
    state.positions.fill_(4)
    state.limits.fill_(100)
    state.stops.fill_(INERT)
    hidden, weight = torch.zeros(3, 32, device=device), torch.ones(150, 32, device=device)
    hidden[:, 0] = torch.tensor([1.0, bad, 2.0])
    weight[140, 0] = 0.5
    if is_quantised:
        hidden, weight = kernels.quantize(x=hidden, form=FORM), quantized(weight, HEAD_FORM)
    drawing = {"temperature": state.temperatures, "seeds": state.seeds, "positions": state.positions}
    values, indices = kernels.best_tokens(hidden=hidden, weight=weight, **drawing)
    kernels.advance(state=state, slots=torch.arange(3, device=device), values=values, indices=indices)
    assert state.positions.tolist() == [5, INERT, 5]  # by now the ring is written, too
    assert state.ring[0, 1] == NOT_FINITE and (state.ring[0, ::2] >= 0).all()


@every_twin
def test_one_logit_that_is_not_a_number_is_noticed(kernels, device):
    case = make_case(3, 150, device=device)
    case["weight"][77] = math.nan
    values, _ = kernels.best_tokens(**case)
    assert (values.amax(dim=1) == math.inf).all()


# A GPU's own.


@pytest.mark.gpu
@every_gpu_place
@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("is_quantised", [False, True])
def test_the_kernel_equals_the_spec_at_a_real_size(is_quantised, sampled, device, dtype):
    temperatures = TEMPERATURES if sampled else [0.0]
    for rows in (1, 8, 64, 256):
        case = make_case(rows, 50257, 768, dtype, device, seed=rows, temperatures=temperatures)
        case = quantised_case(case, dtype != torch.float32) if is_quantised else case
        assert_equals_spec(case, sampled=sampled)
