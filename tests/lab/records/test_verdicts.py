"""What the committed records support about two rungs."""

import json
import math

import pytest

from rosellm.lab.records.records import Results, find
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


@pytest.mark.parametrize(("lease", "same"), [("one", True), ("other", False)])
def test_runs_of_one_commit_are_compared_if_one_lease_made_both(tmp_path, lease, same):
    for rung, its in (("dense", "one"), ("paged", lease)):
        record = find().record("W1", rung)
        record["environment"] |= {"git_commit": "abc", "lease": its}
        (tmp_path / f"W1-{rung}.json").write_text(json.dumps(record))
    (row,) = verdicts(Results(tmp_path), "dense", "paged", ["W1"])
    assert row.is_measured and row.is_comparable == same


def test_a_rung_without_records_is_not_measured():
    rows = verdicts(find(), "dense", "no_such_rung")
    assert [(row.change, row.sign, row.word) for row in rows] == [("–", 0, "not measured")] * 6
