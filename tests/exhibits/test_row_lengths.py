"""What a model has room for in rows of unequal lengths, and which way was faster."""

import pytest

from rosellm.errors import OptionError
from rosellm.lab.records import step_time
from rosellm.lab.records.records import find
from rosellm.roseinfer.exhibits import load_exhibit

lengths, row_lengths = load_exhibit("lengths"), load_exhibit("row_lengths")
positions_for = lengths.positions_for


def test_recorded_batches_are_read_with_every_share_and_way():
    names = [f"{share}, {way}" for share in lengths.contexts_of(8) for way in lengths.WAYS]
    recorded = row_lengths.recorded_lengths(find())
    assert recorded and all(list(steps) == names for steps in recorded.values())


def test_the_longest_row_fits_the_positions_that_are_told():
    most = row_lengths.mean_within(512)
    assert positions_for(most) <= 512 < positions_for(most + 1)
    assert row_lengths.mean_within(1024) == lengths.MEAN and positions_for(lengths.MEAN) <= 1024
    with pytest.raises(OptionError, match="need 50 positions; there are 49"):
        row_lengths.mean_within(49)


@pytest.mark.parametrize(
    ("whole", "cut", "faster"),
    [
        ((5, 6), (8, 9), "whole"),
        ((5, 6), (2, 3), "cut"),
        ((5, 6), (7, 8), "either"),
        ((5, 7), (6, 9), "either"),
        ((5, 5), (5, 5), "either"),
    ],
)
def test_a_way_is_faster_if_its_engines_are_apart_by_more_than_twice_their_spread(whole, cut, faster):
    steps = {
        f"spread, {way}": step_time.StepTimes(tuple((float(us),) for us in engines))
        for way, engines in (("whole", whole), ("cut", cut))
    }
    assert row_lengths.faster_way(steps, "spread") == faster
