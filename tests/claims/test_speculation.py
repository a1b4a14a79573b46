"""The notebook of speculation: what its text says is what the records and its stored outputs say."""

from __future__ import annotations

import re
from statistics import median

import nbformat

from rosellm.lab.records.records import find
from rosellm.models.checkpoint import DRAFT_OF
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.steps.pace import FIRST_REST, LONGEST_REST, MARGIN
from rosellm.roseinfer.steps.speculative import MOST_VERIFIED
from tests.claims.reading import ROOT, claim, prose, said, table_row

speculation = load_exhibit("speculation")
RESULTS = find()
LARGE, MIDDLE, SMALL = "Llama-3.1-8B", "Llama-3.2-1B", "Qwen3-0.6B"
US = {name: speculation.step_us(RESULTS, name) for name in (LARGE, MIDDLE, SMALL)}
FOUND = {key: speculation.verified_us(RESULTS, *key) for key in speculation.sizes(RESULTS)}
TIMES = {key: {k: verify / plain for k, (plain, verify) in found.items()} for key, found in FOUND.items()}
ALONE = "1 × 64"
EXTRA = {name: FOUND[name, ALONE][7][1] - FOUND[name, ALONE][7][0] for name in US}
FIGURE = r"(\d+(?:\.\d+)?)"


def test_eight_rows_take_what_is_said():
    foreseen = [US[name][8] / US[name][1] for name in (LARGE, SMALL)]
    words = r"Eight rows take ([\d.]+) times as long as one in Llama-3.1-8B, and ([\d.]+) times in Qwen3-0.6B"
    claim("39", words, *foreseen)
    claim("39", r"where a step of eight rows takes ([\d.]+) times", foreseen[1])


def test_steps_that_verify_take_what_is_said():
    seven = [times[7] for times in TIMES.values() if 7 in times]
    many = [times[3] for (_, size), times in TIMES.items() if size.startswith("64 × ")]
    words = rf"seven drafts make a step of one to eight sequences {FIGURE} to {FIGURE} times as long, "
    words += rf"three drafts one of 64 up to {FIGURE} times"
    claim("39", words, min(seven), max(seven), max(many))
    words = rf"seven drafts takes {FIGURE} times as long as a plain one in Llama-3.1-8B, and {FIGURE} in "
    claim("39", words, TIMES[LARGE, ALONE][7], TIMES[MIDDLE, ALONE][7])
    words = rf"what was predicted: {FIGURE} times with one sequence, where a step"
    claim("39", words, TIMES[SMALL, ALONE][7])
    words = rf"after 2,000 tokens, a step of eight sequences with one draft each takes {FIGURE} times"
    claim("39", words, TIMES[SMALL, "8 × 2000"][1])
    claim("39", r"seven drafts make it only (\d+) % longer", 100 * TIMES[LARGE, ALONE][7] - 100)


def test_steps_of_the_small_model_are_as_near_to_the_prediction_as_is_said():
    said(prose("39"), "pays about what was predicted: .* Eight sequences pay less than predicted")
    beyond = EXTRA[SMALL] - (US[SMALL][8] - US[SMALL][1])
    assert abs(beyond) < 0.05 * FOUND[SMALL, ALONE][7][0]
    assert TIMES[SMALL, "8 × 64"][7] < US[SMALL][64] / US[SMALL][8]


def test_what_seven_drafts_cost_per_layer_is_what_is_said():
    shapes = {name: one["engine"]["model_shape"] for name, one in RESULTS.by_model("steps_by_rows").items()}
    layers = {name: shapes[name]["num_hidden_layers"] for name in (SMALL, MIDDLE, LARGE)}
    words = rf"{FIGURE}, {FIGURE} and {FIGURE} µs per layer in Qwen3-0.6B, Llama-3.2-1B and Llama-3.1-8B, "
    words += rf"although a plain step of the last takes {FIGURE} times as long"
    plain = {name: FOUND[name, ALONE][7][0] for name in US}
    claim("39", words, *(EXTRA[name] / n for name, n in layers.items()), plain[LARGE] / plain[SMALL])


def test_whole_runs_stay_as_far_below_the_prediction_as_is_said():
    below = []
    for record in RESULTS.by_model("verify_drafts").values():
        for size in (ALONE, "8 × 64"):
            for one in (record["figures"][size][k] for k in ("3", "7")):
                for name in ("edit", "completion"):
                    seconds = one["replayed"][name]["seconds_per_step"]
                    faster = median(seconds["plain"]) / median(seconds["drafting"])
                    below.append(100 * (1 - faster * median(one["verify"]) / median(one["plain"])))
    claim("39", r"are (\d+) to (\d+) % slower than predicted", min(below), max(below))


def test_the_verdict_is_that_of_the_recorded_runs():
    gains = {(way, n): [] for way in ("ngram", "draft") for n in (1, 8, 64)}
    for model in DRAFT_OF:
        for text in speculation.TEXTS:
            for way, found in speculation.recorded_gains(RESULTS, model, text).items():
                for n, gain in zip((1, 8, 64), found, strict=True):
                    gains[way, n].append(gain)
    one, eight, many = (gains["ngram", n] for n in (1, 8, 64))
    words = rf"few requests: {FIGURE} to {FIGURE} times with one, {FIGURE} to {FIGURE} times with eight. "
    words += rf"With 64, some lose: {FIGURE} to {FIGURE} times"
    claim("39", words, *(end for each in (one, eight, many) for end in (min(each), max(each))))
    drafted = gains["draft", 1] + gains["draft", 8] + gains["draft", 64]
    claim("39", rf"draft models gain nothing: {FIGURE} to {FIGURE} times", min(drafted), max(drafted))
    assert max(drafted) < 1.02
    lost = {
        name: [100 * (1 - median(one["plain"]) / median(one["ngram"])) for one in runs["seconds"].values()]
        for name, runs in (
            (SMALL, RESULTS.by_model("drafts")[SMALL]["figures"]["random"]),
            ("rose-tiny", RESULTS.figures("drafts-rose-tiny", "random")),
        )
    }
    words = r"never accepted, Qwen3-0.6B loses (\d+) to (\d+) %, and rose-tiny up to (\d+) %"
    claim("39", words, min(lost[SMALL]), max(lost[SMALL]), max(lost["rose-tiny"]))


def test_the_pace_is_as_the_text_beside_its_source_says():
    words = rf"more than {FIGURE} times the tokens .*? once after (\d+) plain steps, .*? up to (\d+) steps,"
    claim("39", words, MARGIN, FIRST_REST, LONGEST_REST)


def test_the_draft_model_is_what_is_said():
    training = RESULTS.load("train-rose-tiny-draft")
    claim("39", r"tokens agree at (\d+) % of the places", 100 * training["agreement"])
    shapes = training["model"], RESULTS.load("train")["model"]
    assert [one["n_layer"] for one in shapes] == [2, 5] and shapes[1]["n_embd"] == 2 * shapes[0]["n_embd"]


def test_the_gains_promised_are_those_of_the_steps_recorded():
    words = (
        r"With p = 0.8, seven drafts promise ([\d.]+) times .*? of Llama-3.1-8B, and ([\d.]+) times to eight "
        r"of Qwen3-0.6B. With p = 0.2, these eight lose: ([\d.]+) times"
    )
    gains = [(LARGE, 0.8, 1), (SMALL, 0.8, 8), (SMALL, 0.2, 8)]
    claim("39", words, *(speculation.expected_gain(US[name], 7, p, n) for name, p, n in gains))
    assert max(US[LARGE]) == max(US[SMALL]) == 64
    said(prose("39"), "No plain step of more than 64 rows is recorded")
    words = r"most (\d+) rows: seven drafts of (\d+) sequences, three of (\d+), or one of (\d+)"
    claim("39", words, MOST_VERIFIED, *(MOST_VERIFIED // (k + 1) for k in (7, 3, 1)))


def test_what_is_said_of_the_three_texts_stands_in_the_stored_tables():
    percent = {place: _percent_of_completion(place) for place in (1, 7)}
    words = r"first drafts, (\d+) % are accepted, so of its seventh ones (\d+) % would be. It is (\d+) %"
    claim("39", words, percent[1], 100 * (percent[1] / 100) ** 7, percent[7])
    own, drafted = (table_row("39", f"{way}")[2] for way in ("from the text", "by the draft model"))
    claim("39", rf"Prose: {FIGURE} tokens per step instead of {FIGURE}\.", drafted, own)
    ways = "the model's own", "another seed's", "none: the likeliest token"
    words = r"large model's noise, (\d+) % of first drafts are accepted; with another seed's, (\d+) %; "
    claim("39", words + r"without, (\d+) %", *(table_row("39", way)[0] for way in ways))


def _percent_of_completion(place: int) -> float:
    row = re.compile(rf"^ +{place}  +[\d.]+  +([\d.]+)  +[\d.]+$", re.MULTILINE)
    (found,) = (one for text in _stored() for one in row.findall(text))
    return float(found)


def _stored() -> list[str]:
    cells = nbformat.read(ROOT / "notebooks" / "39_speculative.ipynb", 4).cells
    outputs = [one for cell in cells for one in cell.get("outputs", [])]
    return [one.get("data", {}).get("text/plain", "") for one in outputs]
