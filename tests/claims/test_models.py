"""Notebooks of other models and of two GPUs: their figures are those of the records."""

from __future__ import annotations

import math

from rosellm.lab.records import all_reduce, two_gpus
from rosellm.lab.records.records import REFERENCE, Results, _rivals_file, find, read_us, results_folder
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.recipe import BEST_RUNG
from tests.claims.reading import claim, number, prose, said

models, model_ladder = load_exhibit("models"), load_exhibit("model_ladder")
# 22


def test_the_published_figures_and_ours_are_those_of_the_records():
    words = r"H200, ([\d.]+) µs a token were.*?and ([\d.]+) µs for a CUDA.*?takes (\d+) µs"
    rivals = _rivals_file()
    (published,) = rivals["modern_models"]["published"].values()
    kernel = published["HazyResearch megakernel, us a token"]
    graph = published["CUDA graph with programmatic dependent launch, us a token"]
    ours = rivals["one_lease_2026_11_26"]["llama_1b_protocol"]["decode only"]
    claim("22", words, kernel, graph, ours)


# 27


RESULTS = find()
TIMES = {
    name: {row.workload: models.speed_up(row) for row in models.lease_table(RESULTS, name)}
    for name in models.recorded_shapes(RESULTS)
}


def test_the_floor_rests_on_the_recorded_ceilings():
    ceilings = RESULTS.load("ceilings")["figures"]
    values = [max(ceilings[name]) for name in ("read_TB_s", "copy_TB_s", "matmul_TFLOP_s")]
    claim("27", r"read once at ([\d.]+) TB/s.* reaches ([\d.]+)\), .*recorded (\d+) TFLOP/s", *values)


def test_leads_over_vllm_are_those_of_one_session():
    words = (
        r"largest model: ([\d.]+) to ([\d.]+) times .* of one token, ([\d.]+) to ([\d.]+) times after 32,000"
    )
    values = [choose(one[w] for one in TIMES.values()) for w in ("D1", "L32K") for choose in (min, max)]
    claim("27", words, *values)
    equal = [TIMES["Llama-3.1-8B"][w] for w in ("MIX", "L8K", "L32K", "PRE")]
    percent = math.ceil(100 * max(abs(one - 1) for one in equal))
    words = r"equal within (\d+) % at MIX, L8K, L32K and PRE \(([\d.]+) to ([\d.]+) times\)"
    claim("27", words, percent, min(equal), max(equal))
    for w in ("D1", "L32K"):  # smallest with the largest model
        leads = [one[w] for one in TIMES.values()]
        assert leads.index(min(leads)) == len(leads) - 1
    assert all(one["L32K"] < one["D1"] for one in TIMES.values())


# 28


def test_the_three_records_of_one_step_are_those_named():
    words = r"three records: (\d+) µs in whole runs above, (\d+) µs here, (\d+) µs in the ledger"
    results, qwen = Results(results_folder() / REFERENCE), "Qwen3-0.6B"
    records = (
        model_ladder.mean_step_us(results, qwen, "D1"),
        model_ladder.recorded_ladder(results, qwen, "D1")[BEST_RUNG],
        model_ladder.recorded_ledgers(results, qwen)["D1"].step_us,
    )
    claim("28", words, *records)


def test_the_ladders_ends_and_the_largest_models_weights_take_what_is_said():
    results = Results(results_folder() / REFERENCE)
    ladder = model_ladder.gpt2_ladder(results, "D1")
    values = [ladder[rung] / 1e3 for rung in ("dense", BEST_RUNG)]
    weights = models.recorded_shapes(results)["Llama-3.1-8B"].n_step_parameters * 2
    claim("28", r"recorded step went from ([\d.]+) to ([\d.]+) ms", *values)
    alone = r"the 8B model, whose weights alone take ([\d.]+) ms"
    claim("28", alone, read_us(results, weights) / 1e3)


# 35


cuts = load_exhibit("cuts")
US = {way: times["8"]["median"] for way, times in all_reduce.recorded(find())["us"].items()}
FASTEST = min(us - US["none"] for way, us in US.items() if way != "none")
RUNS = two_gpus.recorded_runs(find(), kind="tensor_parallel")


def allowed(name: str) -> float:
    """µs that an all-reduce may take before nothing is left of the bytes saved."""
    one, two = (cuts.step_bytes(cuts.MODELS[name], n) for n in (1, 2))
    return read_us(find(), one - two) / cuts.sums_a_step(cuts.MODELS[name])


def test_what_an_all_reduce_takes_and_may_take_is_recorded():
    values = [FASTEST, allowed("Qwen3-0.6B"), allowed("Llama-3.1-8B")]
    claim("35", r"takes (\S+) µs, and it may take (\S+)\. Llama-3.1-8B may take (\d+) µs", *values)
    assert allowed("Qwen3-0.6B") < FASTEST < allowed("Llama-3.2-1B") < allowed("Llama-3.1-8B")


def test_only_the_measured_model_is_said_to_win():
    assert list(RUNS) == ["Llama-3.1-8B"]
    speeds = two_gpus.speeds(RUNS["Llama-3.1-8B"]["D1"])
    alone, two = speeds["1"], speeds["2 one_shot"]
    claim("35", r"does win where it was measured: ([\d.]+) times at D1", two / alone)
    words = r"takes (\S+) ms per token at D1; .* of (\S+) µs would be (\S+) ms, and (\S+) are recorded"
    ms = 1e3 / alone
    hoped = ms / 2 + cuts.sums_a_step(cuts.MODELS["Llama-3.1-8B"]) * number(said(prose("35"), words)[1]) / 1e3
    claim("35", words, ms, FASTEST, hoped, 1e3 / two)
