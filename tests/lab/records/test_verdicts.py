"""What the committed records allow to be said of two rungs."""

import math

import pytest

from rosellm.lab.figures.compare import recorded_chart
from rosellm.lab.records.records import find
from rosellm.lab.records.verdicts import WORKLOADS, Verdict, run_to_run, verdicts
from rosellm.roseinfer.recipe import BEFORE


@pytest.mark.parametrize(
    ("before", "after", "noise", "sign"),
    [
        ([100, 101, 102], [120, 121, 122], 0.05, 1),
        ([120, 121, 122], [100, 101, 102], 0.05, -1),
        ([100, 101, 130], [120, 121, 122], 0.05, 0),  # the repeats overlap
        ([100, 101, 102], [103, 104, 105], 0.05, 0),  # apart, but by no more than the noise
        ([100, 101, 102], [103, 104, 105], 0.01, 1),
    ],
)
def test_a_difference_counts_only_beyond_the_repeats_and_the_noise(before, after, noise, sign):
    assert Verdict("W1", before, after, noise).sign == sign


def test_noise_is_what_rungs_of_the_same_code_differ_by_and_the_largest_stands_in_above_the_gate():
    results = find()
    noise = run_to_run(results)
    assert set(noise) == set(WORKLOADS)
    assert all(0 < value < 0.2 for value in noise.values())
    assert noise["W3"] == noise["W4"] == max(noise.values())
    assert noise["W1"] < noise["W3"]


def test_every_recorded_rung_has_three_repeats_of_every_workload():
    for after in set(find().rungs("W3")) & set(BEFORE):
        rows = verdicts(find(), BEFORE[after], after)
        assert [len(row.before) for row in rows] == [3] * 6
        assert [len(row.after) for row in rows] == [3] * 6


def test_of_a_rung_without_records_nothing_is_said():
    rows = verdicts(find(), "dense", "unheard_of")
    assert [(row.change, row.sign, row.word) for row in rows] == [("–", 0, "not measured")] * 6
    assert "W1" not in recorded_chart([find()], "dense", "unheard_of").table


def test_where_no_noise_is_known_no_difference_counts():
    assert set(run_to_run(find("cpu")).values()) == {math.inf}


def test_the_recorded_chart_tells_every_workload_and_change():
    chart = recorded_chart([find()], "no_mask", "pinned_h2d")
    table = chart.table
    assert chart.data[0].hovertext[2] == (
        "W2: 64 requests × 512 new tokens, 64 at a time, prompts of one token"
    )
    assert all(workload in table for workload in WORKLOADS)
    assert "%" in table
