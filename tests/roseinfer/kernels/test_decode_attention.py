"""Decode attention in equal pieces: plans cover all tiles, the spec is right, the kernels equal the spec."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from rosellm.errors import OptionError
from rosellm.roseinfer.kernels.decode_attention import (
    Rotary,
    Variant,
    append_and_attend_ref,
    make_append_and_attend,
    make_plan_ref,
    make_planner,
    turn,
    variant_for,
)
from rosellm.roseinfer.kernels.table import TRITON_DEPENDENT
from tests.helpers import DTYPES, TRITON_DEVICES, bits
from tests.roseinfer.kernels import test_attention
from tests.roseinfer.kernels.kernel_checks import (
    PLACES,
    TOLERANCE,
    assert_near,
    assert_replays_equal_ordinary_launches,
    clones,
    guarded_outputs,  # noqa: F401
)
from tests.roseinfer.kernels.test_attention import CACHES, LARGE, NAN, WILD, with_own_caches
from tests.roseinfer.kernels.test_large_offsets import far_apart, interpreted

guarded = pytest.mark.usefixtures("guarded_outputs")
TILE = 16
WHOLE, FEW, MANY = Variant(TILE), Variant(TILE, 3), Variant(TILE, 29)
SMALL = {"n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "block_size": 16}


def make_rotary(n_positions: int, head_dim: int, norms: bool, like: Tensor) -> Rotary:
    generator = torch.Generator().manual_seed(head_dim)
    angles = 10 * torch.rand(n_positions, head_dim // 2, generator=generator)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(like.device)
    weights = 0.5 + torch.rand(2, head_dim, generator=generator).to(like)
    return Rotary(cos_sin, *weights, eps=1e-5) if norms else Rotary(cos_sin)


def make_case(positions: list[int], *, window: int = 0, rotary: str = "", **options) -> dict:
    """As ``test_attention.make_case``; cached tokens before the window are NaN, and their blocks wild.

    rotary: "" for none, "plain" or "norms".
    """
    case = test_attention.make_case(positions, **options)
    del case["tile"]
    block_size, head_dim = case["k_cache_layer"].shape[2:]
    for row, position in enumerate(positions if window else ()):
        left = max(0, position - window + 1)
        block, slots = divmod(left, block_size)
        held = case["block_table"][row, block]
        case["block_table"][row, :block] = WILD
        for name in CACHES if left else ():
            case[name][held, :, :slots] = NAN
    case["window"] = window
    if rotary:
        case["rotary"] = make_rotary(max(positions) + 1, head_dim, rotary == "norms", case["q"])
    return case


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
    plan = make_planner()(case["positions"], variant, case["window"])
    found = make_append_and_attend()(**mine, plan=plan)
    assert expected.isfinite().all()
    assert_near(found, expected)
    assert_same_slots(mine["k_cache_layer"], theirs["k_cache_layer"], exact="rotary" not in case)
    assert_same_slots(mine["v_cache_layer"], theirs["v_cache_layer"], exact=True)
    for name in ("q", "k_new", "v_new", "block_table", "positions"):
        assert torch.equal(case[name], before[name])


# The spec.


def test_turned_heads_are_those_of_transformers():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    positions, q, k = torch.tensor([0, 7, 3]), torch.randn(3, 4, 20), torch.randn(3, 2, 20)
    rotary, norms = make_rotary(9, 20, True, q), [Qwen3RMSNorm(20, eps=1e-5) for _ in range(2)]
    cos, sin = (half.repeat(1, 2) for half in rotary.cos_sin[positions].chunk(2, dim=1))
    weights = rotary.q_norm, rotary.k_norm
    for normalised in (False, True):
        before = q, k
        if normalised:
            for norm, weight in zip(norms, weights, strict=True):
                norm.weight.data.copy_(weight)
            before = tuple(norm(x).detach() for norm, x in zip(norms, before, strict=True))
        expected = apply_rotary_pos_emb(*before, cos, sin)
        for x, weight, theirs in zip((q, k), weights, expected, strict=True):
            torch.testing.assert_close(turn(x, weight if normalised else None, rotary, positions), theirs)


def append_and_attend_by_loops(case: dict) -> Tensor:
    """Writes each new key and value; then softmax attention in fp64, one sequence and head at a time."""
    block_size, window = case["k_cache_layer"].shape[2], case["window"]
    group, out = case["q"].shape[1] // case["k_new"].shape[1], torch.zeros_like(case["q"])
    q, k_new = case["q"], case["k_new"]
    if "rotary" in case:
        rotary, positions = case["rotary"], case["positions"]
        q, k_new = turn(q, rotary.q_norm, rotary, positions), turn(k_new, rotary.k_norm, rotary, positions)
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
@pytest.mark.parametrize("window", [0, 1, 5])
def test_the_spec_writes_the_token_and_attends_to_its_window(window, rotary):
    case = make_case([0, 13, -1, 4, 5, 8], window=window, rotary=rotary, n_heads=4, head_dim=20)
    mine, theirs = with_own_caches(case), with_own_caches(case)
    assert_near(append_and_attend_ref(**mine), append_and_attend_by_loops(theirs))
    for name in CACHES:
        assert torch.equal(bits(mine[name]), bits(theirs[name]))


# The plan.

some_positions = st.lists(st.integers(-3, 300), min_size=1, max_size=12)


def tiles_of(position: int, tile: int, window: int) -> int:
    """Counted one key at a time."""
    keys = range(max(0, position - window + 1) if window else 0, max(position, 0))
    return max(1, len({key // tile for key in keys}))


@settings(max_examples=60, deadline=None)
@given(some_positions, st.integers(1, 40), st.sampled_from((16, 64)), st.sampled_from((0, 1, 40, 64)))
def test_pieces_hold_every_tile_once_and_differ_by_one_at_the_most(positions, pieces, tile, window):
    plan = make_plan_ref(torch.tensor(positions, dtype=torch.int32), Variant(tile, pieces), window)
    counts = [tiles_of(position, tile, window) for position in positions]
    tiles = [(row, i) for row, count in enumerate(counts) for i in range(count)]
    index = {place: i for i, place in enumerate((*tiles, (len(positions), 0)))}
    starts = [index[tuple(place)] for place in plan.starts.tolist()]
    sizes = [stop - start for start, stop in zip(starts, starts[1:], strict=False)]
    assert starts[0] == 0 and starts[-1] == len(tiles)
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 0
    owners = [piece for piece, size in enumerate(sizes) for _ in range(size)]
    mine = [[owners[index[row, 0]], owners[index[row, count - 1]]] for row, count in enumerate(counts)]
    assert plan.covers.tolist() == mine
    assert all(sizes[piece] for first, last in mine for piece in range(first, last + 1))


@pytest.mark.parametrize("device", TRITON_DEVICES)
@settings(max_examples=40, deadline=None)
@given(some_positions, st.integers(1, 200), st.sampled_from((16, 64)), st.sampled_from((0, 1, 40)))
def test_the_plan_kernel_equals_its_spec(device, positions, pieces, tile, window):
    strided = torch.full((len(positions), 3), WILD, dtype=torch.int32, device=device)
    strided[:, 1] = torch.tensor(positions)
    arguments = strided[:, 1], Variant(tile, pieces), window
    found, expected = make_planner()(*arguments), make_plan_ref(*arguments)
    assert torch.equal(found.starts, expected.starts) and torch.equal(found.covers, expected.covers)


@guarded
@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_a_plan_of_long_contexts_does_not_overflow(device):
    positions = torch.full((40,), 2**28, dtype=torch.int32, device=device)
    positions[7], variant = -(2**31), Variant(16, 133)
    found, expected = make_planner()(positions, variant, 0), make_plan_ref(positions, variant, 0)
    assert torch.equal(found.starts, expected.starts) and torch.equal(found.covers, expected.covers)


def test_whole_rows_need_no_plan():
    for make in (make_planner(), make_plan_ref):
        plan = make(torch.tensor([5, 9], dtype=torch.int32), WHOLE, 4)
        assert plan.starts is None and plan.covers is None and not plan.variant.combine


# Variants.


@pytest.mark.parametrize("rows", [1, 8, 64, 256, 1024])
@pytest.mark.parametrize("kv_heads", [1, 8, 12])
def test_a_variant_is_chosen_for_any_step_and_can_be_told_by_its_text(rows, kv_heads):
    for longest in (0, 1, 300, 1000, 32000):
        for group, head_dim in ((1, 64), (2, 128), (4, 64), (4, 128)):
            variant = variant_for(rows, kv_heads, longest, 132, group=group, head_dim=head_dim)
            assert variant.tile >= 16 and variant.tile.bit_count() == variant.warps.bit_count() == 1
            assert Variant.parse(str(variant)) == variant
            assert variant.pieces <= max(rows * -(-2 * max(longest, 1) // variant.tile), 1)


def test_a_long_context_is_spread_over_the_whole_gpu():
    assert variant_for(1, 8, 32000, 132).pieces * 8 >= 132


def test_a_plan_for_another_window_is_refused():
    case = make_case([3], window=2, **SMALL)
    plan = make_plan_ref(case["positions"], WHOLE, 3)
    with pytest.raises(OptionError, match="window 3"):
        make_append_and_attend()(**case, plan=plan)


# The kernels.


@guarded
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("variant", [WHOLE, FEW, MANY, Variant(TILE, 7, 4, 2)], ids=str)
@pytest.mark.parametrize("block_size", [4, 64])
def test_the_kernel_equals_the_spec_at_the_edges_of_tiles_blocks_and_pieces(
    block_size, variant, device, dtype
):
    positions = [0, 1, TILE - 1, TILE, TILE + 1, 3 * TILE, -1, 5 * TILE + 1, 64, 65]
    shape = SMALL | {"block_size": block_size}
    assert_equals_spec(make_case(positions, **shape, dtype=dtype, device=device), variant)


@guarded
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("variant", [WHOLE, FEW, Variant(TILE, 5, stages=2)], ids=str)
@pytest.mark.parametrize("window", [0, 20])
def test_tokens_of_a_tile_may_have_a_softmax_each(window, variant, device, dtype):
    positions = [0, 1, TILE - 1, TILE, TILE + 1, -1, 5 * TILE + 1]
    shape = SMALL | {"n_heads": 1, "dtype": dtype, "device": device}
    assert_equals_spec(make_case(positions, window=window, **shape), variant._replace(lanes=1))


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
@pytest.mark.parametrize(("group", "head_dim"), [(1, 20), (1, 64), (2, 128), (4, 16), (4, 64), (8, 20)])
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
        window=rng.choice((0, 0, 9, 50)),
        rotary=rng.choice(("", "plain", "norms")),
        n_heads=kv_heads * rng.choice((1, 3, 5)),
        n_kv_heads=kv_heads,
        head_dim=rng.choice((16, 24)),
        block_size=block_size,
        dtype=dtype,
        device=device,
        seed=seed,
    )
    assert_equals_spec(case, Variant(rng.choice((16, 32)), rng.choice((0, 1, 5, 12)), stages=1 + seed % 2))


@guarded
@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_one_long_row_among_short_ones_is_spread_over_all_pieces(device):
    case = make_case([3, 40 * TILE, -1, 0], **SMALL, device=device)
    plan = make_plan_ref(case["positions"], Variant(TILE, 12))
    assert plan.covers[1].tolist() == [0, 11]
    assert_equals_spec(case, plan.variant)


@pytest.mark.filterwarnings("ignore:invalid value")
@guarded
@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("variant", [WHOLE, FEW, MANY], ids=str)
def test_inert_rows_give_zero_and_write_nothing(variant, device):
    case = make_case([-1, -7, -(2**31)], window=9, **SMALL, device=device)
    case["q"][1], case["k_new"][1] = NAN, NAN
    before, plan = with_own_caches(case), make_planner()(case["positions"], variant, 9)
    assert torch.equal(make_append_and_attend()(**case, plan=plan), torch.zeros_like(case["q"]))
    for name in CACHES:
        assert torch.equal(bits(case[name]), bits(before[name]))


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_tokens_appended_one_after_the_other_are_read_back(device):
    """Ten rotated tokens from an empty cache on, an inert row between: as attention over all at once."""
    append_and_attend, shape = make_append_and_attend(), SMALL | {"block_size": 4, "device": device}
    whole = make_case([10, -1, 10], rotary="norms", **shape)
    caches = {name: torch.full_like(whole[name], NAN) for name in CACHES}
    theirs = {name: cache.clone() for name, cache in caches.items()}
    shared = {"block_table": whole["block_table"], "rotary": whole["rotary"]}
    for position in range(11):
        case = make_case([position, -1, position], **shape, seed=position) | shared
        found = append_and_attend(**case | caches, plan=make_planner()(case["positions"], FEW))
        assert_near(found, append_and_attend_ref(**case | theirs))
    assert (~caches["k_cache_layer"].isnan()).all(dim=(1, 3)).sum().item() == 2 * 11


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
        plan = make_planner()(case["positions"], variant)
        found = make_append_and_attend()(**with_own_caches(case), plan=plan)
        torch.testing.assert_close(found, spec, rtol=1e-3, atol=1e-3)


# A GPU's own.

QWEN = {"n_heads": 16, "n_kv_heads": 8, "head_dim": 128, "block_size": 64}


@guarded
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*LARGE.values(), QWEN], ids=[*LARGE, "qwen"])
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_the_kernel_equals_the_spec_at_a_real_size(rows, shape, dtype):
    rng = random.Random(rows)
    positions = [1023, 0, 1, 63, 64, 65, -1, *(rng.randrange(-1, 1024) for _ in range(rows))][:rows]
    group = shape["n_heads"] // shape["n_kv_heads"]
    chosen = variant_for(rows, shape["n_kv_heads"], 1024, 132, group=group, head_dim=shape["head_dim"])
    for variant in (chosen, Variant(32, lanes=1), Variant(64, 40), Variant(32, 66, 4, 3)):
        case = make_case(positions, rotary="norms", window=700, **shape, dtype=dtype, device="cuda")
        assert_equals_spec(case, variant)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [Variant(64), Variant(32, 20), Variant(32, 66, 4, 3)], ids=str)
def test_dependent_launches_in_a_replayed_graph_equal_ordinary_ones(variant):
    """The plan, then two layers of projection and attention; each replay has other lengths."""
    heads, width = LARGE["gpt2"]["n_heads"], 768
    case = make_case([700, 64, 63, 0, -1, 1, 300, 128], **LARGE["gpt2"], dtype=torch.float16, device="cuda")
    case["rotary"] = make_rotary(800, 64, True, case["q"])
    for name in CACHES:
        case[name] = torch.nan_to_num(case[name])
    start, longest = with_own_caches(case), case["positions"].clone()
    x = torch.zeros(len(longest), width, device="cuda", dtype=torch.float16)
    weight = torch.randn(3 * width, width, device="cuda").half() / width**0.5
    bias = torch.zeros(3 * width, device="cuda", dtype=torch.float16)

    def refill(seed: int) -> None:
        x.copy_(torch.randn(len(longest), width, generator=torch.Generator().manual_seed(seed)))
        case["positions"].copy_(torch.where(longest > 0, (longest - 37 * seed) % (longest + 1), longest))
        for name in CACHES:
            case[name].copy_(start[name])

    def chain(kernels) -> tuple[Tensor, ...]:
        dependent = kernels is TRITON_DEPENDENT
        append_and_attend = make_append_and_attend(dependent)
        plan = make_planner(dependent)(case["positions"], variant)

        def layer(hidden: Tensor) -> Tensor:
            qkv = kernels.few_rows_linear(x=hidden, weight=weight, bias=bias).view(
                len(longest), 3 * heads, -1
            )
            new = dict(zip(("q", "k_new", "v_new"), qkv.split(heads, dim=1), strict=True))
            return append_and_attend(**case | new, plan=plan).view(len(longest), width)

        hidden = kernels.few_rows_linear(x=x, weight=weight[:width], bias=bias[:width])
        first = layer(hidden)
        return first, layer(first), *(case[name].flatten(1) for name in CACHES)

    assert_replays_equal_ordinary_launches(chain, refill)
