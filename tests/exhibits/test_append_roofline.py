"""A reader's own append under the recorded roofline."""

from __future__ import annotations

import pytest

from rosellm.bench.benchmark_kv_append import VARIANTS
from rosellm.lab.records.records import RecordError, ceilings, find
from rosellm.lab.trying.check_kernel import KernelError
from rosellm.roseinfer.exhibits import load_exhibit

exhibit = load_exhibit("append_roofline")
Point, recorded_points = exhibit.Point, exhibit.recorded_points
roof_s, roofline = exhibit.roof_s, exhibit.roofline


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
