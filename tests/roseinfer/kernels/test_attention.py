"""Attention that appends: the spec against a plain computation, the kernels against the spec."""

from __future__ import annotations

import random

import pytest
import torch

from rosellm.errors import OptionError
from rosellm.roseinfer.kernels.attention import append_and_attend, append_and_attend_ref
from rosellm.roseinfer.kernels.attention_plan import Plan, Variant, make_plan, variant_for
from rosellm.roseinfer.kernels.ring_attention import takes
from rosellm.roseinfer.kernels.rotary import positioned_ref
from tests.helpers import DTYPES, LARGE, bits
from tests.roseinfer.kernels import kernel_checks as check
from tests.roseinfer.kernels.paged_cases import CACHES, NAN, attention_by_loops, paged_case
from tests.roseinfer.kernels.test_rotary import make_rotary

pytestmark = check.guarded
TILE = 16
WHOLE, FEW, MANY = Variant(TILE), Variant(TILE, 3), Variant(TILE, 15)
SMALL = {"n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "block_size": 16}
EDGES = [0, 1, TILE - 1, TILE, TILE + 1, -1, 4 * TILE]


def make_case(positions: list[int], *, rotary: str = "", window: int | None = None, **sizes) -> dict:
    """rotary: "" for none, "plain" or "norms"."""
    case = paged_case(positions, window=window, **sizes) | {"window": window}
    if rotary:
        norms, q = rotary == "norms", case["q"]
        dtype = case["k_cache_layer"].dtype
        case["rotary"] = make_rotary(q.shape[-1], norms, dtype, q.device, max(positions) + 1)
    return case


def assert_attends_as_specified(case: dict, variant: Variant, tolerance: float | None = None) -> None:
    """The same caches bit for bit, but for rotated keys."""
    plan, n_exact = make_plan(case["positions"], variant, case["window"]), 1 if "rotary" in case else 2
    kinds = {"written": CACHES[:-n_exact], "exact": CACHES[-n_exact:]}
    check.assert_equals_spec("append_and_attend", case, **kinds, tolerance=tolerance, plan=plan)


@pytest.mark.parametrize("rotary", ["", "plain", "norms"])
@pytest.mark.parametrize("window", [None, 1, 5])
def test_the_spec_writes_the_token_and_attends_to_its_window(window, rotary):
    case = make_case([0, 13, -1, 4, 5, 8], window=window, rotary=rotary, n_heads=4, head_dim=20)
    theirs, positions = check.copied(case), case["positions"]
    if weights := case.get("rotary"):
        for name, norm in (("q", weights.q_norm), ("k_new", weights.k_norm)):
            theirs[name] = positioned_ref(case[name], norm, positions, weights)
    expected = attention_by_loops(theirs, range(6), positions.tolist(), window)
    check.assert_near(append_and_attend_ref(**case), expected)
    assert all(torch.equal(bits(case[name]), bits(theirs[name])) for name in CACHES)


@check.every_place
@pytest.mark.parametrize(
    "variant", [WHOLE, WHOLE._replace(sort=1), FEW, MANY, Variant(TILE, 7, 4, 2), Variant(TILE, 5, lead=4)]
)
@pytest.mark.parametrize(
    ("window", "block_size"), [(None, 4), (None, 64), *((w, 16) for w in (1, 2, TILE, TILE + 1, 40))]
)
def test_the_kernel_equals_the_spec_at_the_edges_of_tiles_blocks_windows_and_pieces(
    window, block_size, variant, device, dtype
):
    positions = EDGES if window is None else [0, window - 1, window, window + TILE, -1, 63]
    shape = SMALL | {"block_size": block_size, "dtype": dtype, "device": device}
    assert_attends_as_specified(make_case(positions, window=window, **shape), variant)


@check.every_place
@pytest.mark.parametrize("variant", [WHOLE, FEW, Variant(TILE, 5, stages=4)], ids=str)
@pytest.mark.parametrize(
    ("way", "window", "head_dim"),
    [({"lanes": 1}, None, 16), ({"lanes": 1}, 20, 16), ({"dot": 1}, None, 8), ({"dot": 1}, None, 64)],
)
def test_a_head_without_a_group_may_be_scored_by_token_or_multiplied_as_groups_are(
    way, window, head_dim, variant, device, dtype
):
    shape = SMALL | {"n_heads": 1, "head_dim": head_dim, "dtype": dtype, "device": device}
    assert_attends_as_specified(make_case(EDGES, window=window, **shape), variant._replace(**way))


@check.every_place
@pytest.mark.parametrize("rotary", ["", "plain", "norms"])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 8), (1, 48), (1, 80), (2, 128), (4, 64), (8, 20)])
def test_the_kernel_takes_any_group_head_size_and_rotation(group, head_dim, rotary, device, dtype):
    shape = {"n_heads": group, "n_kv_heads": 1, "head_dim": head_dim, "block_size": 16}
    case = make_case([20, -1, 4], rotary=rotary, **shape, dtype=dtype, device=device)
    assert_attends_as_specified(case, WHOLE if group == 4 else FEW)


@check.every_place
@pytest.mark.parametrize("seed", range(5))
def test_the_kernel_equals_the_spec_over_random_shapes(seed, device, dtype):
    rng = random.Random(seed)
    kv_heads, block_size = rng.choice((1, 2, 3)), rng.choice((3, 16, 24, 64))
    shape = {"n_heads": kv_heads * rng.choice((1, 3, 5)), "n_kv_heads": kv_heads, "block_size": block_size}
    shape |= {"window": rng.choice((None, None, 9, 50)), "rotary": rng.choice(("", "plain", "norms"))}
    positions = [0, *(rng.randrange(-2, 3 * block_size) for _ in range(rng.randrange(5)))]
    places = {"head_dim": rng.choice((16, 24)), "dtype": dtype, "device": device, "seed": seed}
    places["parts"] = (1, 2, 4)[seed % 3]
    pieces, lead = rng.choice((0, 1, 5, 12)), rng.choice((0, 3))
    variant = Variant(rng.choice((16, 32)), pieces, stages=1 + seed % 2, lead=lead)
    assert_attends_as_specified(make_case(positions, **shape, **places), variant)


@check.every_device
@pytest.mark.parametrize("variant", [WHOLE, FEW], ids=str)
def test_rows_may_share_the_blocks_before_their_last(variant, device):
    case = make_case([9, 10], device=device)
    case["block_table"][1, :2] = case["block_table"][0, :2]
    assert_attends_as_specified(case, variant)


@pytest.mark.filterwarnings("ignore:invalid value")
@check.every_device
@pytest.mark.parametrize("variant", [WHOLE, FEW, MANY], ids=str)
def test_inert_rows_give_zero_and_write_nothing(variant, device):
    case = make_case([-1, -7, -(2**31)], window=9, **SMALL, device=device)
    case["q"][1], case["k_new"][1] = NAN, NAN
    before, plan = check.copied(case), make_plan(case["positions"], variant, 9)
    assert torch.equal(append_and_attend(**case, plan=plan), torch.zeros_like(case["q"]))
    assert all(torch.equal(bits(case[name]), bits(before[name])) for name in CACHES)


@check.interpreted
@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("variant", [WHOLE, Variant(TILE, 7)], ids=str)
def test_the_kernel_reads_rows_that_are_far_apart(variant):
    assert_attends_as_specified(make_case([0] * 16 + [20], far=True, **SMALL | {"n_heads": 1}), variant)


@check.every_device
@pytest.mark.parametrize("group", [1, 2])
def test_large_scores_do_not_overflow(group, device):
    for variant in (FEW, FEW._replace(lanes=1)):
        case = make_case([20, 17], **SMALL | {"n_heads": group}, device=device, scale=300.0)
        assert_attends_as_specified(case, variant, 1e-3)


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
        assert_attends_as_specified(case, variant)


def test_a_window_needs_two_boxes_in_flight():
    case = make_case([200], window=70, block_size=64, dtype=torch.bfloat16)
    with pytest.raises(OptionError, match="1 tiles of 64 tokens"):
        append_and_attend(**case, plan=Plan(Variant(64, ring=1), 70))


@pytest.mark.gpu
@pytest.mark.skipif(not check.HOPPER, reason="needs wgmma, which Hopper GPUs have")
@pytest.mark.parametrize("seed", range(40))
def test_attention_with_keys_in_flight_equals_the_spec_over_random_shapes(seed):
    draw, block_size = random.Random(seed), 64 << seed % 2
    group, head_dim = draw.choice((1, 2, 3, 6, 8, 16)), draw.choice((64, 80, 96, 128))
    n_kv = draw.randint(1, 5)
    assert takes(group, head_dim, block_size)
    edges = -1, 0, 1, 63, 64, 65, 127, 128, 129
    more = (draw.choice((draw.randint(-1, 900), draw.choice(edges))) for _ in range(draw.randint(0, 40)))
    positions = [draw.randint(0, 900), *more]
    sizes = {"n_heads": group * n_kv, "n_kv_heads": n_kv, "head_dim": head_dim, "block_size": block_size}
    sizes |= {"window": draw.choice((None, None, 1, 63, 64, 65, 200)), "parts": draw.choice((1, 1, 2, 4))}
    rotary, dtype = draw.choice(("", "plain", "norms")), (torch.bfloat16, torch.float16)[seed // 2 % 2]
    case = make_case(positions, rotary=rotary, **sizes, dtype=dtype, device="cuda", seed=seed)
    tile, stages = draw.choice(((64, 2), (64, 3), (128, 1), (128, 2), (256, 1)))
    assert_attends_as_specified(case, Variant(tile, stages=stages, ring=1))
