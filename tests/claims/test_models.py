"""Notebooks of other models and of two GPUs: their figures are those of the records."""

from __future__ import annotations

import math

from rosellm.lab.records import all_reduce, rank_steps, two_gpus
from rosellm.lab.records.floors import Ceiling, prefill_floors_us
from rosellm.lab.records.records import (
    REFERENCE,
    Results,
    _rivals_file,
    find,
    floor_us,
    modern_rivals,
    one_lease,
    read_us,
    results_folder,
    rivals,
)
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.recipe import BEFORE, BEST_RUNG, SIDE_BRANCHES
from tests.claims.reading import claim, number, prose, said, table_row

RESULTS = find()
models, model_ladder = load_exhibit("models"), load_exhibit("model_ladder")
roles = load_exhibit("roles_chart")
SHAPES = models.recorded_shapes(RESULTS)
QWEN, LLAMA_1B, LLAMA_8B = SHAPES

# 22


def test_the_published_figures_and_ours_are_those_of_the_records():
    words = r"figures are ([\d.]+) µs a token for it and ([\d.]+) µs for a CUDA.*?takes (\d+) µs"
    file = _rivals_file()
    (published,) = file["modern_models"]["published"].values()
    kernel = published["HazyResearch megakernel, us a token"]
    graph = published["CUDA graph with programmatic dependent launch, us a token"]
    ours = file["one_lease_2026_11_26"]["llama_1b_protocol"]["decode only"]
    claim("22", words, kernel, graph, ours)


def rests(model: str) -> list[float]:
    """µs per layer above the floor at one sequence: ours, the rival's; both again, in one session."""
    if model == "GPT-2 small":
        least, tok_s, own = floor_us(RESULTS, "W0"), RESULTS.value("W0", BEST_RUNG), one_lease("gpt2")["W0"]
        steps, n_layers = [1e6 / tok_s, 1e6 / rivals("W0")[models.RIVAL]["W0"]], model_ladder.GPT2.n_layers
    else:
        least, own = model_ladder.step_floor_us(RESULTS, SHAPES[model], "D1"), one_lease(model)["D1"]
        tok_s, n_layers = modern_rivals(model)[models.RIVAL]["D1"], SHAPES[model].n_layers
        steps = [model_ladder.mean_step_us(RESULTS, model, "D1"), 1e6 / tok_s]
    return [(us - least) / n_layers for us in [*steps, *(1e6 / one for one in own)]]


def test_the_rest_of_a_step_is_our_layers_and_the_rivals_host():
    table = {name: rests(name) for name in ("GPT-2 small", *SHAPES)}
    for name, own in table.items():
        layers = str((SHAPES | {"GPT-2 small": model_ladder.GPT2})[name].n_layers)
        assert table_row("22", name, layers)[1:] == [float(f"{us:.3g}") for us in own]
    ours, theirs, slower, their_slower = zip(*table.values(), strict=True)
    words = (
        r"costs us (\d+) to (\d+) µs above its floor, .* vLLM (\d+) to (\d+) µs in .* and (\d+) µs in GPT-2"
    )
    claim("22", words, min(ours), max(ours), min(theirs[1:]), max(theirs[1:]), theirs[0])
    floors = {one: model_ladder.step_floor_us(RESULTS, shape, "D1") for one, shape in SHAPES.items()}
    reading = [floors[one] / SHAPES[one].n_layers for one in (QWEN, LLAMA_8B)]
    claim("22", r"per layer it is (\d+) µs for Qwen3-0.6B .*, and (\d+) for Llama-3.1-8B", *reading)
    small = [1e6 / one_lease(one)["D1"][1] for one in (QWEN, LLAMA_1B)] + [1e6 / one_lease("gpt2")["W0"][1]]
    words = r"a step takes ([\d.]+) to ([\d.]+) ms in each of the three smaller models"
    claim("22", words, min(small) / 1e3, max(small) / 1e3)
    said(prose("22"), "although their floors differ by a factor of ten")
    claim("22", r"our overheads differ by at most (\d+) µs", max(map(abs, map(float.__sub__, ours, slower))))
    factor = floors[LLAMA_1B] / floor_us(RESULTS, "W0")
    assert 9 < factor < 11
    assert all(later > 1.03 * one for one, later in zip(theirs, their_slower, strict=True))


def test_the_lead_ends_where_both_engines_wait_for_the_gpu():
    (most,) = said(prose("22"), r"within (\d+) % of each other on MIX, L8K, L32K and PRE")
    own = one_lease(LLAMA_8B)
    assert all(abs(own[w][0] / own[w][1] - 1) < number(most) / 100 for w in ("MIX", "L8K", "L32K", "PRE"))
    assert all(own[w][0] > 1.1 * own[w][1] for w in ("D1", "D8", "D64"))


# 26


def test_one_part_is_there_for_decoding():
    parts = "GPT-2's parts", "RMSNorm, no biases", "RoPE", "SwiGLU", "8 KV heads, not 32"
    weights, _, heads, _ = zip(*(table_row("26", part) for part in parts), strict=True)
    said(prose("26"), r"saves three quarters of the K/V of 64 sequences of 4,096 tokens")
    assert len(set(heads[:4])) == 1 and abs(heads[4] / heads[0] - 1 / 4) < 0.002
    (most,) = said(prose("26"), r"no other part changes a step by more than (\S+) GB")
    changed = {part: abs(two - one) for part, one, two in zip(parts[1:], weights, weights[1:], strict=False)}
    assert max(gb for part, gb in changed.items() if part != "8 KV heads, not 32") <= number(most)
    added, saved = 100 * (weights[3] / weights[2] - 1), 100 * (1 - weights[4] / weights[3])
    claim("26", r"SwiGLU adds (\d+) % to them, and shared KV heads save (\d+) %", added, saved)


def test_the_modern_model_predicts_better_and_differs_in_more_than_its_parts():
    old, new = (RESULTS.load(name) for name in ("train", "train-qwen3"))
    scores = [one["validation"]["perplexity"] for one in (new, old)]
    claim("26", r"recorded perplexity is (\S+), against (\S+), after the same", *scores)
    said(prose("26"), "Most of this difference comes from the longer windows, as the table shows")
    names = "rose-tiny, 512", "rose-tiny-qwen3, 512", "rose-tiny-qwen3, 1,024"
    (ours,), (modern,), (longer,) = (table_row("26", name) for name in names)
    assert 0 < ours - modern < modern - longer
    assert old["tokens_seen"] == new["tokens_seen"]
    claim("26", r"after the same (\d+) million tokens", old["tokens_seen"] / 1e6)
    windows = new["model"]["max_position_embeddings"], old["model"]["n_positions"]
    parameters = [one["model"]["n_parameters"] for one in (old, new)]
    words = r"windows of ([\d,]+) tokens, not (\d+), in half as many steps, and it has (\d+) % more"
    claim("26", words, *windows, 100 * (parameters[1] / parameters[0] - 1))
    assert 2 * new["steps"] == old["steps"]


# 27
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
        r"largest model: (\S+) to (\S+) times after a prompt of one token, (\S+) to (\S+) times after 32,000"
    )
    values = [choose(one[w] for one in TIMES.values()) for w in ("D1", "L32K") for choose in (min, max)]
    claim("27", words, *values)
    equal = [TIMES["Llama-3.1-8B"][w] for w in ("MIX", "L8K", "L32K", "PRE")]
    percent = math.ceil(100 * max(abs(one - 1) for one in equal))
    words = r"equal within (\d+) % at MIX, L8K, L32K and PRE \(([\d.]+) to ([\d.]+) times\)"
    claim("27", words, percent, min(equal), max(equal))
    rows = {row.workload: row for row in models.lease_table(RESULTS, LLAMA_8B)}
    shares = [models.shares_of_floor(rows[w]) for w in ("MIX", "L8K", "L32K", "PRE")]
    near = [100 * share for both in shares for share in both]
    claim("27", r"there the floor is (\d+) to (\d+) % of each engine's time", min(near), max(near))
    for w in ("D1", "L32K"):  # smallest with the largest model
        leads = [one[w] for one in TIMES.values()]
        assert leads.index(min(leads)) == len(leads) - 1
    assert all(one["L32K"] < one["D1"] for one in TIMES.values())


CACHED = {"D1": 256, "L32K": 32_128}  # tokens at mid-run


def knee(name: str, batch: int = 1) -> float:
    """The context at which a step reads as many bytes of K/V as of weights."""
    arch = SHAPES[name]
    return arch.n_step_parameters * 2 / (batch * arch.kv_bytes_per_token(2))


def test_the_smallest_model_has_the_earliest_knee():
    said(
        prose("27"), r"it caches nearly as much per token as the 8B model\. At L32K only Qwen3-0.6B is beyond"
    )
    said(prose("27"), "at L8K, with 16 sequences, all three models are")
    assert [name for name in SHAPES if knee(name) < 32_000] == [QWEN] == [min(SHAPES, key=knee)]
    assert all(knee(name, batch=16) < 8192 for name in SHAPES)
    assert 0.8 < SHAPES[QWEN].kv_bytes_per_token(2) / SHAPES[LLAMA_8B].kv_bytes_per_token(2) < 1


def test_long_runs_are_far_from_their_floor_for_their_prompts():
    runs = {(name, w): models.medians(RESULTS, name, w) for name in SHAPES for w in CACHED}
    step = {key: run["decode_step_mean_s"] * 1e6 for key, run in runs.items()}
    read = {
        (name, w): arch.n_step_parameters * 2 + n * arch.kv_bytes_per_token(2)
        for name, arch in SHAPES.items()
        for w, n in CACHED.items()
    }
    floor = {key: read_us(RESULTS, n_bytes) for key, n_bytes in read.items()}
    said(prose("27"), "Computing the prompt takes nearly half of the time of the Llamas' L32K runs")
    long = [runs[name, "L32K"] for name in (LLAMA_1B, LLAMA_8B)]
    assert all(0.45 < run["prefill_time_s"] / run["total_time_s"] < 0.5 for run in long)
    said(prose("27"), "a step of the 1B model is as near its floor as at 256")
    near = {key: 100 * floor[key] / us for key, us in step.items()}
    assert abs(near[LLAMA_1B, "L32K"] - near[LLAMA_1B, "D1"]) < 1
    claim("27", r"8B model is (\d+) points further", near[LLAMA_8B, "D1"] - near[LLAMA_8B, "L32K"])
    ceiling = Ceiling.of(RESULTS.figures("ceilings"))
    bounds = [prefill_floors_us(SHAPES[name], 1, 32_000, 2, ceiling) for name in (LLAMA_1B, LLAMA_8B)]
    least = [one["GEMM"] + one["head"] + one["attention"] for one in bounds]
    prompts = [us / 1e4 / run["prefill_time_s"] for us, run in zip(least, long, strict=True)]
    words = r"further from its own floor \((\d+) and (\d+) %\) than the steps are \((\d+) and (\d+) %\)"
    claim("27", words, *prompts, near[LLAMA_1B, "L32K"], near[LLAMA_8B, "L32K"])
    few, many = (QWEN, "D1"), (QWEN, "L32K")
    words = r"reads (\S+) times the bytes in (\S+) times the time, .* its step grows by only (\d+) %"
    overhead = {key: step[key] - floor[key] for key in (few, many)}
    percent = 100 * (overhead[many] / overhead[few] - 1)
    claim("27", words, read[many] / read[few], step[many] / step[few], percent)


# 28


LADDERS = model_ladder.twin_ladders(RESULTS, QWEN)
LEDGERS = model_ladder.recorded_ledgers(RESULTS, QWEN)


def foretold(name: str, workload: str, rung: str = BEST_RUNG) -> float:
    """µs of a step, predicted from GPT-2's."""
    return model_ladder.foretold_ladder(RESULTS, SHAPES[name], workload)[rung]


def test_the_guess_holds_for_one_sequence_and_fails_for_64_of_the_largest_model():
    step = {(w, name): model_ladder.mean_step_us(RESULTS, name, w) for w in ("D1", "D64") for name in SHAPES}
    off = {(w, name): 100 * abs(us / foretold(name, w) - 1) for (w, name), us in step.items()}
    words = r"it is within (\d+) % of all three recorded steps"
    claim("28", words, math.ceil(max(off["D1", name] for name in SHAPES)))
    words = r"For 64 sequences it is (\d+) and (\d+) % off for the small models"
    claim("28", words, *(off["D64", name] for name in (QWEN, LLAMA_1B)))
    floor = {w: model_ladder.step_floor_us(RESULTS, SHAPES[LLAMA_8B], w) for w in ("D1", "D64")}
    said(prose("28"), "because nine tenths of its step are the floor")
    assert round(floor["D1"] / step["D1", LLAMA_8B], 1) == 0.9
    rest, predicted = (us - floor["D64"] for us in (step["D64", LLAMA_8B], foretold(LLAMA_8B, "D64")))
    claim("28", r"8B model's step is (\S+) times as long as predicted", rest / predicted)


def paying() -> dict[str, set[str]]:
    """Ladder → rungs towards the best that take 5 % off a step, by more than engines or turns differ."""
    found = {}
    for name, steps in model_ladder.twin_steps(RESULTS, QWEN).items():
        rungs = [
            rung
            for rung in LADDERS["GPT-2, W0"]
            if BEFORE.get(rung) in steps and rung in LADDERS["Qwen3, D1"] and rung not in SIDE_BRANCHES
        ]
        pairs = {rung: (steps[BEFORE[rung]], steps[rung]) for rung in rungs}
        found[name] = {
            rung
            for rung, (old, new) in pairs.items()
            if new.us <= 0.95 * old.us and new.spread_us[1] < old.spread_us[0]
        }
    return found


def test_most_of_the_rungs_of_gpt2_pay_on_qwen3():
    one, modern_one, many, modern_many = paying().values()
    said(prose("28"), "at least three quarters do so on Qwen3, with one sequence and with 64")
    assert len(one & modern_one) >= 0.75 * len(one) and len(many & modern_many) >= 0.75 * len(many)
    said(prose("28"), "`fused_gelu` saves 5 % only on Qwen3 with 64 sequences, `fused_head` only on")
    assert "fused_gelu" in modern_many and "fused_gelu" not in one | many | modern_one
    assert "fused_head" in one & many and "fused_head" not in modern_one | modern_many
    saved = [LADDERS[t][BEFORE["fused_head"]] - LADDERS[t]["fused_head"] for t in ("Qwen3, D1", "GPT-2, W0")]
    claim("28", r"saves (\d+) µs on Qwen3 and (\d+) on GPT-2", *saved)
    assert SHAPES[QWEN].vocab_size % 64 == 0 != model_ladder.GPT2.vocab_size % 2
    said(prose("28"), "`small_gemm` takes a third off the step, and `split_kv` pays, too")
    assert {"small_gemm", "split_kv"} <= modern_one
    us = LADDERS["Qwen3, D1"]
    assert abs(us["small_gemm"] / us[BEFORE["small_gemm"]] - 2 / 3) < 0.025
    turns = [model_ladder.twin_steps(RESULTS, QWEN)[f"Qwen3, {w}"]["dense"].spread_us for w in ("D1", "D64")]
    words = r"two turns of `dense` differ by (\d+) % at D1, and by (\d+) % at D64"
    claim("28", words, *(100 * (most / least - 1) for least, most in turns))


def test_the_way_was_not_predicted():
    ladder = model_ladder.recorded_ladder(RESULTS, QWEN, "D1")
    longer = {r: ladder[r] / foretold(QWEN, "D1", r) - 1 for r in ("resident_step", BEST_RUNG)}
    words = r"takes (\d+) % longer than predicted at `resident_step`, but .* is within an eighth of it"
    claim("28", words, 100 * longer["resident_step"])
    assert longer["resident_step"] > 1 / 2 and abs(longer[BEST_RUNG]) < 1 / 8
    said(prose("28"), "a rung does not save the same time per layer on both models")
    said(prose("28"), "saves more than three times as much per layer as on GPT-2")
    layers = {"GPT-2, W0": model_ladder.GPT2.n_layers, "Qwen3, D1": SHAPES[QWEN].n_layers}
    one, two = (
        (LADDERS[t][BEFORE["fused_append"]] - LADDERS[t]["fused_append"]) / n for t, n in layers.items()
    )
    assert two / one > 3


def test_both_engines_pay_by_the_layer():
    rests = [model_ladder.rest_a_layer(RESULTS, name, arch, "D1") for name, arch in SHAPES.items()]
    said(prose("28"), "is nearly the same for every model, and four to five times ours")
    ours, theirs = zip(*rests, strict=True)
    assert max(theirs) / min(theirs) < 1.05
    claim("28", r"Ours grows with the width, from (\d+) to (\d+) µs", min(ours), max(ours))
    assert {round(them / us) for us, them in rests} == {4, 5}
    leads = [models.speed_up(models.table(RESULTS, name)[0]) for name in (QWEN, LLAMA_8B)]
    claim("28", r"the lead falls from (\S+) to (\S+) times\.", *leads)


def test_what_bounds_a_step_is_what_the_ledgers_say():
    parts = {w: roles.by_role(ledger) for w, ledger in LEDGERS.items()}
    attention, gemm = ({w: own[role] for w, own in parts.items()} for role in ("attention", "GEMM"))
    (launched,) = (row.launches for row in LEDGERS["D1"].rows if row.cause == "attention")
    words = r"attention takes (\d+) µs to read what takes (\d+) µs .* one kernel per layer, of (\S+) µs"
    us, floor_us = attention["D1"]
    claim("28", words, us, floor_us, us / launched)
    assert launched == SHAPES[QWEN].n_layers
    near = {w: 100 * one.floor_us / one.us for w, one in gemm.items()}
    words = r"their floor is (\d+) % of their time for one .* (\d+) % for 16 \(L8K\)"
    claim("28", words, near["D1"], near["L8K"])
    share = {w: 100 * one.us / LEDGERS[w].step_us for w, one in attention.items()}
    near_bytes = {w: 100 * one.floor_us / one.us for w, one in attention.items()}
    words = r"is (\d+) % of the step, and its floor (\d+) % .* L32K it is (\d+) %, and its floor (\d+) %"
    claim("28", words, *(of[w] for w in ("L8K", "L32K") for of in (share, near_bytes)))
    words = r"PRE's GEMMs run at (\d+) % .* its attention is nearly a third of the time, .* is (\d+) %\."
    claim("28", words, near["PRE"], near_bytes["PRE"])
    assert 0.3 < share["PRE"] / 100 < 1 / 3
    said(prose("28"), "profiled kernels fill each step")
    assert not any(roles.IDLE in own for own in parts.values())


def test_the_three_records_of_one_step_are_those_named():
    words = r"three records .*: (\d+) µs in whole runs above, (\d+) µs here, (\d+) µs in the ledger"
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
US = {
    kb: {way: times[kb]["median"] for way, times in all_reduce.recorded(find())["us"].items()}
    for kb in ("8", "512")
}
FASTEST = min(us - US["8"]["none"] for way, us in US["8"].items() if way != "none")
RUNS = two_gpus.recorded_runs(find(), kind="tensor_parallel")


def allowed(name: str) -> float:
    """µs that an all-reduce may take before nothing is left of the bytes saved."""
    one, two = (cuts.step_bytes(cuts.MODELS[name], n) for n in (1, 2))
    return read_us(find(), one - two) / cuts.sums_a_step(cuts.MODELS[name])


def test_what_an_all_reduce_takes_and_may_take_is_recorded():
    values = [allowed("Qwen3-0.6B"), allowed("Llama-3.1-8B")]
    words = r"adds (\S+) µs \((\S+) − (\S+)\), and (\S+) is the break-even\. Llama-3.1-8B .* at (\d+) µs,"
    claim("35", words, FASTEST, US["8"]["one_shot"], US["8"]["none"], *values)
    assert allowed("Qwen3-0.6B") < FASTEST < allowed("Llama-3.2-1B") < allowed("Llama-3.1-8B")


def test_each_all_reduce_of_the_small_model_may_take_little():
    small = "Qwen3-0.6B"
    words = r"Each of the (\d+) all-reduces .* may take (\S+) µs, each of the (\d+) of .* (\d+) times as long"
    n_small, n_large = (cuts.sums_a_step(cuts.MODELS[name]) for name in (small, "Llama-3.1-8B"))
    claim("35", words, n_small, allowed(small), n_large, allowed("Llama-3.1-8B") / allowed(small))


def test_only_the_measured_model_is_said_to_win():
    assert list(RUNS) == ["Llama-3.1-8B"]
    speeds = two_gpus.speeds(RUNS["Llama-3.1-8B"]["D1"])
    alone, two = speeds["1"], speeds["2 one_shot"]
    gains = [one["2 one_shot"] / one["1"] for one in map(two_gpus.speeds, RUNS["Llama-3.1-8B"].values())]
    words = r"where it was measured: ([\d.]+) times as fast at D1, ([\d.]+) at D64 and ([\d.]+) at L8K"
    claim("35", words, *gains)
    words = r"takes (\S+) ms per token at D1; .* of (\S+) µs would be (\S+) ms, and (\S+) are recorded"
    ms = 1e3 / alone
    hoped = ms / 2 + cuts.sums_a_step(cuts.MODELS["Llama-3.1-8B"]) * number(said(prose("35"), words)[1]) / 1e3
    claim("35", words, ms, FASTEST, hoped, 1e3 / two)


def test_all_reduces_and_waiting_have_the_share_of_a_step_that_is_said():
    runs = two_gpus.recorded_runs(find(), "tensor_parallel_timeline")["Llama-3.1-8B"]
    steps = rank_steps.RankSteps.of(runs["D64"])
    sums = [ledger["all-reduce"] for ledger in steps.ledgers]
    shares = [100 * us / sum(ledger.values()) for us, ledger in zip(sums, steps.ledgers, strict=True)]
    claim("35", r"all-reduces are (\d+)% of rank 0's step above, and (\d+)% of rank 1's", *shares)
    assert 0.07 < sum(steps.waits_us) / sum(sums) < 0.13
    n = cuts.sums_a_step(cuts.MODELS["Llama-3.1-8B"])
    words = r"at D64 it takes ([\d.]+) to ([\d.]+) µs with residual, norm and waiting, .* has ([\d.]+)\."
    claim("35", words, *(us / n for us in sums), US["512"]["one_shot"])
    said(prose("35"), "Attention, for its part, takes more than half of the time that it takes on one GPU")
    alone = Results(find().folder / "Llama-3.1-8B").figures("ledgers", "D64")["rows"]
    (attention_us,) = (row["us"] for row in alone if row["cause"] == "attention")
    assert min(ledger["attention"] for ledger in steps.ledgers) > attention_us / 2
    said(prose("35"), "Waiting for the other GPU is a tenth of that: both start within a few µs")
    assert max(map(abs, steps.skews_us)) < 5
