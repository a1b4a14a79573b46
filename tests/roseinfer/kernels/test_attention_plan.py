"""Plans: pieces cover all tiles, and the kernel equals the spec."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, example, given, settings, strategies as st

from rosellm.roseinfer.kernels.attention_plan import Variant, make_plan, make_plan_ref, ring_rows
from tests.roseinfer.kernels.compile_step_kernels import SHARED_MEMORY
from tests.roseinfer.kernels.kernel_checks import every_device, guarded
from tests.roseinfer.kernels.test_rotary import strided

some_positions = st.lists(st.integers(-3, 300), min_size=1, max_size=12)
leads = st.sampled_from((0, 1, 8))


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


@guarded
@every_device
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(-3, 9), min_size=1, max_size=70))
@example([2**31 - 1, -(2**31), 0] * 100)  # several programs
def test_sorted_rows_begin_with_the_longest(device, positions):
    arguments = strided(positions, device), Variant(16, sort=1)
    order, expected = (make(*arguments).order.tolist() for make in (make_plan, make_plan_ref))
    assert order == expected == sorted(range(len(positions)), key=lambda row: -positions[row])


@given(st.integers(1, 64), st.integers(1, 32), st.integers(0, 5000), st.integers(1, 8), st.integers(33, 128))
def test_short_rows_are_in_flight_only_if_the_shared_memory_holds_all_programs(
    rows, kv_heads, longest, group, head_dim
):
    num_sms, padded = 132, 64 if head_dim <= 64 else 128
    variant = ring_rows(rows, kv_heads, longest, num_sms, group, head_dim, longest)
    if variant is not None:
        bytes_of_one = variant.stages * variant.tile * padded * 2 * 2
        fit = num_sms * (SHARED_MEMORY[90] // (bytes_of_one + 5000))
        assert variant.pieces == 0 and (longest > 128 or rows * kv_heads <= fit)
