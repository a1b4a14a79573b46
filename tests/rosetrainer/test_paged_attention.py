"""The paged attention kernel against its torch spec, and the spec against a plain row-by-row computation."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from rosellm.rosetrainer.paged_attention import (
    AUTOTUNE_CHOICES,
    make_autotuned_paged_attention_decode,
    paged_attention_decode,
    paged_attention_decode_ref,
)
from tests.helpers import DTYPES, LARGE, TRITON_DEVICES
from tests.roseinfer.kernels.kernel_checks import guarded_outputs  # noqa: F401

NAN = float("nan")
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 1e-2},
}


def make_case(
    context_lens: list[int],
    *,
    n_heads: int = 2,
    n_kv_heads: int = 2,
    head_dim: int = 32,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    scale: float = 1.0,
) -> dict:
    """Random arguments. Cache slots that hold no token are NaN, table entries past a context are wild.

    q, k_new and v_new are slices of a fused projection.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch = len(context_lens)
    counts = [-(-n // block_size) for n in context_lens]
    n_blocks = sum(counts) + 2
    order = rng.sample(range(n_blocks), n_blocks)
    table = torch.full((batch, max(counts) + 2), 2**30, dtype=torch.int32)
    cache = torch.randn(2, n_blocks, n_kv_heads, block_size, head_dim, generator=generator)
    held = torch.zeros(n_blocks, block_size, dtype=torch.bool)
    for row, (n, count) in enumerate(zip(context_lens, counts, strict=True)):
        for i in range(count):
            table[row, i] = block = order.pop()
            held[block, : n - i * block_size] = True
    cache = torch.where(held[None, :, None, :, None], cache, NAN).to(device, dtype)
    fused = torch.randn(batch, n_heads + 2 * n_kv_heads, head_dim, generator=generator).to(device, dtype)
    q, k_new, v_new = fused.split((n_heads, n_kv_heads, n_kv_heads), dim=1)
    return {
        "q": q,
        "k_new": k_new,
        "v_new": v_new,
        "k_cache_layer": cache[0],
        "v_cache_layer": cache[1],
        "block_table": table.to(device),
        "context_lens": torch.tensor(context_lens, dtype=torch.int32, device=device),
        "scale": scale * head_dim**-0.5,
    }


def row_by_row(case: dict) -> Tensor:
    """Ordinary softmax attention in fp64, one sequence and head at a time."""
    q, k_new, v_new = (case[name].cpu().double() for name in ("q", "k_new", "v_new"))
    caches = [case[name].cpu().double() for name in ("k_cache_layer", "v_cache_layer")]
    group, block_size = q.shape[1] // k_new.shape[1], caches[0].shape[2]
    out = torch.empty_like(q)
    for row, n in enumerate(case["context_lens"].tolist()):
        slots = [(int(case["block_table"][row, i // block_size]), i % block_size) for i in range(n)]
        for head in range(q.shape[1]):
            kv_head = head // group
            keys, values = (
                torch.stack([cache[block, kv_head, pos] for block, pos in slots] + [new[row, kv_head]])
                for cache, new in zip(caches, (k_new, v_new), strict=True)
            )
            out[row, head] = (keys @ q[row, head] * case["scale"]).softmax(dim=0) @ values
    return out


def assert_equals_spec(kernel, case: dict) -> None:
    out = kernel(**case)
    spec = paged_attention_decode_ref(**case)
    assert out.shape == case["q"].shape and out.dtype == case["q"].dtype
    assert torch.isfinite(spec).all()
    torch.testing.assert_close(out, spec, **TOLERANCE[out.dtype])


def random_shape(seed: int, head_dims: tuple[int, ...], block_sizes: tuple[int, ...]) -> dict:
    """Arguments of ``make_case``: up to five rows, one of them without context, in groups of heads."""
    rng = random.Random(seed)
    kv_heads, block_size = rng.choice((1, 2, 3)), rng.choice(block_sizes)
    return {
        "context_lens": [0, *(rng.randrange(4 * block_size) for _ in range(rng.randrange(5)))],
        "n_heads": kv_heads * rng.choice((1, 2, 4)),
        "n_kv_heads": kv_heads,
        "head_dim": rng.choice(head_dims),
        "block_size": block_size,
        "seed": seed,
    }


@pytest.mark.parametrize("seed", range(5))
def test_the_spec_is_softmax_attention_over_the_held_tokens_and_the_new_one(seed):
    case = make_case(**random_shape(seed, (8, 20, 32), (1, 2, 4)))
    spec = paged_attention_decode_ref(**case).double()
    torch.testing.assert_close(spec, row_by_row(case), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
def test_the_kernel_equals_the_spec(guarded_outputs, head_dim, dtype, device):
    edges = [0, 1, 7, 8, 9, 19]
    case = make_case(edges, head_dim=head_dim, block_size=8, dtype=dtype, device=device, seed=head_dim)
    assert_equals_spec(paged_attention_decode, case)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("seed", range(8))
def test_the_kernel_equals_the_spec_over_random_shapes(guarded_outputs, seed, device):
    shape, dtype = random_shape(seed, (16, 32, 48, 64), (2, 4, 16)), DTYPES[seed % len(DTYPES)]
    assert_equals_spec(paged_attention_decode, make_case(**shape, dtype=dtype, device=device))


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_large_scores_do_not_overflow_and_the_kernel_writes_nothing_but_its_output(device):
    case = make_case([9, 17], device=device, scale=300.0)
    before = {name: value.clone() for name, value in case.items() if isinstance(value, Tensor)}
    spec = paged_attention_decode_ref(**case)
    torch.testing.assert_close(paged_attention_decode(**case), spec, rtol=1e-3, atol=1e-3)
    for name, value in before.items():
        torch.testing.assert_close(case[name], value, rtol=0, atol=0, equal_nan=True)


def first_configuration(run, quantiles):
    run()
    return [1.0] * len(quantiles)


def autotuned(device: str):
    return make_autotuned_paged_attention_decode(None if device == "cuda" else first_configuration)


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_the_autotuned_kernel_equals_the_fixed_one_and_tries_each_launch_once_a_shape(
    guarded_outputs, device
):
    kernel, other = autotuned(device), autotuned(device)
    for n_shapes, n_heads in ((1, 2), (1, 2), (2, 4)):
        case = make_case([0, 5, 8], n_heads=n_heads, device=device)
        torch.testing.assert_close(kernel(**case), paged_attention_decode(**case), rtol=1e-5, atol=1e-5)
        assert len(kernel.tuner.cache) == n_shapes
    assert [(c.num_warps, c.num_stages) for c in kernel.tuner.configs] == list(AUTOTUNE_CHOICES)
    assert not other.tuner.cache


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", LARGE)
def test_the_kernel_equals_the_spec_at_a_real_size(guarded_outputs, shape, dtype):
    rng = random.Random(0)
    lens = [0, 1, 63, 64, 65, 1023, *(rng.randrange(1024) for _ in range(58))]
    case = make_case(lens, **LARGE[shape], dtype=dtype, device="cuda")
    assert_equals_spec(paged_attention_decode, case)
    assert_equals_spec(autotuned("cuda"), case)
