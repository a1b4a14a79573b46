"""The paged attention kernel against its torch spec, and the spec against a plain row-by-row computation."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from rosellm.roseinfer.kernels.table import TRITON
from rosellm.rosetrainer.paged_attention import (
    AUTOTUNE_CHOICES,
    make_autotuned_paged_attention_decode,
    paged_attention_decode,
    paged_attention_decode_ref,
)
from tests.helpers import DTYPES, LARGE
from tests.roseinfer.kernels.conftest import guarded_outputs  # noqa: F401
from tests.roseinfer.kernels.kernel_checks import (
    assert_equals_spec,
    assert_near,
    every_device,
    guarded,
    interpreted,
)
from tests.roseinfer.kernels.paged_cases import attention_by_loops, paged_case

pytestmark = guarded


def make_case(context_lens: list[int], window: int | None = None, **sizes) -> dict:
    case = paged_case(context_lens, window=window, **sizes) | {"window": window}
    case["block_table"] = case["block_table"].contiguous()
    return case | {"context_lens": case.pop("positions").contiguous()}


def random_shape(seed: int, head_dims: tuple[int, ...], block_sizes: tuple[int, ...]) -> dict:
    """Arguments of ``make_case``: up to five rows, one of them without context, in groups of heads."""
    rng = random.Random(seed)
    kv_heads, block_size = rng.choice((1, 2, 3)), rng.choice(block_sizes)
    return {
        "context_lens": [0, *(rng.randrange(4 * block_size) for _ in range(rng.randrange(5)))],
        "window": rng.choice((None, None, 1, 5)),
        "n_heads": kv_heads * rng.choice((1, 2, 4)),
        "n_kv_heads": kv_heads,
        "head_dim": rng.choice(head_dims),
        "block_size": block_size,
        "seed": seed,
    }


@pytest.mark.parametrize("seed", range(5))
def test_the_spec_is_softmax_attention_over_the_held_tokens_and_the_new_one(seed):
    case = make_case(**random_shape(seed, (8, 20, 32), (1, 2, 4)))
    lens, spec = case["context_lens"].tolist(), paged_attention_decode_ref(**case)
    assert_near(spec, attention_by_loops(case, range(len(lens)), lens, case["window"]))


@every_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
def test_the_kernel_equals_the_spec(head_dim, dtype, device):
    case = make_case([0, 1, 7, 8, 9, 19], head_dim=head_dim, block_size=8, dtype=dtype, device=device)
    assert_equals_spec("paged_attention_decode", case)


@every_device
@pytest.mark.parametrize("seed", range(8))
def test_the_kernel_equals_the_spec_over_random_shapes(seed, device):
    shape, dtype = random_shape(seed, (16, 32, 48, 64), (2, 4, 16)), DTYPES[seed % len(DTYPES)]
    assert_equals_spec("paged_attention_decode", make_case(**shape, dtype=dtype, device=device))


@every_device
def test_large_scores_do_not_overflow(device):
    case = make_case([9, 17], device=device, scale=300.0)
    assert_equals_spec("paged_attention_decode", case, tolerance=1e-3)


@interpreted
@pytest.mark.filterwarnings("ignore:overflow")
def test_the_kernel_reads_rows_that_are_far_apart():
    case = make_case([3] * 18, n_heads=1, n_kv_heads=1, far=True)
    assert_equals_spec("paged_attention_decode", case)


def first_configuration(run, quantiles):
    run()
    return [1.0] * len(quantiles)


def autotuned(device: str):
    return make_autotuned_paged_attention_decode(None if device == "cuda" else first_configuration)


@every_device
def test_the_autotuned_kernel_equals_the_fixed_one_and_tries_each_launch_once_a_shape(device):
    kernel, other = autotuned(device), autotuned(device)
    for n_shapes, n_heads in ((1, 2), (1, 2), (2, 4)):
        case = make_case([0, 5, 8], n_heads=n_heads, device=device)
        assert_near(kernel(**case), paged_attention_decode(**case))
        assert len(kernel.tuner.cache) == n_shapes
    assert [(c.num_warps, c.num_stages) for c in kernel.tuner.configs] == list(AUTOTUNE_CHOICES)
    assert not other.tuner.cache


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", LARGE)
def test_the_kernel_equals_the_spec_at_a_real_size(shape, dtype):
    rng = random.Random(0)
    lens = [0, 1, 63, 64, 65, 1023, *(rng.randrange(1024) for _ in range(58))]
    case = make_case(lens, **LARGE[shape], dtype=dtype, device="cuda")
    tuned = replace(TRITON, paged_attention_decode=autotuned("cuda"))
    for kernels in (TRITON, tuned):
        assert_equals_spec("paged_attention_decode", case, kernels=kernels)
