"""Attention that appends: the spec against a plain computation, the kernel against the spec."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.kernels.attention import append_and_attend_ref, make_append_and_attend, tile_for
from tests.helpers import DTYPES, TRITON_DEVICES, bits
from tests.roseinfer.kernels.kernel_checks import (
    PLACES,
    assert_near,
    assert_replays_equal_ordinary_launches,
    clones,
    guarded_outputs,  # noqa: F401
)

NAN, WILD = float("nan"), 2**30
CACHES = ("k_cache_layer", "v_cache_layer")
guarded = pytest.mark.usefixtures("guarded_outputs")


def make_case(
    positions: list[int],
    *,
    n_heads: int = 2,
    n_kv_heads: int = 2,
    head_dim: int = 32,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    scale: float = 1.0,
    tile: int | None = None,
) -> dict:
    """Random arguments: table and positions from a device state, q, k_new and v_new slices of a projection.

    Cache slots that hold no token are NaN. Table entries past the new token's block are wild; so are those of
    inert rows.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    counts = [position // block_size + 1 if position >= 0 else 0 for position in positions]
    n_blocks = sum(counts) + 2
    order = rng.sample(range(n_blocks), n_blocks)
    held = torch.zeros(n_blocks, block_size, dtype=torch.bool)
    state = DeviceState(len(positions), max(counts) + 2, torch.device(device))
    state.positions.copy_(torch.tensor(positions))
    table = torch.full(state.table.shape, WILD, dtype=torch.int32)
    for row, (position, count) in enumerate(zip(positions, counts, strict=True)):
        for i in range(count):
            table[row, i] = block = order.pop()
            held[block, : max(0, position - i * block_size)] = True
    state.table.copy_(table)
    cache = torch.randn(2, n_blocks, n_kv_heads, block_size, head_dim, generator=generator)
    cache = torch.where(held[None, :, None, :, None], cache, NAN).to(device, dtype)
    heads = n_heads, n_kv_heads, n_kv_heads
    fused = torch.randn(len(positions), sum(heads), head_dim, generator=generator).to(device, dtype)
    q, k_new, v_new = fused.split(heads, dim=1)
    return {
        "q": q,
        "k_new": k_new,
        "v_new": v_new,
        "k_cache_layer": cache[0],
        "v_cache_layer": cache[1],
        "block_table": state.table,
        "positions": state.positions,
        "scale": scale * head_dim**-0.5,
        "tile": tile or tile_for(len(positions), max(positions) + 1),
    }


def with_own_caches(case: dict) -> dict:
    return case | {name: case[name].clone() for name in CACHES}


def assert_equals_spec(case: dict, kernel=None) -> None:
    """The same output; the caches bit for bit the spec's in every slot; nothing else is written."""
    mine, theirs, before = with_own_caches(case), with_own_caches(case), clones(case)
    expected = append_and_attend_ref(**theirs)
    found = (kernel or make_append_and_attend())(**mine)
    assert expected.isfinite().all()
    assert_near(found, expected)
    for name in CACHES:
        assert torch.equal(bits(mine[name]), bits(theirs[name]))
    for name in ("q", "k_new", "v_new", "block_table", "positions"):
        assert torch.equal(case[name], before[name])


# The spec.


def append_and_attend_by_loops(case: dict) -> Tensor:
    """Writes each new key and value; then softmax attention in fp64, one sequence and head at a time."""
    block_size = case["k_cache_layer"].shape[2]
    group = case["q"].shape[1] // case["k_new"].shape[1]
    out = torch.zeros_like(case["q"])
    for row, position in enumerate(case["positions"].tolist()):
        if position < 0:
            continue
        blocks = case["block_table"][row].tolist()
        slots = [(blocks[i // block_size], i % block_size) for i in range(position + 1)]
        for head in range(case["q"].shape[1]):
            held = []
            for name, new in zip(CACHES, ("k_new", "v_new"), strict=True):
                case[name][slots[-1][0], head // group, slots[-1][1]] = case[new][row, head // group]
                cached = [case[name][block, head // group, slot] for block, slot in slots]
                held.append(torch.stack(cached).double())
            scores = held[0] @ case["q"][row, head].double() * case["scale"]
            out[row, head] = scores.softmax(dim=0) @ held[1]
    return out


@pytest.mark.parametrize("seed", range(5))
def test_the_spec_writes_the_token_and_attends_to_all_before_it_and_itself(seed):
    rng = random.Random(seed)
    kv_heads = rng.choice((1, 2, 3))
    case = make_case(
        [0, -1, *(rng.randrange(-2, 14) for _ in range(4))],
        n_heads=kv_heads * rng.choice((1, 2, 4)),
        n_kv_heads=kv_heads,
        head_dim=rng.choice((8, 20, 32)),
        block_size=rng.choice((1, 2, 4)),
        seed=seed,
    )
    mine, theirs = with_own_caches(case), with_own_caches(case)
    assert_near(append_and_attend_ref(**mine), append_and_attend_by_loops(theirs))
    for name in CACHES:
        assert torch.equal(bits(mine[name]), bits(theirs[name]))
        assert not torch.equal(bits(mine[name]), bits(case[name]))


# The kernel.


@guarded
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("block_size", [4, 64, 256])
@pytest.mark.parametrize("tile", [16, 64, 256])
def test_the_kernel_equals_the_spec_at_the_edges_of_tiles_and_blocks(tile, block_size, device, dtype):
    positions = [0, 1, tile - 1, tile, tile + 1, 2 * tile, 3 * tile + 5, -1]
    positions += [block_size - 1, block_size, block_size + 1]
    shape = {"n_heads": 1, "n_kv_heads": 1, "head_dim": 16, "block_size": block_size, "tile": tile}
    assert_equals_spec(make_case(positions, **shape, dtype=dtype, device=device, seed=tile))


@guarded
@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("rows", [1, 4, 17])
def test_the_kernel_equals_the_spec_for_any_batch(rows, device):
    rng = random.Random(rows)
    positions = [33, *(rng.randrange(-1, 20) for _ in range(rows - 1))]
    assert_equals_spec(
        make_case(positions, n_heads=1, n_kv_heads=1, head_dim=16, block_size=16, device=device)
    )


@pytest.mark.parametrize("batch", [1, 2, 8, 9, 16, 17, 128, 129, 1024])
def test_a_tile_is_a_power_of_two_and_as_long_as_it_must_be_for_few_rows(batch):
    tiles = [tile_for(batch, longest) for longest in range(1, 1025)]
    assert all(tile >= 16 and tile & (tile - 1) == 0 for tile in tiles)
    assert tiles == sorted(tiles)
    at_once = 512 if batch <= 8 else 128 if batch <= 16 else 16
    assert all(tile >= longest for longest, tile in enumerate(tiles[:at_once], 1))


@guarded
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("head_dim", [8, 48, 64, 80])
def test_the_kernel_takes_any_head_size(head_dim, device, dtype):
    shape = {"head_dim": head_dim, "block_size": 8}
    assert_equals_spec(make_case([0, 7, 9, -1, 18], **shape, dtype=dtype, device=device, seed=head_dim))


@guarded
@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize(("tile", "block_size"), [(256, 384), (64, 96), (16, 24), (16, 48), (16, 3)])
def test_the_kernel_takes_blocks_that_are_no_power_of_two(tile, block_size, device):
    rng = random.Random(tile)
    positions = [2 * block_size + 5, *(rng.randrange(2 * block_size + 40) for _ in range(4))]
    shape = {"n_heads": 1, "n_kv_heads": 1, "block_size": block_size, "tile": tile}
    assert_equals_spec(make_case(positions, **shape, device=device))


@guarded
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("seed", range(6))
def test_the_kernel_equals_the_spec_over_random_shapes(seed, device, dtype):
    rng = random.Random(seed)
    kv_heads, block_size = rng.choice((1, 2, 3)), rng.choice((2, 4, 16, 64))
    case = make_case(
        [0, *(rng.randrange(-2, 5 * block_size) for _ in range(rng.randrange(8)))],
        n_heads=kv_heads * rng.choice((1, 2, 4)),
        n_kv_heads=kv_heads,
        head_dim=rng.choice((16, 20, 32, 64)),
        block_size=block_size,
        dtype=dtype,
        device=device,
        seed=seed,
        tile=rng.choice((None, 16, 32, 128)),
    )
    assert_equals_spec(case)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("group", [1, 2, 4])
def test_query_heads_read_the_key_head_of_their_group(group, device):
    case = make_case([5, 9], n_heads=2 * group, n_kv_heads=2, device=device)
    repeated = [case[name].repeat_interleave(group, dim=1) for name in ("k_new", "v_new")]
    fused = torch.cat((case["q"], *repeated), dim=1)
    q, k_new, v_new = fused.split(2 * group, dim=1)
    each = case | {"q": q, "k_new": k_new, "v_new": v_new}
    each |= {name: case[name].repeat_interleave(group, dim=1) for name in CACHES}
    append_and_attend = make_append_and_attend()
    torch.testing.assert_close(append_and_attend(**case), append_and_attend(**each), rtol=0, atol=1e-6)


@guarded
@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_inert_rows_give_zero_and_write_nothing(device):
    case = make_case([-1, -7, -(2**31)], device=device)
    before = with_own_caches(case)
    assert torch.equal(make_append_and_attend()(**case), torch.zeros_like(case["q"]))
    for name in CACHES:
        assert torch.equal(bits(case[name]), bits(before[name]))


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_rows_may_share_the_blocks_before_their_last(device):
    case = make_case([9, 10], block_size=4, device=device)
    case["block_table"][1, :2] = case["block_table"][0, :2]
    assert_equals_spec(case)


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_tokens_appended_one_after_the_other_are_read_back(device):
    """Ten tokens from an empty cache on, an inert row between: as attention over all of them at once."""
    append_and_attend = make_append_and_attend()
    whole = make_case([10, -1, 10], block_size=4, device=device)
    shape = {"n_heads": 2, "n_kv_heads": 2, "device": device}
    caches = {name: torch.full_like(whole[name], NAN) for name in CACHES}
    for position in range(10):
        case = make_case([position, -1, position], **shape, seed=position) | caches
        append_and_attend(**case | {"block_table": whole["block_table"]})
    expected = append_and_attend_ref(**whole | {name: caches[name].clone() for name in CACHES})
    assert expected.isfinite().all()
    assert_near(append_and_attend(**whole | caches), expected)
    filled = (~caches["k_cache_layer"].isnan()).all(dim=(1, 3)).sum().item()
    assert filled == 2 * 11


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_large_scores_do_not_overflow(device):
    case = make_case([9, 17], device=device, scale=300.0)
    spec = append_and_attend_ref(**with_own_caches(case))
    torch.testing.assert_close(make_append_and_attend()(**case), spec, rtol=1e-3, atol=1e-3)


# A GPU's own.

LARGE = {
    "gpt2": {"n_heads": 12, "n_kv_heads": 12, "head_dim": 64, "block_size": 64},
    "gqa": {"n_heads": 32, "n_kv_heads": 8, "head_dim": 128, "block_size": 16},
    "odd": {"n_heads": 25, "n_kv_heads": 5, "head_dim": 80, "block_size": 32},
}


@guarded
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize("rows", [1, 8, 64, 256])
def test_the_kernel_equals_the_spec_at_a_real_size(rows, shape, dtype):
    rng = random.Random(rows)
    positions = [1023, 0, 1, 63, 64, 65, -1, *(rng.randrange(-1, 1024) for _ in range(rows))][:rows]
    assert_equals_spec(make_case(positions, **LARGE[shape], dtype=dtype, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [2, 8])
def test_dependent_launches_in_a_replayed_graph_equal_ordinary_ones(rows, dtype):
    """Two layers of projection and attention; each replay starts from the same caches."""
    heads, width = LARGE["gpt2"]["n_heads"], 768
    positions = [700, 64, 63, 0, -1, 1, 300, 128][:rows]
    case = make_case(positions, **LARGE["gpt2"], dtype=dtype, device="cuda")
    start = with_own_caches(case)
    x = torch.zeros(rows, width, device="cuda", dtype=dtype)
    weight = torch.randn(3 * width, width, device="cuda").to(dtype) / width**0.5
    bias = torch.zeros(3 * width, device="cuda", dtype=dtype)

    def refill(seed: int) -> None:
        x.copy_(torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)))
        for name in CACHES:
            case[name].copy_(start[name])

    def chain(kernels) -> tuple[Tensor, ...]:
        def layer(hidden: Tensor) -> Tensor:
            qkv = kernels.few_rows_linear(x=hidden, weight=weight, bias=bias).view(rows, 3 * heads, -1)
            q, k_new, v_new = qkv.split(heads, dim=1)
            mixed = kernels.append_and_attend(**case | {"q": q, "k_new": k_new, "v_new": v_new})
            return mixed.view(rows, width)

        first = layer(x)
        second = layer(first)
        return first, second, *(torch.nan_to_num(case[name]).flatten(1) for name in CACHES)

    assert_replays_equal_ordinary_launches(chain, refill)
