"""What the committed records support about two rungs."""

import math

import pytest

from rosellm.lab.records.records import find
from rosellm.lab.records.verdicts import Verdict, verdicts
from rosellm.roseinfer.recipe import BEFORE


@pytest.mark.parametrize(
    ("before", "after", "sign"),
    [
        ([100, 101, 102], [120, 121, 122], 1),
        ([120, 121, 122], [100, 101, 102], -1),
        ([100, 101, 130], [120, 121, 122], 0),  # the repeats overlap
        ([100, 101, 102], [103, 104, 105], 0),  # disjoint, but by less than twice the larger spread
        ([100.0, 100.1, 100.2], [103, 103.5, 104], 1),
    ],
)
def test_a_difference_counts_only_beyond_twice_the_larger_spread_of_disjoint_repeats(before, after, sign):
    assert Verdict("W1", before, after).sign == sign


def test_runs_of_different_sessions_are_not_compared():
    one = Verdict("W1", [100, 101, 102], [200, 201, 202], same_session=False)
    assert (one.change, one.sign, one.word) == ("–", 0, "not compared: different sessions")
    assert math.isnan(one.ratio)
    for after, same in (("reused_index_buffers", False), ("cuda_graph", True)):
        assert [row.same_session for row in verdicts(find(), BEFORE[after], after)] == [same] * 6


def test_a_rung_without_records_is_not_measured():
    rows = verdicts(find(), "dense", "no_such_rung")
    assert [(row.change, row.sign, row.word) for row in rows] == [("–", 0, "not measured")] * 6
