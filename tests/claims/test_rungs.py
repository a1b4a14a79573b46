"""Notebooks of rungs: what their text says is what the records, ledgers and formats say."""

from __future__ import annotations

import math
import re
from statistics import median

import nbformat
import torch

from rosellm.lab.records import records, step_time
from rosellm.lab.records.ledger import Ledger
from rosellm.lab.records.records import _rivals_file, find, read_us, rivals
from rosellm.lab.trying.case import LONG, LONGEST
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.kernels.attention_plan import UNEVEN, UNEVEN_FROM
from tests.claims.reading import ROOT, claim, number, prose, said, stored

# 13


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
    words = r"1, 8 and 64 sequences gets (\d+), (\d+) and (\d+) µs shorter; the append accounts for (\d+), "
    claim("13", words + r"(\d+) and (\d+) µs of that", *steps, *APPENDS)


def test_the_gpu_is_busy_after_the_resident_step_and_was_not_before():
    busy = [[100 * pair[side].busy for pair in RESIDENT] for side in (1, 0)]
    values = [choose(shares) for shares in busy for choose in (min, max)]
    claim("13", r"busy for (\d+) to (\d+) % of a step, up from (\d+) to (\d+) %", *values)


def test_the_threshold_of_02_keeps_out_what_13_finds():
    claim("02", r"finds that the Triton kernel saves (\d+) to (\d+) µs a step", min(APPENDS), max(APPENDS))


def test_the_map_says_by_how_much_a_step_got_shorter():
    ratios = [old.step_us / new.step_us for old, new in two(("dense", "split_kv"))]
    words = r"is (\d+) to (\d+) times as fast, by the ledgers \(profiles by cause\) of one session"
    claim("00", words, min(ratios), max(ratios))


def test_the_map_says_how_far_apart_the_sessions_of_w3_are():
    words = (
        r"`dependent_launch` made (\d+)k tok/s in this one, (\d+)k to (\d+)k in a later one; "
        r"vLLM made (\d+)k, on a slower host (\d+)k"
    )
    repeats = RESULTS.figures("leave_one_out-W3", "tok_s", "none")
    slow = number(said(_rivals_file()["note"], r"W3 ([\d,]+)")[0])
    ours, theirs = RESULTS.value("W3", "dependent_launch"), rivals("W3")["vLLM 0.22.1"]["W3"]
    claim("00", words, *(one / 1e3 for one in (ours, min(repeats), max(repeats), theirs, slow)))


# 19


def test_the_cards_factor_is_that_of_the_ablation():
    turns = find().load("ablations-W0")["figures"]["dependent_launch"]["turns_us"]
    before, _, after = (one.us for one in step_time.step_times(turns).values())
    claim("19", r"in one session, a step is ([\d.]+) times as fast", before / after)


def test_steps_with_weights_in_flight_take_what_is_said():
    steps = {name: one["figures"] for name, one in RESULTS.by_model("steps_by_rows").items()}
    us = {name: {n: one[n]["median_us"] for n in ("1", "16", "64")} for name, one in steps.items()}
    by_64 = {name: one["64"] / one["1"] for name, one in us.items()}
    large = [one["16"] / one["1"] for one in us.values() if one["1"] > 1500]
    words = r"64 sequences a step takes ([\d.]+) to ([\d.]+) times .*? of 16 takes at most ([\d.]+) times"
    claim("19", words, min(by_64.values()), max(by_64.values()), max(large))
    read = {name: one["64"]["read_bytes"] / one["1"]["read_bytes"] for name, one in steps.items()}
    assert all(by_64[name] > read[name] for name in steps) and len(large) > 2


def test_the_changes_to_the_ring_did_what_is_said():
    spans = {}
    for name, models in (RESULTS.figures("ring_trials") | RESULTS.figures("flight_trials")).items():
        turns = [list(one.values()) for model in models.values() for one in model.values()]
        ratios = [median(after) / median(before) for before, after in turns]
        spans[name] = min(ratios), max(ratios)
    said(prose("19"), "With half the shared memory, no step gets faster")
    assert spans["half the shared memory"][0] > 0.995
    said(prose("22"), "norms at the end of a GEMM whose .* gains nothing either")
    assert spans["norms at the end of the GEMM before them"][0] > 0.985
    in_flight = "keys and values in flight"
    many = f"{in_flight}: many sequences"
    claim("19", r"steps take as little as ([\d.]+)", spans[in_flight][0])
    rows = [int(key.split()[0]) for one in RESULTS.figures("flight_trials", many).values() for key in one]
    words = r"In the last row \((\d+) to (\d+) sequences\), they take up to ([\d.]+) times"
    claim("19", words, min(rows), max(rows), spans[many][1])
    assert spans[in_flight][1] < 1.015


# 23


KINDS = find().figures("equality")
RUNG = "dependent_launch"


def test_bits_and_distances_are_those_of_the_formats():
    words = r"bfloat16 number has (\d+) .*float16 number (\d+): between 8 and 16, .* at least 1/(\d+) apart"
    coarse, fine, parts = map(number, said(prose("23"), words))
    formats = torch.bfloat16, torch.float16
    assert [1 - math.log2(torch.finfo(one).eps) for one in formats] == [coarse, fine]
    assert torch.nextafter(torch.tensor(8.0).bfloat16(), torch.tensor(9.0).bfloat16()) == 8 + 1 / parts


def test_near_ties_and_equal_choices_are_those_recorded():
    one, words = KINDS["bfloat16"][RUNG], r"same preceding tokens, ([\d.]+) % of the bfloat16 choices agree"
    claim("23", words, 100 * one["share_of_argmax_equal"])
    assert one["smallest_gap_of_reference"] == 0 and one["gap_at_first_difference"] == 1 / 16
    sequences, tokens = map(number, said(prose("23"), r"for (\d+) sequences of `rose-tiny` with (\d+) new"))
    shares = [sequences * tokens * kind[RUNG]["share_of_tokens_equal"] for kind in KINDS.values()]
    assert shares == [round(one) for one in shares]


# 25


def test_the_checkers_long_contexts_are_those_named():
    told = said(prose("25"), r"also tries contexts of (\d+) and ([\d,]+) tokens")
    assert [number(one) for one in told] == [LONG.cached, LONGEST.cached]


# 29


def test_the_missing_cache_costs_most_and_the_first_diagnosis_names_it():
    said(prose("29"), r"In this run, on a CPU, (the missing cache costs most)")
    cells = nbformat.read(ROOT / "notebooks/29_why_is_it_slow.ipynb", 4).cells
    shown = [output.get("text", "") for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    (first,) = (text for text in shown if text.startswith("NoCache:"))
    assert first.partition("\n* ")[2].startswith("Computes the past again")
    said(prose("29"), "The first named the missing cache; the later ones allow less or name no cause")
    row = r"^(\w[\w, ]*?) {2,}([A-Z]\w+) {2,}([\d.]+|–) {2,}(\S.*?) *$"
    table = re.findall(row, stored("29"), re.MULTILINE)
    (name, before, bound, gain), *later = table
    assert (name, before, len(later)) == ("RowByRow", "NoCache", 4) and gain != "within the noise"
    assert all(most == "–" or float(most) < float(bound) for _, _, most, _ in later)
    found = re.findall(r"^(\w+): ([\d.]+)× the", "\n".join(shown), re.MULTILINE)
    times = {name: float(bound)} | {name: float(ratio) for name, ratio in found}  # or the bound
    assert max(times, key=lambda name: times[name]) == "RowByRow"


def test_on_a_gpu_launches_cost_most_and_kernels_read_as_recorded():
    parts = records.Results(find().folder / "Qwen3-0.6B").figures("plain_loops")["parts"]
    one, many = (parts[f"bfloat16, {n}"]["loops"] for n in (1, 8))
    eager = [one[name] for name in ("NoCache", "RowByRow", "Padded", "InPlace", "Static")]
    said(prose("29"), "the one that computes the past again is the fastest: each launches about a thousand")
    ms = [loop["us"] / 1e3 for loop in eager]
    claim("29", r"all eager loops take (\d+) to (\d+) ms", min(ms), max(ms))
    assert min(ms) == ms[0]
    assert all(900 < loop["launches"] < 1200 for loop in eager)
    each, busy = [x["us"] / x["launches"] for x in eager], [100 * x["busy"] for x in eager]
    words = r"at (\d+) to (\d+) µs of the host's time each, .* works for (\d+) to (\d+) % of that time"
    claim("29", words, min(each), max(each), min(busy), max(busy))
    for name in ("NoCache", "RowByRow"):
        claim("29", r"need (\d+) times as long as `Padded`", many[name]["us"] / many["Padded"]["us"])
    static, compiled, best = (one[name] for name in ("Static", "Compiled", "split_kv"))
    words = r"`Static` (\d+) times as fast, after (\d+) s of compiling, .* is ([\d.]+) times as fast as that"
    gains = static["us"] / compiled["us"], compiled["us"] / best["us"]
    claim("29", words, gains[0], compiled["first_s"], gains[1])
    old, new = one["dense"]["kernels"], best["kernels"]
    said(prose("29"), "The head was near the fastest read all along")
    assert all(rung["head"]["share_of_peak"] > 0.94 for rung in (old, new))
    near = [100 * rung["GEMM"]["share_of_peak"] for rung in (old, new)]
    claim("29", r"read at (\d+) % of it, this engine's at (\d+) %", *near)
    theirs, ours = (rung["attention"] for rung in (old, new))
    assert ours["launches"] // 28 == 2
    words = r"`dense` (\d+) kernels per layer and this engine two, which are (\d+) times as fast"
    claim("29", words, theirs["launches"] / 28, theirs["us"] / ours["us"])


# 30


lengths = load_exhibit("lengths")
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
    claim("30", words, *values)
    unequal = [over_equal(rows, share) for rows in (64, 128, 256) for share in ("spread", "one long")]
    claim("30", r"in pieces take at most about (\d+) % longer than equal whole rows", max(unequal))
    words = r"pieces take (\d+) % more at 8 rows, .* and (\d+) % more at 64 and 256"
    for rows in (64, 256):
        claim("30", words, -less(8, "equal"), -less(rows, "equal"))


def test_the_rule_and_its_one_exception_are_those_recorded():
    (factor,) = said(prose("30"), r"whether it exceeds ([\d.]+) times the mean")
    assert number(factor) == UNEVEN and UNEVEN_FROM > 8 * 12 / 132
    claim("30", r"8 spread rows stay whole, although pieces are (\d+) % faster", less(8, "spread"))
    assert lengths.faster_way(STEPS[8], "spread") == "cut"


def test_both_engines_of_one_session_and_sampled_speeds_are_those_recorded():
    lease, rival = records.one_lease("gpt2"), re.escape(records.LEASE_RIVAL)
    ours, theirs = lease["W8"]
    words = rf"W8 runs at ([\d,]+) tokens per second here and at ([\d,]+) with {rival}: ([\d.]+) times"
    claim("30", words, ours, theirs, ours / theirs)
    claim("30", r"in W7 give ([\d.]+) times", lease["W7"][0] / lease["W7"][1])
    best = {name: max(find().values(name).values()) for name in ("W8", "W9", "W10")}
    kept = (100 * best[name] / best["W8"] for name in ("W9", "W10"))
    claim("30", r"W9 and W10 keep (\d+) and (\d+) % of W8's speed", *kept)


# 31


COSTS = load_exhibit("sampling_costs")
RECORDED = COSTS.recorded_modes(find())


def times(mode: str) -> list[float]:
    """Of a greedy step, in all batches of all models."""
    return [
        median(steps[mode]) / median(steps["greedy"])
        for batches in RECORDED.values()
        for steps in batches.values()
    ]


def more(mode: str) -> list[float]:
    return [100 * (one - 1) for one in times(mode)]


def test_what_modes_add_to_a_greedy_step_is_recorded():
    words = r"a step at most (\d+) % longer, .* top-p (\d+) to (\d+) %; .* takes (\S+) to (\S+) times"
    filtered, sort = more("top-k, top-p"), times("top-k, top-p, sorted")
    claim("31", words, max(more("temperature")), min(filtered), max(filtered), min(sort), max(sort))
    values = []
    for model in ("Qwen3-0.6B", "gpt2"):
        steps = RECORDED[model]
        share = {n: 100 * (median(one["top-p"]) / median(one["greedy"]) - 1) for n, one in steps.items()}
        assert max(share, key=lambda n: share[n]) == 256
        values.append(share[256])
    claim("31", r"at 256 rows (\d+) % for Qwen3-0.6B and (\d+) % for GPT-2", *values)
    words, found = r"of every token make a step ([\d.]+) to ([\d.]+) times", times("logprobs")
    claim("31", words, min(found), max(found))


def test_bytes_explain_as_little_as_said():
    percent: dict[bool, list[float]] = {True: [], False: []}
    for model, arch in COSTS.SHAPES.items():
        added = COSTS.extra_us(RECORDED[model][256])
        for mode, moved in COSTS.extra_bytes(arch, 256).items():
            percent["logprobs" in mode].append(100 * read_us(find(), moved) / added[mode])
    claim("31", r"bytes explain at best (\d+) % of\s+what drawing", max(percent[False]))
    words = r"Of what log-probabilities add they explain (\d+) to (\d+) %"
    claim("31", words, min(percent[True]), max(percent[True]))


# 32


first_request = load_exhibit("first_request")
PROCESSES = first_request.recorded(find())


def test_starts_and_first_runs_are_those_recorded():
    of = {(one["warm_up"], one["cache"]): one for one in PROCESSES}
    ratios = {key: 100 * first_request.run_ratio(one) for key, one in of.items()}
    warm, cold = ([ratios[way, cache] for cache in ("empty", "filled")] for way in (True, False))
    words = r"the first run has (\d+) to (\d+) % .*, without one (\d+) to (\d+) %"
    claim("32", words, min(warm), max(warm), min(cold), max(cold))
    asked = (True, "filled"), (True, "empty"), (False, "filled")
    words = r"constructor takes (\S+) s with it \((\S+) s if .*?\) instead of (\S+) s"
    claim("32", words, *(first_request.construction_s(of[one]) for one in asked))
    words = r"first token comes after (\S+) s; without one after (\S+) s, or (\S+) s if"
    for cache in first_request.CACHES:
        starts = (True, cache), (False, "filled"), (False, "empty")
        claim("32", words, *(of[one]["runs"][0]["first_token_s"] for one in starts))
    filled, empty = (of[one]["parts_s"]["warm_up"] for one in asked[:2])
    claim("32", r"(\d+) % of the warm-up is Triton's compilation", 100 * (1 - filled / empty))


def test_later_runs_differ_as_said():
    differences = []
    for one in PROCESSES:
        speeds = [run["throughput_tok_s"] for run in one["runs"][1:] if not run["late_captures"]]
        differences.append(100 * (1 - min(speeds) / max(speeds)))
    claim("32", r"that capture nothing also differ, by up to (\d+) %", max(differences))


def test_an_import_takes_longest_with_a_filled_cache():
    said(prose("32"), r"with a filled cache, the longest part of a start is .* H200 as well: `(import)`")
    for one in PROCESSES:
        if one["cache"] == "filled":
            assert max(one["parts_s"], key=lambda part: one["parts_s"][part]) == "import"


def test_graphs_captured_late_are_those_recorded():
    late = [[run["late_captures"] for run in one["runs"]] for one in PROCESSES if not one["warm_up"]]
    words = r"Without a warm-up (\d+) or (\d+) graphs were captured late, at most one of"
    claim("32", words, *sorted(map(sum, late)))
    assert max(sum(later) for _, *later in late) == 1
