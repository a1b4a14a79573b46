"""Notebook 20: what the launch alone gives a step of one sequence, in one session."""

from rosellm.lab.records import step_time
from rosellm.lab.records.records import find
from tests.claims.prose import claim, prose


def test_the_cards_factor_is_that_of_the_ablation():
    turns = find().load("ablations-W0")["figures"]["dependent_launch"]["turns_us"]
    before, _, after = (one.us for one in step_time.step_times(turns).values())
    claim(prose("20"), r"in one session, a step is ([\d.]+) times as fast", before / after)
