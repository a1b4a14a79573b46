"""Notebooks 00, 06 and 13: what their text says of the ledgers is what the ledgers say."""

from __future__ import annotations

from rosellm.lab.records.ledger import Ledger
from rosellm.lab.records.records import _rivals_file, find, rivals
from tests.claims.prose import prose, said
from tests.claims.reading import wrong

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
    told = said(
        prose("13"),
        r"a step loses (\d+), (\d+) and (\d+) µs, of which (\d+), (\d+) and (\d+) are the append's",
    )
    steps = [old.step_us - new.step_us for old, new in RESIDENT[:3]]
    assert wrong(list(zip((*steps, *APPENDS), told, strict=True))) == []


def test_the_gpu_is_busy_after_the_resident_step_and_was_not_before():
    told = said(prose("13"), r"busy (\d+) to (\d+) % of a step before, is busy (\d+) to (\d+) %")
    busy = [[100 * pair[side].busy for pair in RESIDENT] for side in (0, 1)]
    values = [choose(shares) for shares in busy for choose in (min, max)]
    assert wrong(list(zip(values, told, strict=True))) == []


def test_the_gate_of_06_keeps_out_what_13_finds():
    least, most = said(prose("06"), r"finds that it saves (\d+) to (\d+) µs a step")
    assert wrong([(min(APPENDS), least), (max(APPENDS), most)]) == []


def test_the_map_says_by_how_much_a_step_got_shorter():
    told = said(prose("00"), r"takes (\d+) to (\d+) times less, by the ledgers of one session")
    ratios = [old.step_us / new.step_us for old, new in two(("dense", "split_kv"))]
    assert wrong(list(zip((min(ratios), max(ratios)), told, strict=True))) == []


def test_the_map_says_how_far_apart_the_sessions_of_w3_are():
    ours, least, most, theirs, slower = said(
        prose("00"),
        r"`dependent_launch` made (\d+)k tok/s in this one, (\d+)k to (\d+)k in a later one; "
        r"vLLM made (\d+)k, on a slower host (\d+)k",
    )
    repeats = RESULTS.figures("leave_one_out-W3", "tok_s", "none")
    slow = said(_rivals_file()["note"], r"W3 ([\d,]+)")[0].replace(",", "")
    known = [
        RESULTS.value("W3", "dependent_launch"),
        min(repeats),
        max(repeats),
        rivals("W3")["vLLM 0.22.1"]["W3"],
        float(slow),
    ]
    told = [ours, least, most, theirs, slower]
    assert wrong([(value / 1e3, text) for value, text in zip(known, told, strict=True)]) == []
