"""Notebook 34's figures are those of the recorded joined steps."""

from __future__ import annotations

from statistics import median

from rosellm.lab.records import one_pass
from rosellm.lab.records.records import find
from rosellm.roseinfer.exhibits import load_exhibit
from tests.claims.prose import claim, prose, said
from tests.claims.reading import number

TEXT, FOUND = prose("34"), one_pass.recorded(find())["gpt2"]
SLOWER = {
    (rows, tokens): 100 * (joined / apart - 1)
    for rows, tokens, apart, joined, _ in one_pass.beside_rows(FOUND)
}


def test_a_joined_step_is_slower_by_what_was_recorded():
    own = [one for (rows, _), one in SLOWER.items() if rows >= 64]
    for words, found in (
        (r"with one prompt in it takes (\d+) to (\d+) % longer", SLOWER.values()),
        (r"at every size: (\d+) to (\d+) % slower", SLOWER.values()),
        (r"the step takes (\d+) to (\d+) % longer although", own),
    ):
        claim(TEXT, words, min(found), max(found))
    assert min(SLOWER.values()) > 0


def test_a_pass_has_as_many_us_of_gemms_as_said():
    (us,) = said(TEXT, r"whose GEMMs alone take about (\d+) µs")
    recorded = load_exhibit("spared_passes").recorded_products()
    assert all(abs(recorded[rows] / number(us) - 1) < 0.15 for rows in (128, 256, 512))


def test_a_long_prompts_waits_are_those_recorded_and_overlap():
    waits = {
        (way, kind): [run["long_prompt_ttft_s"] * 1e3 for run in FOUND["long_prompt"][way][kind]["repeats"]]
        for way in ("apart", "joined")
        for kind in ("chunked", "whole")
    }
    values = [median(waits[way, kind]) for kind in ("chunked", "whole") for way in ("joined", "apart")]
    words = r"\(([\d.]+) against ([\d.]+) ms in chunks, ([\d.]+) against ([\d.]+) ms whole\)"
    claim(TEXT, words, *values)
    claim(TEXT, r"one joined run waited ([\d.]+) ms", max(wait for runs in waits.values() for wait in runs))
    assert all(max(waits["joined", k]) > min(waits["apart", k]) for k in ("chunked", "whole"))
    assert one_pass.verdict_of(FOUND).sign == 0
