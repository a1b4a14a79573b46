"""Plans: pieces cover all tiles, the kernel equals the spec, and where an engine chooses to cut."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings, strategies as st

from rosellm.roseinfer.kernels import attention_plan as module
from rosellm.roseinfer.kernels.attention_plan import (
    Variant,
    make_plan,
    make_plan_ref,
    variant_for,
    whole_rows,
)
from rosellm.roseinfer.kernels.table import TRITON
from rosellm.roseinfer.layers.attention import AppendAndAttend, SplitAppendAndAttend
from tests.helpers import random_model, small_config
from tests.roseinfer.kernels.kernel_checks import every_device, guarded
from tests.roseinfer.kernels.test_rotary import strided

TILE, LENGTHS = 16, (0, 1, 300, 1000, 32000)
some_positions = st.lists(st.integers(-3, 300), min_size=1, max_size=12)
leads = st.sampled_from((0, 1, 4))


def tiles_of(position: int, tile: int, window: int | None) -> int:
    """Counted one key at a time."""
    keys = range(max(0, position - window + 1) if window else 0, max(position, 0))
    return max(1, len({key // tile for key in keys}))


@settings(max_examples=60, deadline=None)
@given(
    some_positions, st.integers(1, 40), st.sampled_from((16, 64)), st.sampled_from((None, 1, 40, 64)), leads
)
def test_pieces_hold_every_tile_once_and_equally_many_or_nearly(positions, pieces, tile, window, lead):
    """In whole rows begun, their lead counts; a piece that ends within a lead has up to a lead less to do."""
    plan = make_plan_ref(torch.tensor(positions, dtype=torch.int32), Variant(tile, pieces, lead=lead), window)
    counts = [tiles_of(position, tile, window) for position in positions]
    tiles = [(row, i) for row, count in enumerate(counts) for i in range(count)]
    index = {place: i for i, place in enumerate((*tiles, (len(positions), 0)))}
    starts = [index[tuple(place)] for place in plan.starts.tolist()]
    sizes = [stop - start for start, stop in zip(starts, starts[1:], strict=False)]
    assert starts[0] == 0 and starts[-1] == len(tiles) and min(sizes) >= 0
    assert lead or max(sizes) - min(sizes) <= 1
    total = len(tiles) + lead * len(positions)
    begun = [sum(i == 0 for _, i in tiles[a:b]) for a, b in zip(starts, starts[1:], strict=False)]
    work = [size + lead * rows for size, rows in zip(sizes, begun, strict=True)]
    assert max(work) <= -(-total // min(pieces, total)) + lead
    owners = [piece for piece, size in enumerate(sizes) for _ in range(size)]
    mine = [[owners[index[row, 0]], owners[index[row, count - 1]]] for row, count in enumerate(counts)]
    assert plan.covers.tolist() == mine
    assert all(sizes[piece] for first, last in mine for piece in range(first, last + 1))


@guarded
@every_device
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(some_positions, st.integers(1, 200), st.sampled_from((16, 64)), st.sampled_from((None, 1, 40)), leads)
@example([2**28] * 7 + [-(2**31)] + [2**28] * 32, 133, 16, None, 4)  # long contexts do not overflow
def test_the_plan_kernel_equals_its_spec(device, positions, pieces, tile, window, lead):
    arguments = strided(positions, device), Variant(tile, pieces, lead=lead), window
    found, expected = (make(*arguments) for make in (make_plan, make_plan_ref))
    assert torch.equal(found.starts, expected.starts) and torch.equal(found.covers, expected.covers)


def test_whole_rows_need_no_plan():
    for make in (make_plan, make_plan_ref):
        plan = make(torch.tensor([5, 9], dtype=torch.int32), Variant(TILE), 4)
        assert plan.starts is None and plan.covers is None and not plan.variant.combine


@pytest.mark.parametrize("rows", [1, 8, 64, 256, 1024])
@pytest.mark.parametrize("kv_heads", [1, 8, 12])
def test_a_variant_of_any_step_takes_rows_whole_or_cut_and_can_be_told_by_its_text(rows, kv_heads):
    for longest, (group, head_dim) in product(LENGTHS, ((1, 64), (2, 128), (4, 64), (4, 128))):
        shape = rows, kv_heads, longest, 132, group, head_dim
        variant, whole, cut = variant_for(*shape), whole_rows(*shape), module.cut_rows(*shape)
        assert cut.combine and not whole.combine and variant in (whole, cut)
        assert variant.tile >= 16 and variant.tile.bit_count() == variant.warps.bit_count() == 1
        assert Variant.parse(str(variant)) == variant
        assert variant.pieces <= max(rows * -(-2 * max(longest, 1) // variant.tile), 1)


@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(12, 1, 64), (8, 2, 128), (8, 4, 64)])
@pytest.mark.parametrize("rows", [1, 2, 8, 64, 256])
@pytest.mark.parametrize("choose", [variant_for, whole_rows])
def test_a_warm_up_meets_every_variant_at_powers_of_two(choose, rows, kv_heads, group, head_dim):
    """Where ``ResidentStep.captures`` looks for them: no step meets a new one while requests wait."""
    shape = 132, group, head_dim
    met = {choose(rows, kv_heads, n, *shape, mean) for n in (1 << k for k in range(17)) for mean in (0, n)}
    lengths = (*range(1, 2100), *range(2100, 65536, 97))
    assert {choose(rows, kv_heads, n, *shape, share * n) for n in lengths for share in (0.2, 0.9, 1)} <= met
    assert len(met) <= 6


@pytest.mark.parametrize(("window", "group"), [(None, 1), (None, 2), (40, 2)])
def test_a_binder_chooses_for_the_models_shape_and_no_more_tokens_than_its_window(window, group):
    model = random_model(0, small_config(n_heads=2, n_kv_heads=2 // group, window=window))
    split, whole = (kind(TRITON, None, model) for kind in (SplitAppendAndAttend, AppendAndAttend))
    for binder, choose in ((split, variant_for), (whole, whole_rows)):
        binder.num_sms = 132
        for rows, longest, mean in ((1, 30, 30), (3, 1000, 200.5), (300, 700, 300.0), (300, 700, 650.0)):
            seen, seen_mean = min(longest, window or longest), min(mean, window or mean)
            chosen = choose(rows, 2 // group, seen, 132, group=group, head_dim=16, mean=seen_mean)
            assert Variant.parse(binder.variant(rows, longest, mean)) == chosen
    positions = torch.tensor([60, 3], dtype=torch.int32)
    bound = split(SimpleNamespace(positions=positions), str(Variant(TILE, 3)))
    assert bound.plan.window == window and bound.plan.variant == Variant(TILE, 3)
