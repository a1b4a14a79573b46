"""Notebook 30's figures are those of the recorded steps, whole runs and of the session with both engines."""

from __future__ import annotations

import re

from rosellm.lab.records import lengths, records
from rosellm.lab.records.records import find
from rosellm.roseinfer.kernels.attention_plan import UNEVEN, UNEVEN_FROM
from tests.claims.prose import claim, prose, said
from tests.claims.reading import number

TEXT = prose("30")
STEPS = lengths.recorded_lengths(find())


def less(rows: int, share: str) -> float:
    """By how many % a step in pieces takes less than one of whole rows; negative if it takes more."""
    whole, cut = (STEPS[rows][f"{share}, {way}"].us for way in lengths.WAYS)
    return 100 * (1 - cut / whole)


def over_equal(rows: int, share: str) -> float:
    return 100 * (STEPS[rows][f"{share}, cut"].us / STEPS[rows]["equal, whole"].us - 1)


def test_the_verdicts_percentages_are_those_of_the_recorded_steps():
    words = r"takes (\d+) to (\d+) % less at 8 .*, and (\d+) % less at 256; with spread rows (\d+) to (\d+) %"
    one_long = [less(rows, "one long") for rows in (8, 64, 128)]
    spread = [less(rows, "spread") for rows in (64, 128, 256)]
    values = [min(one_long), max(one_long), less(256, "one long"), min(spread), max(spread)]
    claim(TEXT, words, *values)
    unequal = [over_equal(rows, share) for rows in (64, 128, 256) for share in ("spread", "one long")]
    claim(TEXT, r"cost at most (\d+) % more than equal whole rows", max(unequal))
    words = r"pieces take (\d+) % more at 8 rows, .* and (\d+) % more at 64 and 256"
    for rows in (64, 256):
        claim(TEXT, words, -less(8, "equal"), -less(rows, "equal"))


def test_the_rule_and_its_one_exception_are_those_recorded():
    (factor,) = said(TEXT, r"whether it exceeds ([\d.]+) times the mean")
    assert number(factor) == UNEVEN and UNEVEN_FROM > 8 * 12 / 132
    claim(TEXT, r"8 spread rows stay whole, although pieces are (\d+) % faster", less(8, "spread"))
    assert lengths.faster_way(STEPS[8], "spread") == "cut"


def test_both_engines_of_one_session_and_sampled_speeds_are_those_recorded():
    lease, rival = records.one_lease("gpt2"), re.escape(records.LEASE_RIVAL)
    ours, theirs = lease["W8"]
    words = rf"W8 runs at ([\d,]+) tokens per second here and at ([\d,]+) with {rival}: ([\d.]+) times"
    claim(TEXT, words, ours, theirs, ours / theirs)
    claim(TEXT, r"in W7 give ([\d.]+) times", lease["W7"][0] / lease["W7"][1])
    best = {name: max(find().values(name).values()) for name in ("W8", "W9", "W10")}
    kept = (100 * best[name] / best["W8"] for name in ("W9", "W10"))
    claim(TEXT, r"W9 and W10 keep (\d+) and (\d+) % of W8's speed", *kept)
