"""A reader's own append in turns with the ladder's, and under the recorded roofline."""

from __future__ import annotations

import pytest
import torch

from rosellm.bench.benchmark_kv_append import VARIANTS
from rosellm.lab.records.records import RecordError, ceilings, find
from rosellm.lab.running.try_kernel import (
    Point,
    recorded_points,
    roof_s,
    roofline,
    time_against_ladder,
    timing_table,
)
from rosellm.lab.trying.check_kernel import KernelError
from rosellm.roseinfer.kv_append_triton import kv_append_live_rows_ref as right, kv_append_triton_identity_pos

SHAPE = {"n_heads": 2, "head_dim": 4, "dtype": torch.float32, "device": "cpu", "block_size": 4, "repeats": 1}


def no_value(*, v_cache_layer, **operands):
    right(v_cache_layer=torch.empty_like(v_cache_layer), **operands)


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
    with pytest.raises(RecordError, match="way 'device' was not recorded: there are wall, device_rotating"):
        recorded_points(find(), "device")
