"""Notebooks 00, 06 and 13: what their text says of the ledgers is what the ledgers say."""

from __future__ import annotations

from rosellm.lab.records.ledger import Ledger
from rosellm.lab.records.records import _rivals_file, find, rivals
from tests.claims.prose import claim, prose, said
from tests.claims.reading import number

RESULTS = find()
BATCHES = (1, 8, 64, 256)


def two(rungs: tuple[str, str]) -> list[tuple[Ledger, Ledger]]:
    """By batch, the ledgers of both rungs, of one session."""
    recorded = RESULTS.figures("ledger")
    before, after = ([Ledger.from_dict(recorded[str(n)][rung]) for n in BATCHES] for rung in rungs)
    return list(zip(before, after, strict=True))


RESIDENT = two(("one_table", "resident_step"))
APPENDS = [old.us_by_cause()["append"] - new.us_by_cause()["append"] for old, new in RESIDENT[:3]]


def test_the_resident_steps_gain_is_split_into_the_circle_and_the_append():
    steps = [old.step_us - new.step_us for old, new in RESIDENT[:3]]
    words = r"a step loses (\d+), (\d+) and (\d+) µs, of which (\d+), (\d+) and (\d+) are the append's"
    claim(prose("13"), words, *steps, *APPENDS)


def test_the_gpu_is_busy_after_the_resident_step_and_was_not_before():
    busy = [[100 * pair[side].busy for pair in RESIDENT] for side in (0, 1)]
    values = [choose(shares) for shares in busy for choose in (min, max)]
    claim(prose("13"), r"busy (\d+) to (\d+) % of a step before, is busy (\d+) to (\d+) %", *values)


def test_the_gate_of_06_keeps_out_what_13_finds():
    claim(prose("06"), r"finds that it saves (\d+) to (\d+) µs a step", min(APPENDS), max(APPENDS))


def test_the_map_says_by_how_much_a_step_got_shorter():
    ratios = [old.step_us / new.step_us for old, new in two(("dense", "split_kv"))]
    words = r"takes (\d+) to (\d+) times less, by the ledgers of one session"
    claim(prose("00"), words, min(ratios), max(ratios))


def test_the_map_says_how_far_apart_the_sessions_of_w3_are():
    words = (
        r"`dependent_launch` made (\d+)k tok/s in this one, (\d+)k to (\d+)k in a later one; "
        r"vLLM made (\d+)k, on a slower host (\d+)k"
    )
    repeats = RESULTS.figures("leave_one_out-W3", "tok_s", "none")
    slow = number(said(_rivals_file()["note"], r"W3 ([\d,]+)")[0])
    ours, theirs = RESULTS.value("W3", "dependent_launch"), rivals("W3")["vLLM 0.22.1"]["W3"]
    claim(prose("00"), words, *(one / 1e3 for one in (ours, min(repeats), max(repeats), theirs, slow)))
