"""Notebooks of arrivals, joined steps, replicas and plans: their figures are those recorded or simulated."""

from __future__ import annotations

import math
from functools import cache
from statistics import median

from rosellm.lab.records import arrivals, two_gpus
from rosellm.lab.records.records import find, one_lease, read_us
from rosellm.lab.records.serving_times import ServingTimes
from rosellm.models.families.table import KNOWN_SHAPES
from rosellm.roseinfer.exhibits import load_exhibit
from tests.claims.reading import claim, number, prose, said, table_row

simulated_run = load_exhibit("simulated_fleet").simulated_run

# 33


arrival_runs = load_exhibit("arrival_runs")
RECORDED = arrival_runs.recorded_servers(find())
QWEN3, GPT2 = ({run["share"]: run for run in RECORDED[name]["runs"]} for name in ("Qwen3-0.6B", "gpt2"))
TTFT_MS, ITL_MS = map(number, said(prose("33"), r"(\d+) ms to the first token, (\d+) ms between"))


@cache
def simulated(name, share):
    found = RECORDED[name]
    (run,) = (run for run in found["runs"] if run["share"] == share)
    times = ServingTimes.from_dict(found["times"])
    return simulated_run(arrivals.arrivals_of(run["options"]), times, found["max_batch_size"])


def test_queues_are_those_recorded_and_simulated():
    both = QWEN3[0.95], simulated("Qwen3-0.6B", 0.95)
    most = [max(one["queue_in_flight"]) for one in both]
    claim("33", r"agree even at 95 %: (\d+) requests in the engine at most against (\d+), and never", *most)
    claim("33", r"never more than (\d+) wait", max(max(one["queue_waiting"]) for one in both))
    waits = [max(one["queue_waiting"]) for s in (0.8, 0.95) for one in (GPT2[s], simulated("gpt2", s))]
    words = r"up to (\d+) waiting and .*? (\d+); at 95 % the record has (\d+) and the simulation (\d+)\."
    claim("33", words, *waits)


def test_the_simulation_is_as_near_to_the_record_as_said_where_it_is_trusted():
    words = r"The simulation is within (\d+) % of these medians and of the 95th percentiles"
    (percent,) = said(prose("33"), words)
    keys = ("ttft_p50_s", "ttft_p95_s", "itl_p50_s", "itl_p95_s")
    apart = [abs(simulated("Qwen3-0.6B", s)[key] / QWEN3[s][key] - 1) for s in QWEN3 for key in keys]
    assert round(100 * max(apart)) == number(percent)
    ms = simulated("gpt2", 0.95)["ttft_p95_s"] * 1e3
    claim("33", r"the simulation, which says (\d+) ms, is wrong", ms)


def test_latencies_and_capacities_are_those_recorded():
    words = r"95 % of its (\d+) requests .*TTFT rises from (\S+) to (\S+) ms, .* from (\S+) to (\S+) ms, and"
    values = [RECORDED["Qwen3-0.6B"]["capacity_req_s"]]
    values += [QWEN3[s][key] * 1e3 for key in ("ttft_p50_s", "itl_p50_s") for s in (0.5, 0.95)]
    claim("33", words, *values)
    words = r"between 80 and 95 % of (\d+) requests per second:.* one request in twenty waits (\d+) ms"
    claim("33", words, RECORDED["gpt2"]["capacity_req_s"], GPT2[0.95]["ttft_p95_s"] * 1e3)


def test_the_knees_are_where_the_records_keep_and_break_the_limits():
    def keeps(run):
        tight = run["within_limits_share"] == 1 and TTFT_MS >= 100 and ITL_MS >= 20
        return tight and run["ttft_p95_s"] * 1e3 <= TTFT_MS

    assert [keeps(QWEN3[share]) for share in (0.5, 0.8, 0.95)] == [True, True, True]
    assert [keeps(GPT2[share]) for share in (0.5, 0.8, 0.95)] == [True, True, False]
    assert GPT2[0.95]["ttft_p95_s"] * 1e3 > TTFT_MS
    assert all(list(one["limits_s"]) == [0.1, 0.02] for one in RECORDED.values())


def test_a_long_prompts_figures_are_those_recorded():
    found = arrival_runs.recorded_long_prompt(find())["Qwen3-0.6B"]

    def ms(way, key):
        return found[way][key] * 1e3

    p99, wait = "itl_beside_p99_s", "long_prompt_ttft_s"
    words = r"a gap of (\S+) ms\. .*gaps of at most (\S+) ms, and the prompt waits (\d+) ms .* of (\d+)\."
    ways = ("whole", p99), ("chunked", p99), ("chunked", wait), ("whole", wait)
    claim("33", words, *(ms(*one) for one in ways))
    words = r"([\d,]+) ms with chunks of 128, ([\d,]+) ms .* of 32, .*\(([\d.]+) ms against ([\d.]+)\)"
    values = [ms(f"chunks of {n}", wait) for n in (128, 32)]
    claim("33", words, *values, *(ms(f"chunks of {n}", "itl_beside_p50_s") for n in (32, 128)))
    apart = [ms(way, "itl_apart_p50_s") for way in ("chunks of 32", "whole")]
    words = r"shorter than usual, ([\d.]+) ms: .*\(([\d.]+) ms against about ([\d.]+)\)"
    claim("33", words, ms("whole", "itl_beside_p50_s"), *apart)
    assert ms("whole", p99) > ITL_MS > ms("chunked", p99)
    assert ms("chunked", wait) < TTFT_MS < ms("chunks of 128", wait)
    saved = [100 * (1 - ms(f"joined, {way}", wait) / ms(way, wait)) for way in ("chunked", "chunks of 32")]
    claim("33", r"the prompt waits (\d+) to (\d+) % less", *saved)
    assert 5.5 < ms("whole", wait) / ms("whole", "itl_beside_mean_s") < 6.5


# 34


both_ways = load_exhibit("both_ways")
FOUND = both_ways.recorded(find())["gpt2"]
SLOWER = {
    (rows, tokens): 100 * (joined / apart - 1)
    for rows, tokens, apart, joined, _ in both_ways.beside_rows(FOUND)
}


spared = load_exhibit("spared_passes")
GEMMS_US = spared.recorded_products()


def test_products_take_what_is_said_by_rows():
    words = r"nearly the same time, .* 512 rows take less than a third more\. .* half as long again as 1,024"
    said(prose("34"), f"Up to 256 rows the library's GEMMs take {words}")
    assert max(us for rows, us in GEMMS_US.items() if rows <= 256) < 1.2 * GEMMS_US[1]
    assert GEMMS_US[512] < GEMMS_US[1] * 4 / 3 and abs(GEMMS_US[2048] / GEMMS_US[1024] - 1.5) < 0.05


def test_there_is_little_to_save_in_joined_passes():
    w8 = arrivals.arrivals_of(arrivals.streaming_options(arrivals.WORKLOAD, 512))
    steps = spared.taken_by(w8, together=256)
    run_s, step_s = (find().value("W8", "split_kv", name) for name in ("total_time_s", "decode_step_p50_s"))
    saved = 100 * spared.saved_us(steps) / 1e6 / run_s
    larger = sum(rows > 0 and tokens > 1024 for rows, tokens in steps)
    words = r"3 to 10 %: joining the GEMMs alone would save (\d+) % .* The run's (\d+) larger prefills"
    claim("34", words, saved, larger)
    said(prose("34"), "Only a fifth of W8's steps meet prompts, and GEMMs are a quarter of a decode step")
    assert abs(sum(spared.joins(*step) for step in steps) / len(steps) - 1 / 5) < 0.02
    assert abs(GEMMS_US[256] / 1e6 / step_s - 1 / 4) < 0.05


def test_a_joined_step_is_slower_by_what_was_recorded():
    own = [one for (rows, _), one in SLOWER.items() if rows >= 64]
    for words, found in (
        (r"with one prompt in it takes (\d+) to (\d+) % longer", SLOWER.values()),
        (r"at every size: (\d+) to (\d+) % slower", SLOWER.values()),
        (r"the step takes (\d+) to (\d+) % longer although", own),
    ):
        claim("34", words, min(found), max(found))
    assert min(SLOWER.values()) > 0


def test_a_long_prompts_waits_are_those_recorded_and_overlap():
    waits = {
        (way, kind): [run["long_prompt_ttft_s"] * 1e3 for run in FOUND["long_prompt"][way][kind]["repeats"]]
        for way in ("apart", "joined")
        for kind in ("chunked", "whole")
    }
    values = [median(waits[way, kind]) for kind in ("chunked", "whole") for way in ("joined", "apart")]
    words = r"\(([\d.]+) against ([\d.]+) ms in chunks, ([\d.]+) against ([\d.]+) ms whole\)"
    claim("34", words, *values)
    claim("34", r"one joined run waited ([\d.]+) ms", max(wait for runs in waits.values() for wait in runs))
    assert all(max(waits["joined", k]) > min(waits["apart", k]) for k in ("chunked", "whole"))
    assert both_ways.verdict_of(FOUND).sign == 0


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
    said(prose("37"), "Whole runs are nearly as close")
    assert all(abs(one - other) < 2 for one, other in zip(step, whole, strict=True))
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
    said(prose("37"), "Sharing the model buys a lone user speed with everyone's throughput")
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
    words = r"tokens keeps .* for (\d+) % .*requests for (\S+) %, .* nothing for (\S+) to (\S+) %: their"
    ways = ("fewest tokens", "fewest requests", "round robin", "at random")
    claim("37", words, *(table_row("37", "long", way)[0] for way in ways))
    unchunked, *_ = table_row("37", "long, as one whole", "fewest tokens")
    claim("37", r"keeps them for (\S+) % only", unchunked)


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
    words = r"makes PFX ([\d.]+) times as fast .* which (\d+) of the (\d+) requests find"
    claim(
        "38", words, tok_s["empty"] / tok_s["cold"], cached / CACHE["PFX"]["shared"], CACHE["PFX"]["requests"]
    )
    claim("38", r"RoseLLM was ([\d.]+) times as fast", ours / theirs)
