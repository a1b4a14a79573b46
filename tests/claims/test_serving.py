"""Notebooks of load, replicas and plans: their figures are those recorded or simulated."""

from __future__ import annotations

import math
from itertools import product

from rosellm.lab.records import two_gpus
from rosellm.lab.records.records import Results, find, one_lease, read_us
from rosellm.models.families.table import KNOWN_SHAPES
from rosellm.roseinfer.exhibits import load_exhibit
from tests.claims.reading import claim, number, prose, said, table_row

# 33


budgets, cuts = load_exhibit("chunk_budget"), load_exhibit("cuts")
FIGURES = Results(find().folder / "Qwen3-0.6B").figures("chunk_budget")
CELLS = {(one["share"], one["chunk"], one["way"]): one for one in FIGURES["cells"]}
TTFT_S, ITL_S = (number(ms) / 1e3 for ms in said(prose("33"), r"(\d+) ms to the first .* above (\d+) ms\."))


def good(share, chunk, way="apart", ttft_s=TTFT_S, itl_s=ITL_S):
    return budgets.goodput(CELLS[share, chunk, way], ttft_s, itl_s)


def best(share, way="apart", itl_s=ITL_S):
    return max(budgets.CHUNKS, key=lambda chunk: good(share, chunk, way, itl_s=itl_s))


def test_prefills_take_what_is_said_by_tokens():
    us = {run.workload: run.measured_us[1] for run in RUNS if run.model == "Qwen3-0.6B"}
    longer = 100 * (us["TTFT64"] / us["D1"] - 1)
    claim("33", r"A pass of 64 tokens takes only (\d+) % longer than a pass of one", longer)
    weights_us = read_us(find(), cuts.step_bytes(cuts.MODELS["Qwen3-0.6B"]))
    claim("33", r"Reading all weights takes ([\d.]+) ms of it; the rest is latency", weights_us / 1e3)
    assert weights_us < us["D1"] / 3
    passes = 8  # of PRE, with 16,384 tokens each
    words = r"From 1,024 tokens on, .* (\d+) times as many tokens take (\d+) times as long"
    claim("33", words, 16, us["PRE"] / passes / us["TTFT1K"])


def test_goodput_by_chunk_size_is_what_was_recorded():
    claim("33", r"Capacity, .* is (\d+) requests per second", FIGURES["capacity_req_s"])
    words = r"capacity, (\d+) requests .* of 512 tokens, (\d+) with 2,048, (\d+) .*?, and ([\d.]+) with"
    claim("33", words, *(good(0.95, chunk) for chunk in (512, 2048, None, 128)))
    right = CELLS[0.95, 512, "apart"]
    words = r"With 512, every request meets them; the figure is below the (\d+) arrivals"
    claim("33", words, right["rate"])
    assert good(0.95, 512) * right["total_time_s"] == right["requests"]
    claim("33", r"capacity, (\d+) times as many requests meet both", good(0.95, 512) / good(0.95, None))
    small = CELLS[0.95, 128, "apart"]
    words = r"serve only (\d+) requests per second\. .* half of them wait ([\d.]+) s or longer"
    claim("33", words, small["requests"] / small["total_time_s"], small["ttft_p50_s"])
    assert small["itl_p99_s"] < ITL_S / 3
    said(prose("33"), "At half of the capacity any chunks will do, and whole prompts lose a sixth")
    whole, *chunked = (good(0.5, chunk) for chunk in budgets.CHUNKS)
    assert min(chunked) > 0.95 * max(chunked) and abs(whole / max(chunked) - 5 / 6) < 0.01


def test_the_best_chunk_size_follows_from_the_limit():
    said(prose("33"), "of 512 tokens are best up to a limit of 15 ms, and 2,048 from 20 ms on\\.")
    said(prose("33"), "With 50 ms, whole prompts do as well; .* Chunks of 128 are nowhere best\\.")
    limits = budgets.ITL_LIMITS_S
    assert [best(0.95, itl_s=limit) for limit in limits] == [512 if s <= 0.015 else 2048 for s in limits]
    assert good(0.95, None, itl_s=0.05) > 0.99 * good(0.95, 2048, itl_s=0.05)
    assert 128 not in {best(*one) for one in product(budgets.SHARES, budgets.WAYS, limits)}


def test_the_simulation_names_the_best_sizes_and_promises_what_is_said():
    """The notebook simulates them whenever it runs."""
    names = {chunk: f"{chunk:,}" if chunk else "whole" for chunk in budgets.CHUNKS}
    made = {chunk: table_row("33", f"{name}, simulated") for chunk, name in names.items()}
    said(prose("33"), "rules out 128 tokens at 80 % of capacity, and whole prompts, too, at 95 %")
    said(prose("33"), "it hardly sees a difference between the others")
    for i, out in ((1, {128}), (2, {None, 128})):
        others = [made[chunk][i] for chunk in budgets.CHUNKS if chunk not in out]
        assert min(others) > 0.98 * max(others) and all(made[chunk][i] < 0.7 * min(others) for chunk in out)
        assert best(budgets.SHARES[i]) not in out
    claim("33", r"(\d+) requests per second with 2,048 tokens, and (\d+) with", made[2048][2], made[None][2])


def test_joined_prompts_have_sooner_first_tokens_and_goodput_as_recorded():
    ms = {cell: one["ttft_p50_s"] * 1e3 for cell, one in CELLS.items()}
    pairs = list(product(budgets.SHARES, budgets.CHUNKS))
    saved = [100 * (1 - ms[*pair, "joined"] / ms[*pair, "apart"]) for pair in pairs]
    assert len(pairs) == 12 and said(prose("33"), "sooner in all twelve pairs of runs") == ()
    for words in (r"first token comes (\d+) to (\d+) % sooner \|", r"comes (\d+) to (\d+) % sooner in all"):
        claim("33", words, min(saved), max(saved))
    words = r"after ([\d.]+) ms instead of ([\d.]+) with .*: (\d+) against (\d+) requests .* the same pair"
    first = [ms[0.95, 2048, way] for way in ("joined", "apart")]
    claim("33", words, *first, *(good(0.95, 2048, way) for way in ("joined", "apart")))
    words = r"hardly changes, ([\d.]+) against ([\d.]+)\."
    claim("33", words, *(good(0.95, best(0.95), way) for way in ("joined", "apart")))
    words = r"it is lower: (\d+) against (\d+), at 80 % .* 20 ms, that cell becomes (\d+) against (\d+)\."
    claim("33", words, *(good(0.8, 512, way, itl_s=s) for s in (ITL_S, 0.02) for way in ("joined", "apart")))
    lower = [pair for pair in pairs if good(*pair, "joined") < good(*pair)]
    assert lower == [(0.8, 512)]


# 36


def test_two_replicas_serve_as_much_as_recorded():
    ((sides,),) = (runs.values() for runs in two_gpus.recorded_runs(find(), kind="replicas").values())
    speeds = two_gpus.speeds(sides)
    words = r"Two replicas serve ([\d.]+) times as many tokens of W8"
    claim("36", words, speeds["2"] / speeds["1"])


def test_round_robin_is_blind_to_lengths():
    steps = {
        (mix, way): table_row("36", mix, way)[2]
        for mix in ("every second is long", "every third is long", "one in four, drawn")
        for way in ("round robin", "fewest tokens")
    }
    more = {mix: n / steps[mix, "fewest tokens"] for (mix, way), n in steps.items() if way == "round robin"}
    one = more.pop("every second is long")
    claim("36", r"gets all the long ones and needs (\S+) times as many steps", one)
    (percent,) = said(prose("36"), r"Here the luck is good, and less than (\d+) % is lost")
    assert all(ratio < 1 + number(percent) / 100 for ratio in more.values())


def test_prefixes_are_computed_as_often_as_said():
    own = 48 * 64  # tokens of the prompts after their prefixes
    rows = {n: [(tokens - own) / 256 for tokens in table_row("36", "", str(n))[1:]] for n in (1, 3, 5, 9, 15)}
    said(prose("36"), "By load alone, most prefixes are computed twice, .*; by prefix, each is computed once")
    said(prose("36"), "A single prefix is soon on both replicas")
    said(prose("36"), "With 9 prefixes, requests happen to alternate")
    by_load, by_prefix = ({n: prefixes[i] for n, prefixes in rows.items()} for i in (0, 1))
    assert by_load == {n: n if n == 9 else 2 * n for n in rows}
    assert by_prefix == {n: 2 if n == 1 else n for n in rows}


# 37


plan, plan_checks = load_exhibit("plan"), load_exhibit("plan_checks")
RUNS = plan_checks.read_runs(find())
LLAMA = next(run.cut for run in RUNS if run.model == "Llama-3.1-8B")
STEPS = plan_checks.StepModel(LLAMA, plan_checks.fit(RUNS))
CHECKS = plan_checks.check(RUNS)
PAIRS = plan_checks.pair_checks(find(), plan_checks.fit(RUNS))


def test_the_plan_is_as_near_to_the_records_as_said():
    words = r"off by at most (\S+) %, and by at most (\S+) % for a model that was not seen"
    step, whole = (
        [100 * plan_checks.worst(CHECKS, kind, other) for other in (False, True)]
        for kind in ("decode step", "whole run")
    )
    claim("37", words, *step)
    claim("37", r"Errors of whole runs reach (\S+) and (\S+) %", *whole)
    said(prose("37"), "a decode step within a tenth, and within a sixth for a model that it has not seen")
    assert step[0] < 10 and 10 < step[1] < 100 / 6
    words = r"step takes (\S+) µs per layer, (\S+) times .*\((\S+) with .*\), (\S+) times .* and (\S+) times"
    layer, weights, more, attention, activations = plan_checks.fit(RUNS).decode
    claim("37", words, layer, weights, weights + more, attention, activations)
    words = r"errors reach (\d+) %, and (\d+) % for a model that was not seen"
    claim("37", words, *(100 * plan_checks.worst(CHECKS, "prefill", other) for other in (False, True)))
    words = r"predicts two GPUs within (\d+) %\. Unscaled it is up to (\d+) % too fast"
    scaled = max(abs(one.other_error) for one in PAIRS)
    claim("37", words, math.ceil(100 * scaled), -100 * min(one.error for one in PAIRS))


def test_failures_and_shared_models_cost_what_is_said():
    """The notebook simulates them whenever it runs."""
    never, some, many = (table_row("37", "", every) for every in ("never", "15", "4"))
    said(prose("37"), "half of all requests notice little, and the unlucky ones wait many times as long")
    assert some[3] < 1.5 * never[3] and some[4] > 5 * never[4]
    said(prose("37"), "Once the rest cannot, most requests wait")
    assert many[2] > 30 and many[3] > 10 * never[3]
    said(prose("37"), "makes a lone request faster, but eight replicas serve more requests")
    cuts = [table_row("37", f"{8 // ranks} × {ranks}") for ranks in (1, 2, 4, 8)]
    assert cuts == sorted(cuts, reverse=True) == sorted(cuts, key=lambda one: -one[1])
    assert cuts[-1][0] < cuts[0][0] / 2


def test_prefills_and_steps_take_what_is_said():
    longest, *shorter = (STEPS.prefill(1, tokens) * 1e3 for tokens in (16_000, 8000, 1024))
    claim("37", r"on an idle GPU, (\d+) ms for 16,000 tokens", longest)
    words = r"of 8,000 tokens takes (\d+) ms .*1,024: (\d+) ms, beside a decode step of at most (\d+) ms"
    claim("37", words, *shorter, STEPS.decode(256, 256 * 512) * 1e3)


def test_routers_keep_the_limits_for_the_shares_said():
    """The notebook simulates them whenever it runs."""
    words = r"(\d+) % of the requests meet .* tokens, (\S+) % if .* and (\S+) to (\S+) % if it counts nothing"
    ways = ("fewest tokens", "fewest requests", "round robin", "at random")
    claim("37", words, *(table_row("37", "long, in chunks", way)[0] for way in ways))
    unchunked, *_ = table_row("37", "long, as one whole", "fewest tokens")
    claim("37", r"only (\S+) % meet them even with the best router", unchunked)
    many, *_ = table_row("37", "long, in chunks", "64 replicas, a router per host")
    claim("37", r"64 replicas keep the limits for (\S+) % of the requests", many)


# 38


shared_prompts = load_exhibit("shared_prompts")
CACHE = find().figures("prefix_cache")


def first_token_ms(n):
    one = shared_prompts.middle(CACHE["first_token"][str(n)])
    return 1e3 * one["filled"], 1e3 * one["cold"]


def test_first_tokens_after_a_cached_beginning_come_when_recorded_and_later_than_predicted():
    filled, cold = first_token_ms(8192)
    words = r"after ([\d.]+) ms instead of ([\d.]+): (\d+) % of the time .*(\d\d) % is left, .* still (\d+) %"
    left = [100 * one / other for one, other in map(first_token_ms, (8192, 1024, 256))]
    claim("38", words, filled, cold, *left)
    n_bytes = 8192 * KNOWN_SHAPES["Qwen/Qwen3-0.6B"].kv_bytes_per_token(2)
    predicted = first_token_ms(0)[1] + read_us(find(), n_bytes) / 1e3
    claim("38", r"The prediction, ([\d.]+) ms, is wrong", predicted)
    claim("38", r"the ([\d.]+) ms between prediction and record", filled - predicted)


def test_batches_with_a_shared_beginning_are_as_fast_as_recorded():
    tok_s = {n: shared_prompts.middle(CACHE["batch"][str(n)], "tok_s") for n in (0, 256, 1024, 8192)}

    def gains(way):
        return [tok_s[n][way] / tok_s[n]["cold"] for n in (8192, 1024)]

    (long, short), both = gains("filled"), [tok_s[8192][way] for way in ("filled", "cold")]
    words = r"is ([\d.]+) times as fast with 8,192 .*\(([\d,]+) tok/s against ([\d,]+)\), ([\d.]+) times with"
    claim("38", words, long, *both, short)
    claim("38", r"it is ([\d.]+) and ([\d.]+) times as fast", *gains("empty"))
    both = [tok_s[256][way] for way in ("empty", "cold")]
    claim("38", r"still ([\d.]+) times \(([\d,]+) against ([\d,]+)\)", both[0] / both[1], *both)
    words = r"the cache costs (\d+) % \(([\d,]+) against ([\d,]+)\)"
    claim(
        "38", words, 100 * (1 - tok_s[0]["filled"] / tok_s[0]["cold"]), tok_s[0]["filled"], tok_s[0]["cold"]
    )
    assert CACHE["batch"]["256"]["empty"]["cached_tokens"] == [31 * 256] * 7


def test_a_workload_after_one_system_prompt_gains_what_was_recorded():
    runs, (ours, theirs) = CACHE["PFX"]["runs"], one_lease("Qwen3-0.6B")["PFX 256x64 p1024+64"]
    tok_s, (cached,) = shared_prompts.middle(runs, "tok_s"), set(runs["empty"]["cached_tokens"])
    words = r"makes this workload ([\d.]+) times as fast .* which (\d+) of the (\d+) requests find"
    claim(
        "38", words, tok_s["empty"] / tok_s["cold"], cached / CACHE["PFX"]["shared"], CACHE["PFX"]["requests"]
    )
    claim("38", r"RoseLLM was ([\d.]+) times as fast", ours / theirs)
