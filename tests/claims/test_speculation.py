"""The notebook of speculation: what its text says is what the records and its stored outputs say."""

from __future__ import annotations

import re

import nbformat

from rosellm.lab.records.records import find
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.steps.speculative import MOST_VERIFIED
from tests.claims.reading import ROOT, claim, prose, said, table_row

speculation = load_exhibit("speculation")
RESULTS = find()
LARGE, SMALL = "Llama-3.1-8B", "Qwen3-0.6B"
US = {name: speculation.step_us(RESULTS, name) for name in (LARGE, SMALL)}
FOUND = {key: speculation.verified_us(RESULTS, *key) for key in speculation.sizes(RESULTS)}
TIMES = {key: verify / plain for key, (plain, verify) in FOUND.items()}
FIRST = {key: speculation.verified_us(RESULTS, *key, speculation.DRAFTED[1]) for key in FOUND}
ALONE, SIZES = "1 × 64", ("1 × 64", "8 × 64", "1 × 2000", "8 × 2000")


def test_eight_rows_take_what_is_said():
    foreseen = [US[name][8] / US[name][1] for name in (LARGE, SMALL)]
    words = r"Eight rows take ([\d.]+) times as long as one in Llama-3.1-8B, and ([\d.]+) times in Qwen3-0.6B"
    claim("39", words, *foreseen)
    claim("39", r"where a step of eight rows takes ([\d.]+) times", foreseen[1])


def test_steps_that_verify_take_what_is_said():
    claim("39", r"takes ([\d.]+) to ([\d.]+) times as long, so", min(TIMES.values()), max(TIMES.values()))
    words = r"pays little: ([\d.]+) times a plain step for one sequence, and at most ([\d.]+) times"
    claim("39", words, TIMES[LARGE, ALONE], max(TIMES[LARGE, size] for size in SIZES))
    claim("39", r"than foreseen: ([\d.]+) times for one sequence with a short prompt", TIMES[SMALL, ALONE])
    words = r"of the table it takes ([\d.]+), ([\d.]+), ([\d.]+) and ([\d.]+) times"
    claim("39", words, *(TIMES[SMALL, size] for size in SIZES))
    assert [size for name, size in FOUND if name == SMALL] == list(SIZES)
    claim("39", r"seven drafts more cost (\d+) %", 100 * TIMES[LARGE, ALONE] - 100)
    claim("39", r"that takes ([\d.]+) times as long must give ([\d.]+) tokens", *[TIMES[SMALL, ALONE]] * 2)


def test_what_steps_take_beyond_the_forecast_is_what_is_said():
    extra = {name: FOUND[name, ALONE][1] - FOUND[name, ALONE][0] for name in US}
    beyond = {name: extra[name] - (US[name][8] - US[name][1]) for name in US}
    shares = {name: 100 * beyond[name] / FOUND[name, ALONE][0] for name in US}
    words = r"(\d+) µs in the large one, where that is (\d+) % of a step, and (\d+) µs in the small one,"
    words += r" where it is (\d+) %"
    claim("39", words, beyond[LARGE], shares[LARGE], beyond[SMALL], shares[SMALL])
    for name in US:
        assert TIMES[name, "8 × 64"] <= US[name][64] / US[name][8]
    plain = FOUND[LARGE, ALONE][0] / FOUND[SMALL, ALONE][0]
    words = r"both models, (\d+) and (\d+) µs, although a plain step of the large one takes ([\d.]+) times"
    claim("39", words, extra[SMALL], extra[LARGE], plain)


def test_the_first_version_was_slower_but_for_one_size():
    first = {key: verify / plain for key, (plain, verify) in FIRST.items()}
    assert [key for key in TIMES if first[key] < TIMES[key]] == [(LARGE, "8 × 2000")]
    words = r"eight sequences of Llama-3.1-8B with 2,000 tokens took ([\d.]+) times"
    claim("39", words, first[LARGE, "8 × 2000"])


def test_the_gains_promised_are_those_of_the_steps_recorded():
    words = (
        r"With p = 0.8, seven drafts promise ([\d.]+) times .*? of Llama-3.1-8B, and ([\d.]+) times to eight "
        r"of Qwen3-0.6B. With p = 0.2, these eight lose: ([\d.]+) times"
    )
    gains = [(LARGE, 0.8, 1), (SMALL, 0.8, 8), (SMALL, 0.2, 8)]
    claim("39", words, *(speculation.expected_gain(US[name], 7, p, n) for name, p, n in gains))
    assert max(US[LARGE]) == max(US[SMALL]) == 64
    said(prose("39"), "No step of more than 64 rows is recorded")
    words = (
        r"most (\d+) rows in a step: seven drafts of each of (\d+) sequences, three of (\d+), or one of (\d+)"
    )
    claim("39", words, MOST_VERIFIED, *(MOST_VERIFIED // (k + 1) for k in (7, 3, 1)))


def test_what_is_said_of_the_three_texts_stands_in_the_stored_tables():
    percent = {place: _percent_of_completion(place) for place in (1, 7)}
    words = r"first drafts, (\d+) % are accepted, so of its seventh ones (\d+) % would be. It is (\d+) %"
    claim("39", words, percent[1], 100 * (percent[1] / 100) ** 7, percent[7])
    needed = TIMES[SMALL, ALONE]
    assert table_row("39", "prose")[-1] < needed < table_row("39", "edit")[-1] / 2


def _percent_of_completion(place: int) -> float:
    row = re.compile(rf"^ +{place}  +[\d.]+  +([\d.]+)  +[\d.]+$", re.MULTILINE)
    (found,) = (one for text in _stored() for one in row.findall(text))
    return float(found)


def _stored() -> list[str]:
    cells = nbformat.read(ROOT / "notebooks" / "39_speculative.ipynb", 4).cells
    outputs = [one for cell in cells for one in cell.get("outputs", [])]
    return [one.get("data", {}).get("text/plain", "") for one in outputs]
