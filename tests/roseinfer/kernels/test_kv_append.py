"""The append kernels copy bits exactly as their spec does."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from rosellm.errors import RecipeError
from rosellm.roseinfer.kernels.table import TORCH, choose_kernels
from rosellm.roseinfer.kv_append_triton import (
    kv_append_bytes,
    kv_append_ref,
    kv_append_rows_ref,
    kv_append_triton,
    kv_append_triton_full_batch,
    kv_append_triton_identity_pos,
)
from tests.helpers import BITS, CPU, DTYPES, TRITON_DEVICES, bits


def random_bits(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    """Any bit pattern at all: NaN payloads, infinities, subnormals, negative zero."""
    limits = torch.iinfo(BITS[dtype.itemsize])
    integers = torch.randint(limits.min, limits.max, shape, generator=generator).to(BITS[dtype.itemsize])
    return integers.view(dtype)


def make_case(
    batch: int, n_heads: int, head_dim: int, block_size: int, dtype, device: str, seed: int = 0
) -> dict:
    """Caches of random bits and new tokens as slices of a fused projection; no two tokens share a slot."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    n_blocks = batch + 3
    fused = random_bits(generator, dtype, batch + 2, 3 * n_heads, head_dim).to(device)
    index = {"dtype": torch.int32, "device": device}
    return {
        "k_cache_layer": random_bits(generator, dtype, n_blocks, n_heads, block_size, head_dim).to(device),
        "v_cache_layer": random_bits(generator, dtype, n_blocks, n_heads, block_size, head_dim).to(device),
        "key_new": fused[:batch, n_heads : 2 * n_heads],
        "value_new": fused[:batch, 2 * n_heads :],
        "batch_idx": torch.tensor(rng.sample(range(batch), batch), **index),
        "block_idx": torch.tensor(rng.sample(range(n_blocks), batch), **index),
        "pos": torch.tensor([rng.randrange(block_size) for _ in range(batch)], **index),
    }


def without(case: dict, *names: str, **changes) -> dict:
    return {name: value for name, value in case.items() if name not in names} | changes


def assert_same_caches(case: dict, kernel, spec, **arguments) -> None:
    """Every slot of both caches, written or not, is bit-identical after ``kernel`` and after ``spec``."""
    mine = without(case, **arguments) | {n: case[n].clone() for n in ("k_cache_layer", "v_cache_layer")}
    theirs = mine | {n: case[n].clone() for n in ("k_cache_layer", "v_cache_layer")}
    kernel(**mine)
    spec(**theirs)
    for name in ("k_cache_layer", "v_cache_layer"):
        assert torch.equal(bits(mine[name]), bits(theirs[name]))
        assert not torch.equal(bits(mine[name]), bits(case[name]))


def append_by_loops(*, k_cache_layer, v_cache_layer, key_new, value_new, batch_idx, block_idx, pos) -> None:
    for row, block, slot in zip(batch_idx.tolist(), block_idx.tolist(), pos.tolist(), strict=True):
        for head in range(key_new.shape[1]):
            k_cache_layer[block, head, slot] = key_new[row, head]
            v_cache_layer[block, head, slot] = value_new[row, head]


def check_kernels(case: dict) -> None:
    """All three kernels against the spec."""
    rows = without(case, "batch_idx")
    pos = int(case["pos"][0])
    assert_same_caches(case, kv_append_triton, kv_append_ref)
    assert_same_caches(rows, kv_append_triton_identity_pos, kv_append_rows_ref)
    assert_same_caches(rows, kv_append_triton_full_batch, kv_append_rows_ref, pos=pos)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_specs_write_each_token_to_its_slot_and_nothing_else(dtype):
    case = make_case(5, 3, 8, 4, dtype, "cpu")
    identity = torch.arange(5, dtype=torch.int32)
    assert_same_caches(case, kv_append_ref, append_by_loops)
    rows = without(case, "batch_idx")
    assert_same_caches(rows, kv_append_rows_ref, lambda **a: append_by_loops(**a, batch_idx=identity))
    same = torch.full((5,), 2, dtype=torch.int32)
    loops = lambda **a: append_by_loops(**(a | {"pos": same}), batch_idx=identity)  # noqa: E731
    assert_same_caches(rows, kv_append_rows_ref, loops, pos=2)


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_the_generic_kernel_appends_a_subset_of_the_rows(device):
    case = make_case(7, 2, 32, 4, torch.float32, device)
    some = {name: case[name][:3] for name in ("batch_idx", "block_idx", "pos")}
    assert_same_caches(case, kv_append_triton, kv_append_ref, **some)


@pytest.mark.gpu
def test_the_kernels_reach_past_two_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 32 << 30:
        pytest.skip("needs 32 GiB of free GPU memory")
    case = make_case(4, 12, 64, 64, torch.float16, "cuda")
    n_blocks = 2**31 // (12 * 64 * 64) + 100
    caches = [torch.zeros(n_blocks, 12, 64, 64, dtype=torch.float16, device="cuda") for _ in range(2)]
    case |= {"k_cache_layer": caches[0], "v_cache_layer": caches[1]}
    case["block_idx"] = torch.arange(n_blocks - 4, n_blocks, dtype=torch.int32, device="cuda")
    check_kernels(case)


def test_bytes_of_an_append_count_a_read_and_a_write_of_key_and_value():
    assert kv_append_bytes(3, 2, 8, torch.float16) == 3 * 2 * 8 * 2 * 2 * 2


@pytest.mark.parametrize(
    ("name", "launch"),
    [("cuda", "fixed"), ("torch", "autotuned"), ("", "fixed")],
    ids=["unknown", "untunable", "empty"],
)
def test_kernels_that_cannot_be_had_are_refused(name, launch):
    with pytest.raises(RecipeError):
        choose_kernels(name, launch, CPU)


def test_a_cpu_takes_the_torch_twins_unless_asked():
    assert choose_kernels("auto", "fixed", CPU) is TORCH
