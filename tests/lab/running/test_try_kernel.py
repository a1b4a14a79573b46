"""A reader's own append: every kind of mistake is found and made small, a right one passes."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from rosellm.lab.records.records import ceilings, find
from rosellm.lab.running import try_kernel
from rosellm.lab.running.try_kernel import (
    Case,
    KernelError,
    Point,
    check,
    count_launches,
    faults_of,
    recorded_points,
    roof_s,
    roofline,
    time_against_ladder,
    timing_table,
)
from rosellm.roseinfer.benchmark_kv_append import VARIANTS
from rosellm.roseinfer.kv_append_triton import (
    kv_append_live_rows_ref as right,
    kv_append_rows_ref,
    kv_append_triton_identity_pos,
)

CPU = torch.device("cpu")
CASE = Case(3, 2, 4, 2, torch.float16, inert=1, sliced=True, seed=7)
SHAPE = {"n_heads": 2, "head_dim": 4, "dtype": torch.float32, "device": "cpu", "block_size": 4, "repeats": 1}


def no_value(*, v_cache_layer, **operands):
    right(v_cache_layer=torch.empty_like(v_cache_layer), **operands)


def forgets_last_head(*, k_cache_layer, key_new, **operands):
    right(k_cache_layer=k_cache_layer[:, :-1], key_new=key_new[:, :-1], **operands)


def keys_as_values(*, value_new, key_new, **operands):
    right(key_new=key_new, value_new=key_new, **operands)


def takes_rows_for_contiguous(*, key_new, value_new, **operands):
    key_new = key_new.as_strided(key_new.shape, (key_new[0].numel(), *key_new.stride()[1:]))
    right(key_new=key_new, value_new=value_new, **operands)


def a_row_too_many(*, key_new, value_new, block_idx, pos, **caches):
    more = {"key_new": key_new, "value_new": value_new, "block_idx": block_idx, "pos": pos}
    right(
        **caches,
        **{name: one.as_strided((len(one) + 1, *one.shape[1:]), one.stride()) for name, one in more.items()},
    )


def spoils_its_input(*, pos, **operands):
    right(pos=pos, **operands)
    pos.zero_()


def raises(**operands):
    raise RuntimeError("no such kernel\nand more")


MISTAKES = {
    no_value: "v_cache_layer: 1 elements never written, first [",
    forgets_last_head: "k_cache_layer: 1 elements never written",
    keys_as_values: "v_cache_layer: 1 elements given a wrong value",
    takes_rows_for_contiguous: "k_cache_layer: 1 elements given a wrong value",
    a_row_too_many: "k_cache_layer: 1 elements written by mistake",
    kv_append_rows_ref: "written by mistake",
    spoils_its_input: "pos: an input was changed",
    raises: "raised RuntimeError: no such kernel",
}


def test_the_package_s_kernel_and_the_specification_pass():
    assert check(kv_append_triton_identity_pos, n=12, device="cpu").passed
    verdict = check(right, n=40, device="cpu")
    assert verdict.passed and "PASSED: 40" in str(verdict)


@pytest.mark.gpu
def test_the_package_s_kernel_passes_on_a_gpu():
    assert check(kv_append_triton_identity_pos, device="cuda").passed


@pytest.mark.parametrize("append", MISTAKES, ids=lambda append: append.__name__)
def test_a_mistake_is_found_and_named(append):
    verdict = check(append, n=40, device="cpu")
    assert not verdict.passed
    assert any(MISTAKES[append] in fault for fault in verdict.faults), verdict.faults
    assert str(verdict.smallest) in str(verdict)


@pytest.mark.parametrize("append", MISTAKES, ids=lambda append: append.__name__)
def test_the_smallest_case_has_no_smaller_failing_neighbour(append):
    smallest = check(append, n=40, device="cpu").smallest
    assert smallest.n_heads == smallest.head_dim == 1 or append is takes_rows_for_contiguous
    assert smallest.batch == (2 if append is takes_rows_for_contiguous else 1)
    assert not any(faults_of(append, one, CPU) for one in try_kernel._smaller(smallest))


def test_a_check_is_the_same_for_the_same_seed():
    assert check(keys_as_values, seed=3, device="cpu") == check(keys_as_values, seed=3, device="cpu")


def test_the_place_of_a_fault_names_whose_block_it_is():
    assert all("row 3's block (past the batch)" in one for one in faults_of(a_row_too_many, CASE, CPU))
    assert len(faults_of(a_row_too_many, CASE, CPU)) == 2
    last = len(try_kernel._Trial(CASE, CPU).blocks) - 1  # where torch writes for block -1
    assert all(f"first [{last}, 0, " in one for one in faults_of(kv_append_rows_ref, CASE, CPU))


def test_a_write_before_the_cache_is_seen():
    def early(*, k_cache_layer, **operands):
        right(k_cache_layer=k_cache_layer, **operands)
        k_cache_layer.as_strided((1,), (1,), k_cache_layer.storage_offset() - 1).zero_()

    (fault,) = faults_of(early, CASE, CPU)
    assert fault.endswith("first [-1, 1, 1, 3], memory before the cache")


@triton.jit
def touch(pointer):
    tl.store(pointer + tl.program_id(0), 1.0)


@pytest.mark.parametrize("grid", [(3, 2), lambda arguments: (3, 2)])
def test_launches_are_counted_with_their_programs(grid):
    target = torch.zeros(3, device="cuda" if torch.cuda.is_available() else "cpu")
    assert count_launches(lambda: (touch[grid](target), touch[(1,)](target))) == [6, 1]
    assert target.sum() == 3


def test_on_a_cpu_the_variants_are_timed_and_the_interpreted_kernel_only_counted():
    timings = time_against_ladder(kv_append_triton_identity_pos, [2, 3], **SHAPE)
    assert [(one.batch, one.variant) for one in timings] == [
        (batch, name) for batch in (2, 3) for name in (*VARIANTS, "yours")
    ]
    for one in timings:
        assert one.device_s is None and one.bytes_moved == 4 * one.batch * 2 * 4 * 4
        assert (one.wall_s is None) == (one.variant == "yours")
    assert [one.programs for one in timings if one.variant == "yours"] == [(2,), (3,)]
    cells = timing_table(timings).splitlines()[-1].split()
    assert cells[:4] == ["3", "yours", "–", "–"] and cells[-1] == "3"


def test_a_wrong_append_is_not_timed():
    with pytest.raises(KernelError, match="a wrong append is not timed: identity_pos at batch 2"):
        time_against_ladder(no_value, [2], **SHAPE)


def test_the_roof_is_a_node_for_few_bytes_and_the_copy_speed_for_many():
    node, copy = ceilings()["cuda_graph_node_us"] / 1e6, ceilings()["device_copy_TB_s"] * 1e12
    assert roof_s(1) == node and roof_s(1, launches=4) == 4 * node
    assert roof_s(1 << 30) == (1 << 30) / copy


def test_the_roofline_draws_recorded_points_below_the_roof_and_a_lone_point():
    points = recorded_points(find()) | {"yours": [Point(1_000_000, 1e-6)]}
    chart = roofline(points, title="t")
    assert [trace.name for trace in chart.data] == [*VARIANTS, "yours", "the roof"]
    roof = chart.data[-1].y
    assert all(v <= top for v, top in zip(chart.data[0].y, roof, strict=True) if v is not None)
    assert [v for v in chart.data[-2].y if v is not None] == [1000.0]


def test_a_roofline_without_points_and_an_unrecorded_way_are_refused():
    with pytest.raises(KernelError, match="no point to draw"):
        roofline({"yours": []}, title="t")
    with pytest.raises(KernelError, match="way 'device' was not recorded: there are wall, device_rotating"):
        recorded_points(find(), "device")
