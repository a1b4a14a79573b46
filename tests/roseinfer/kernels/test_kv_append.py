"""The append kernels copy bits exactly as their specs do, which ``tests/ladder/test_append.py`` tests."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from rosellm.errors import RecipeError
from rosellm.roseinfer.kernels.table import choose_kernels
from tests.helpers import BITS, CPU, DTYPES
from tests.roseinfer.kernels.kernel_checks import assert_equals_spec, copied, every_device
from tests.roseinfer.kernels.paged_cases import CACHES

NAMES = ("kv_append", "kv_append_identity_pos", "kv_append_full_batch")


def random_bits(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    """Any bit pattern at all: NaN payloads, infinities, subnormals, negative zero."""
    limits = torch.iinfo(BITS[dtype.itemsize])
    integers = torch.randint(limits.min, limits.max, shape, generator=generator).to(BITS[dtype.itemsize])
    return integers.view(dtype)


def make_case(
    name: str, batch: int, n_heads: int, head_dim: int, block_size: int, dtype=torch.float32, device="cpu"
) -> dict:
    """Arguments of the kernel ``name``: caches of random bits, new tokens as slices of a fused projection.

    No two tokens share a slot.
    """
    rng, generator, n_blocks = random.Random(batch), torch.Generator().manual_seed(batch), batch + 3
    fused = random_bits(generator, dtype, batch + 2, 3 * n_heads, head_dim).to(device)
    index = {"dtype": torch.int32, "device": device}
    slots = [rng.randrange(block_size) for _ in range(batch)]
    case = {
        one: random_bits(generator, dtype, n_blocks, n_heads, block_size, head_dim).to(device)
        for one in CACHES
    }
    case |= {"key_new": fused[:batch, n_heads : 2 * n_heads], "value_new": fused[:batch, 2 * n_heads :]}
    case |= {"block_idx": torch.tensor(rng.sample(range(n_blocks), batch), **index)}
    case["pos"] = slots[0] if name == "kv_append_full_batch" else torch.tensor(slots, **index)
    rows = {"batch_idx": torch.tensor(rng.sample(range(batch), batch), **index)}
    return case | (rows if name == "kv_append" else {})


@every_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("batch", "n_heads", "head_dim"), [(1, 1, 1), (5, 3, 20), (7, 2, 32)])
def test_the_kernels_equal_their_specs(batch, n_heads, head_dim, name, dtype, device):
    case = make_case(name, batch, n_heads, head_dim, 4, dtype, device)
    some = {one: case[one][:3] for one in ("batch_idx", "block_idx", "pos") if name == "kv_append"}
    assert_equals_spec(name, copied(case) | some, exact=CACHES)  # a subset of the rows
    assert_equals_spec(name, case, exact=CACHES)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_reach_past_two_to_the_31_elements(name):
    if torch.cuda.mem_get_info()[0] < 32 << 30:
        pytest.skip("needs 32 GiB of free GPU memory")
    case = make_case(name, 4, 12, 64, 64, torch.float16, "cuda")
    n_blocks = 2**31 // (12 * 64 * 64) + 100
    caches = {one: torch.zeros(n_blocks, 12, 64, 64, dtype=torch.float16, device="cuda") for one in CACHES}
    blocks = torch.arange(n_blocks - 4, n_blocks, dtype=torch.int32, device="cuda")
    assert_equals_spec(name, case | caches | {"block_idx": blocks}, exact=CACHES)


@pytest.mark.parametrize(("name", "launch"), [("cuda", "fixed"), ("torch", "autotuned"), ("", "fixed")])
def test_kernels_that_cannot_be_had_are_refused(name, launch):
    with pytest.raises(RecipeError):
        choose_kernels(name, launch, CPU)
