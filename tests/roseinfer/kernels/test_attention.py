"""Attention that appends: the spec against a plain computation, the kernels against the spec."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from rosellm.errors import OptionError
from rosellm.models.rope import Rotary
from rosellm.roseinfer.cache.device_state import DeviceState
from rosellm.roseinfer.kernels.attention import append_and_attend, append_and_attend_ref
from rosellm.roseinfer.kernels.attention_plan import Variant, make_plan, make_plan_ref, variant_for
from rosellm.roseinfer.kernels.rotary import positioned_ref
from tests.helpers import DTYPES, LARGE, TRITON_DEVICES, bits
from tests.roseinfer.kernels.kernel_checks import (
    PLACES,
    TOLERANCE,
    assert_near,
    clones,
    guarded_outputs,  # noqa: F401
)
from tests.roseinfer.kernels.test_large_offsets import far_apart, interpreted

NAN, WILD = float("nan"), 2**30
CACHES = ("k_cache_layer", "v_cache_layer")
guarded = pytest.mark.usefixtures("guarded_outputs")
TILE = 16
WHOLE, FEW, MANY = Variant(TILE), Variant(TILE, 3), Variant(TILE, 29)
SMALL = {"n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "block_size": 16}


def make_rotary(n_positions: int, head_dim: int, norms: bool, like: Tensor) -> Rotary:
    generator = torch.Generator().manual_seed(head_dim)
    angles = 10 * torch.rand(n_positions, head_dim // 2, generator=generator)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(like.device)
    weights = 0.5 + torch.rand(2, head_dim, generator=generator).to(like)
    return Rotary(cos_sin, *(weights if norms else (None, None)), eps=1e-5)


def make_case(
    positions: list[int],
    *,
    window: int | None = None,
    rotary: str = "",
    n_heads: int = 2,
    n_kv_heads: int = 2,
    head_dim: int = 32,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    scale: float = 1.0,
) -> dict:
    """Random arguments: table and positions from a device state, q, k_new and v_new slices of a projection.

    Cache slots that hold no token of a row's window are NaN. Table entries past the new token's block are
    wild; so are those before the window and of inert rows. rotary: "" for none, "plain" or "norms".
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
        first = 0 if window is None else max(0, position - window + 1)
        for i in range(count):
            block, left = order.pop(), first - i * block_size
            held[block, max(0, left) : max(0, position - i * block_size)] = True
            table[row, i] = block if left < block_size else WILD
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
        "window": window,
        "rotary": make_rotary(max(positions) + 1, head_dim, rotary == "norms", q) if rotary else None,
    }


def with_own_caches(case: dict) -> dict:
    return case | {name: case[name].clone() for name in CACHES}


def assert_same_slots(mine: Tensor, theirs: Tensor, exact: bool) -> None:
    if exact:
        assert torch.equal(bits(mine), bits(theirs))
    else:
        tolerance = TOLERANCE[mine.dtype]
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


def assert_equals_spec(case: dict, variant: Variant) -> None:
    """The same output and the same caches, bit for bit but for rotated keys; nothing else is written."""
    mine, theirs = with_own_caches(case), with_own_caches(case)
    before = clones(case)
    expected = append_and_attend_ref(**theirs)
    plan = make_plan(case["positions"], variant, case["window"])
    found = append_and_attend(**mine, plan=plan)
    assert expected.isfinite().all()
    assert_near(found, expected)
    assert_same_slots(mine["k_cache_layer"], theirs["k_cache_layer"], exact=case["rotary"] is None)
    assert_same_slots(mine["v_cache_layer"], theirs["v_cache_layer"], exact=True)
    for name in ("q", "k_new", "v_new", "block_table", "positions"):
        assert torch.equal(case[name], before[name])


# The spec.


def append_and_attend_by_loops(case: dict) -> Tensor:
    """Writes each new key and value; then softmax attention in fp64, one sequence and head at a time."""
    block_size, window = case["k_cache_layer"].shape[2], case["window"]
    group, out = case["q"].shape[1] // case["k_new"].shape[1], torch.zeros_like(case["q"])
    q, k_new = case["q"], case["k_new"]
    if rotary := case["rotary"]:
        q, k_new = (
            positioned_ref(heads, norm, case["positions"], rotary)
            for heads, norm in ((q, rotary.q_norm), (k_new, rotary.k_norm))
        )
    for row, position in enumerate(case["positions"].tolist()):
        if position < 0:
            continue
        blocks, first = case["block_table"][row].tolist(), max(0, position - window + 1) if window else 0
        slots = [(blocks[i // block_size], i % block_size) for i in range(first, position + 1)]
        for head in range(q.shape[1]):
            held = []
            for name, new in zip(CACHES, (k_new, case["v_new"]), strict=True):
                case[name][slots[-1][0], head // group, slots[-1][1]] = new[row, head // group]
                held.append(torch.stack([case[name][block, head // group, i] for block, i in slots]).double())
            scores = held[0] @ q[row, head].double() * case["scale"]
            out[row, head] = scores.softmax(dim=0) @ held[1]
    return out


@pytest.mark.parametrize("rotary", ["", "plain", "norms"])
@pytest.mark.parametrize("window", [None, 1, 5])
def test_the_spec_writes_the_token_and_attends_to_its_window(window, rotary):
    case = make_case([0, 13, -1, 4, 5, 8], window=window, rotary=rotary, n_heads=4, head_dim=20)
    mine, theirs = with_own_caches(case), with_own_caches(case)
    assert_near(append_and_attend_ref(**mine), append_and_attend_by_loops(theirs))
    for name in CACHES:
        assert torch.equal(bits(mine[name]), bits(theirs[name]))


def test_a_plan_for_another_window_is_refused():
    case = make_case([3], window=2, **SMALL)
    plan = make_plan_ref(case["positions"], WHOLE, 3)
    with pytest.raises(OptionError, match="window 3"):
        append_and_attend(**case, plan=plan)


# The kernels.


@guarded
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(
    "variant", [WHOLE, FEW, MANY, Variant(TILE, 7, 4, 2), Variant(TILE, 5, lead=4)], ids=str
)
@pytest.mark.parametrize("block_size", [4, 64])
def test_the_kernel_equals_the_spec_at_the_edges_of_tiles_blocks_and_pieces(
    block_size, variant, device, dtype
):
    positions = [0, 1, TILE - 1, TILE, TILE + 1, 3 * TILE, -1, 5 * TILE + 1, 64, 65]
    shape = SMALL | {"block_size": block_size}
    assert_equals_spec(make_case(positions, **shape, dtype=dtype, device=device), variant)


@guarded
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("variant", [WHOLE, FEW, Variant(TILE, 5, stages=4)], ids=str)
@pytest.mark.parametrize(
    ("way", "window", "head_dim"),
    [({"lanes": 1}, None, 16), ({"lanes": 1}, 20, 16), ({"dot": 1}, None, 8), ({"dot": 1}, None, 64)],
)
def test_a_head_without_a_group_may_be_scored_by_token_or_multiplied_as_groups_are(
    way, window, head_dim, variant, device, dtype
):
    positions = [0, 1, TILE - 1, TILE, TILE + 1, -1, 5 * TILE + 1]
    shape = SMALL | {"n_heads": 1, "head_dim": head_dim, "dtype": dtype, "device": device}
    assert_equals_spec(make_case(positions, window=window, **shape), variant._replace(**way))


@guarded
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("variant", [WHOLE, FEW], ids=str)
@pytest.mark.parametrize("window", [1, 2, TILE, TILE + 1, 40])
def test_the_kernel_reads_no_key_before_the_window(window, variant, device, dtype):
    positions = [0, window - 1, window, window + TILE, 70, -1, 63, 64]
    assert_equals_spec(make_case(positions, window=window, **SMALL, dtype=dtype, device=device), variant)


@guarded
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("rotary", ["", "plain", "norms"])
@pytest.mark.parametrize(
    ("group", "head_dim"), [(1, 8), (1, 48), (1, 80), (2, 128), (4, 16), (4, 64), (8, 20)]
)
def test_the_kernel_takes_any_group_head_size_and_rotation(group, head_dim, rotary, device, dtype):
    shape = {"n_heads": 2 * group, "n_kv_heads": 2, "head_dim": head_dim, "block_size": 16}
    case = make_case([33, -1, 4], rotary=rotary, **shape, dtype=dtype, device=device)
    assert_equals_spec(case, WHOLE if group == 4 else FEW)


@guarded
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("seed", range(6))
def test_the_kernel_equals_the_spec_over_random_shapes(seed, device, dtype):
    rng = random.Random(seed)
    kv_heads, block_size = rng.choice((1, 2, 3)), rng.choice((3, 16, 24, 64))
    case = make_case(
        [0, *(rng.randrange(-2, 4 * block_size) for _ in range(rng.randrange(6)))],
        window=rng.choice((None, None, 9, 50)),
        rotary=rng.choice(("", "plain", "norms")),
        n_heads=kv_heads * rng.choice((1, 3, 5)),
        n_kv_heads=kv_heads,
        head_dim=rng.choice((16, 24)),
        block_size=block_size,
        dtype=dtype,
        device=device,
        seed=seed,
    )
    pieces, lead = rng.choice((0, 1, 5, 12)), rng.choice((0, 3))
    assert_equals_spec(case, Variant(rng.choice((16, 32)), pieces, stages=1 + seed % 2, lead=lead))


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("variant", [WHOLE, FEW], ids=str)
def test_rows_may_share_the_blocks_before_their_last(variant, device):
    case = make_case([9, 10], block_size=4, device=device)
    case["block_table"][1, :2] = case["block_table"][0, :2]
    assert_equals_spec(case, variant)


@pytest.mark.filterwarnings("ignore:invalid value")
@guarded
@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("variant", [WHOLE, FEW, MANY], ids=str)
def test_inert_rows_give_zero_and_write_nothing(variant, device):
    case = make_case([-1, -7, -(2**31)], window=9, **SMALL, device=device)
    case["q"][1], case["k_new"][1] = NAN, NAN
    before, plan = with_own_caches(case), make_plan(case["positions"], variant, 9)
    assert torch.equal(append_and_attend(**case, plan=plan), torch.zeros_like(case["q"]))
    for name in CACHES:
        assert torch.equal(bits(case[name]), bits(before[name]))


@interpreted
@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("variant", [WHOLE, Variant(TILE, 7)], ids=str)
def test_the_kernel_reads_rows_that_are_far_apart(variant, tmp_path):
    positions = [0] * 17 + [40]
    case = make_case(positions, **SMALL | {"n_heads": 1})
    fused = torch.cat([case[name] for name in ("q", "k_new", "v_new")], dim=1)
    apart = dict(zip(("q", "k_new", "v_new"), far_apart(tmp_path, fused).split(1, dim=1), strict=True))
    assert_equals_spec(case | apart, variant)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("group", [1, 2])
def test_large_scores_do_not_overflow(group, device):
    case = make_case([40, 17], **SMALL | {"n_heads": group}, device=device, scale=300.0)
    spec = append_and_attend_ref(**with_own_caches(case))
    for variant in (FEW, FEW._replace(lanes=1)):
        plan = make_plan(case["positions"], variant)
        found = append_and_attend(**with_own_caches(case), plan=plan)
        torch.testing.assert_close(found, spec, rtol=1e-3, atol=1e-3)


# A GPU's own.


@guarded
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_the_kernel_equals_the_spec_at_a_real_size(rows, shape, dtype):
    rng = random.Random(rows)
    positions = [1023, 0, 1, 63, 64, 65, -1, *(rng.randrange(-1, 1024) for _ in range(rows))][:rows]
    group = shape["n_heads"] // shape["n_kv_heads"]
    chosen = variant_for(rows, shape["n_kv_heads"], 1024, 132, group=group, head_dim=shape["head_dim"])
    others = Variant(32, lanes=1), Variant(64, 40), Variant(32, 66, 4, 3), Variant(32, 20, 1, 4, dot=1)
    for variant in (chosen, *others):
        case = make_case(positions, rotary="norms", window=700, **shape, dtype=dtype, device="cuda")
        assert_equals_spec(case, variant)
