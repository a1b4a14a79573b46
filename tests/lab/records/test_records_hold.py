"""The committed records show what the ladder claims (the floors that every rung had to pass)."""

import json
from collections import defaultdict
from itertools import chain, product
from statistics import median

import pytest

from rosellm.lab.figures.models import recorded_shapes, speed_up, table
from rosellm.lab.records import first_request, user_calls
from rosellm.lab.records.ledger import Ledger
from rosellm.lab.records.lengths import recorded_lengths
from rosellm.lab.records.model_ladder import by_role, recorded_ledgers
from rosellm.lab.records.model_runs import recorded_models
from rosellm.lab.records.records import Results, find, rivals
from rosellm.lab.records.verdicts import Verdict, run_to_run
from rosellm.models.families.table import read_arch
from rosellm.roseinfer import benchmark_scheduler, benchmark_streaming

RESULTS = find()
BEST_RUNG = "dependent_launch"  # the best when these were recorded
RUNGS = RESULTS.rungs("W3")
COUNTS = RESULTS.load("counts")["figures"]


@pytest.mark.parametrize("workload", ["W0", "W1", "W2", "W4", "W5"])
def test_the_same_rungs_are_recorded_for_every_workload(workload):
    assert RESULTS.rungs(workload) == RUNGS
    assert set(RUNGS) == set(COUNTS["8"]) == set(RESULTS.load("ledger")["figures"]["64"])


def test_recorded_runs_of_workloads_have_the_settings_that_a_comparable_run_has():
    benchmarks = {"scheduler": benchmark_scheduler, "streaming": benchmark_streaming}
    defaults = {form: module.BENCHMARK.parse_options([]).defaults for form, module in benchmarks.items()}
    records = [json.loads(path.read_text()) for path in RESULTS.folder.rglob("*.json")]
    runs = [one for one in records if one.get("kind") in defaults and one["workload"] is not None]
    assert len(runs) > 100
    for run in runs:
        expected = defaults[run["kind"]]
        found = {name: run["options"].get(name, value) for name, value in expected.items()}
        assert found == expected, run["workload"]


def from_rung(first: str) -> list[str]:
    return RUNGS[RUNGS.index(first) :]


@pytest.mark.parametrize(
    ("workload", "first", "figure", "least"),
    [
        ("W1", "pinned_h2d", "decode_tok_s", 1_113),
        ("W2", "pinned_h2d", "decode_tok_s", 6_600),
        ("W3", "triton_append", "decode_tok_s", 31_600),
        ("W4", "identity_pos", "total_tok_s", 10_814),
        ("W5", "mutable_block_info", "total_tok_s", 1_286),
    ],
)
def test_no_rung_is_slower_than_the_code_that_first_took_its_step(workload, first, figure, least):
    for rung in from_rung(first):
        assert RESULTS.value(workload, rung, figure) >= least, rung


def test_the_whole_of_w3_profits_from_batched_prefill():
    assert RESULTS.value("W3", BEST_RUNG) >= 25_000


def test_the_mask_removal_removes_kernels_and_the_pinned_copy_eleven_of_twelve():
    at = COUNTS["8"]
    assert at["no_mask"]["kernels"] < at["paged"]["kernels"]
    assert at["no_mask"]["table_copies"] == 12
    assert at["pinned_h2d"]["table_copies"] == 1


def test_the_triton_append_is_one_kernel_a_layer_instead_of_four():
    at = COUNTS["256"]
    assert at["cuda_graph"]["append_kernels_a_layer"] == 4
    assert at["triton_append"]["append_kernels_a_layer"] == 1


def test_identity_pos_makes_no_batch_idx_where_the_generic_append_does():
    mixed = COUNTS["256 mixed"]
    assert mixed["full_batch"]["append_copies_a_layer"] == 3  # batch_idx, block_idx, pos
    assert mixed["identity_pos"]["append_copies_a_layer"] == 2  # block_idx, pos


def test_tokens_of_every_rung_are_those_of_dense_in_fp32_and_logits_close_in_fp16():
    equality = RESULTS.load("equality")["figures"]
    for rung in RUNGS:
        assert equality["float32"][rung]["tokens_equal"], rung
        half = equality["float16"][rung]
        assert half["tokens_equal"] or half["gap_at_first_difference"] < 0.02 * half["logit_deviation"], rung
        assert half["max_logit_difference"] < 0.02 * half["logit_deviation"], rung
        assert half["share_of_tokens_equal"] > 0.9, rung


def test_the_append_kernel_is_within_its_time():
    rows = {(row["batch_size"], row["variant"]): row for row in RESULTS.load("kv_append")["rows"]}
    for variant in ("generic", "full_batch", "identity_pos"):
        assert rows[256, variant]["medians_s"]["device_rotating"] <= 6e-6
        large = rows[2048, variant]
        assert large["medians_s"]["device_rotating"] <= 2 * large["floor_s"]


def test_every_record_names_its_gpu_versions_and_commit():
    for name in RESULTS.names():
        record = RESULTS.load(name)
        for environment, field in product(
            [call["environment"] for call in record.get("calls", [record])],
            ("device_name", "driver", "torch", "triton", "transformers", "python", "rosellm", "git_commit"),
        ):
            assert environment[field], f"{name} lacks {field}"


# The GPU-resident step.


@pytest.mark.parametrize(
    ("workload", "least"),
    [("W0", 5_000), ("W1", 35_000), ("W4", 150_000), ("W5", 33_000), ("W6", 240_000), ("W7", 105_000)],
)
def test_the_best_rung_reaches_what_it_was_meant_to(workload, least):
    assert RESULTS.value(workload, BEST_RUNG) >= least


@pytest.mark.parametrize("workload", ["W0", "W1", "W2", "W3", "W4", "W5", "W6", "W7"])
def test_the_best_rung_is_past_vllm_on_every_workload(workload):
    vllm = next(figures for name, figures in rivals().items() if name.startswith("vLLM"))
    assert min(RESULTS.repeats(workload, BEST_RUNG)) > vllm[workload]


def test_of_the_modern_runs_none_is_behind_vllm_and_those_that_readme_calls_close_are():
    rows = {(name, row.workload): row for name in recorded_shapes(RESULTS) for row in table(RESULTS, name)}
    ratios = {one: speed_up(row) for one, row in rows.items()}
    large = "Llama-3.1-8B"
    assert min(ratios.values()) > 1
    assert {one for one, ratio in ratios.items() if ratio < 1.05} == {
        (large, "PRE"),
        (large, "L8K"),
        (large, "L32K"),
        (large, "MIX"),
    }


def test_of_our_own_aims_for_modern_models_those_are_reached_that_readme_tells():
    aims = {  # tok/s, prompt tok/s of PRE, and milliseconds of TTFT, in the order of README's rows
        "Qwen3-0.6B": (2_200, 14_000, 60_000, 36_000, 29_000, 2_700, 420, 530_000, 1.0, 3.0),
        "Llama-3.2-1B": (1_350, 9_500, 60_000, 42_000, 52_000, 4_200, 560, 300_000, 1.2, 4.5),
        "Llama-3.1-8B": (250, 1_950, 13_200, 8_000, 11_500, 800, 112, 46_000, 5.0, 23),
    }
    reached = {
        (model, row.workload)
        for model in aims
        for row, aim in zip(table(RESULTS, model), aims[model], strict=True)
        if (row.ours <= aim if row.workload.startswith("TTFT") else row.ours >= aim)
    }
    llamas = product(("Llama-3.1-8B", "Llama-3.2-1B"), ("D1", "TTFT1K"))
    assert reached == {*llamas, ("Llama-3.2-1B", "D64"), ("Qwen3-0.6B", "P512")}


@pytest.mark.parametrize("model", recorded_models(RESULTS))
def test_what_bounds_modern_models_is_what_readme_tells(model):
    ledgers = recorded_ledgers(RESULTS, model)
    roles = {workload: by_role(ledger) for workload, ledger in ledgers.items()}
    above = {
        w: {role: time.us - (time.floor_us or 0) for role, time in those.items()}
        for w, those in roles.items()
    }
    most = {workload: max(those, key=those.__getitem__) for workload, those in above.items()}
    assert most.pop("PRE", "attention") == most.pop("D1") == "attention"
    assert {most[workload] for workload in ("D8", "D64", "L8K")} == {"GEMM"}
    launches = next(row.launches for row in ledgers["D1"].rows if row.cause == "attention")
    assert 2.75 < roles["D1"]["attention"].us / launches < 3.75


def test_the_ledger_that_readme_leaves_out_is_of_kernels_that_took_15_percent_longer():
    figures = Results(RESULTS.folder / "Llama-3.1-8B").load("ledgers")["figures"]
    ledgers = {workload: Ledger.from_dict(one) for workload, one in figures.items()}
    assert [workload for workload, one in ledgers.items() if one.is_disturbed] == ["PRE"]
    assert round(ledgers["PRE"].busy_us / ledgers["PRE"].step_us, 2) == 1.15


def test_what_bounds_gpt2_is_what_readme_tells():
    """Beside its table: a kernel's time and its bytes', and where W8's time goes."""
    products, norms = [], []
    for batch in ("1", "8", "64", "256"):
        rows = {row.cause: row for row in Ledger.from_dict(RESULTS.figures("ledger", batch, "split_kv")).rows}
        gemm, norm = rows["GEMM"], rows["norm"]
        assert (gemm.launches, norm.launches) == (48, 25 if int(batch) > 16 else 1)
        assert rows["attention"].launches == 12
        products.append((gemm.us / 48, gemm.floor_us / 48))
        norms += [norm.us / 25] * (norm.launches == 25)
    (times, floors), told = zip(*products, strict=True), ([2.3, 5.8], [0.8, 1.4])
    assert tuple([round(min(x), 1), round(max(x), 1)] for x in (times, floors)) == told
    assert all(round(us) == 2 for us in norms)
    w8 = RESULTS.record("W8", "split_kv")["results"]["online"]["medians"]
    assert round(w8["prefill_time_s"] / w8["total_time_s"], 2) == 0.13
    assert round(w8["decode_tokens"] / w8["decode_steps"]) == 158


def test_a_step_of_64_rows_takes_what_readme_tells():
    steps = recorded_lengths(RESULTS)[64]
    assert round(steps["equal, whole"].us) == 452


def test_rows_of_unequal_lengths_take_what_notebook_30_tells():
    recorded = recorded_lengths(RESULTS)

    def less(rows: int, share: str) -> float:
        whole, cut = (recorded[rows][f"{share}, {way}"].us for way in ("whole", "cut"))
        return 1 - cut / whole

    def beside_equal(rows: int, share: str) -> float:
        return recorded[rows][f"{share}, cut"].us / recorded[rows]["equal, whole"].us - 1

    assert [round(less(rows, "one long"), 2) for rows in (8, 64, 128, 256)] == [0.14, 0.17, 0.18, 0.1]
    assert [round(less(rows, "spread"), 2) for rows in (64, 128, 256)] == [0.11, 0.07, 0.06]
    unequal = {one: round(beside_equal(*one), 2) for one in product((64, 128, 256), ("spread", "one long"))}
    assert unequal.pop((64, "spread")) == 0.03 and max(unequal.values()) == 0.02
    assert [round(beside_equal(rows, "equal"), 2) for rows in (8, 64, 128, 256)] == [0.16, 0.02, 0, 0.02]
    w8, *others = (RESULTS.value(workload, "split_kv") for workload in ("W8", "W9", "W10"))
    assert [round(one / w8, 2) for one in others] == [0.99, 0.96]


def test_three_quarters_of_a_warm_up_with_an_empty_cache_are_compilation_as_notebook_32_tells():
    warm = {
        one["cache"]: one["parts_s"]["warm_up"] for one in first_request.recorded(RESULTS) if one["warm_up"]
    }
    assert 0.7 < 1 - warm["filled"] / warm["empty"] < 0.8


def test_of_the_calls_those_keep_the_aim_that_readme_tells():
    kept = {
        (workload, way)
        for workload, figures in user_calls.recorded(RESULTS).items()
        for way, share in user_calls.shares(figures).items()
        if share >= user_calls.AIM_SHARE
    }
    assert kept == {*product(("W3", "W4", "W6", "W8"), [user_calls.GENERATE]), ("W8", user_calls.INBOX)}


def test_an_inbox_of_w3_adds_the_time_a_token_that_readme_tells():
    w3 = user_calls.recorded(RESULTS)["W3"]
    us = [1e6 / user_calls.rate(w3, way) for way in (user_calls.BENEATH, user_calls.INBOX)]
    allowed = us[0] / user_calls.AIM_SHARE - us[0]
    assert [round(one, 1) for one in (us[0], allowed, us[1] - us[0])] == [2.4, 0.1, 1.3]


def test_gpt2_in_turns_with_the_engine_for_it_alone_changed_as_readme_tells():
    changes = defaultdict(list)
    for call in RESULTS.load("turns-models")["calls"]:
        for workload, sides in call["tok_s"].items():
            old, new = (median(chain(*sides[side])) for side in ("old", "new"))
            changes[workload].append(new / old - 1)
    w0, w1 = changes.pop("W0"), changes.pop("W1")
    assert len(w0) == 4 and all(0.06 < change < 0.14 for change in w0)
    assert len(w1) == 5 and sum(-0.06 < change < -0.03 for change in w1) == 4
    assert all(min(others) < 0 < max(others) for others in changes.values())


def test_eight_billion_weights_load_in_the_time_and_memory_that_readme_tells():
    figures = Results(RESULTS.folder / "Llama-3.1-8B").load("loading")["figures"]
    ways = {way: figures[way] for way in ("uncached", "cached", "dummy")}
    assert [round(way["seconds"], 1) for way in ways.values()] == [10.0, 2.3, 0.1]
    for way in ways.values():
        assert way["gpu_peak_bytes"] == pytest.approx(1.01 * figures["weights_bytes"], rel=0.005)
        assert way["anonymous_peak_bytes"] < figures["largest_tensor_bytes"]


@pytest.mark.parametrize("workload", ["W2", "W3"])
def test_the_slowest_steps_are_near_the_median(workload):
    figures = RESULTS.record(workload, BEST_RUNG)["results"]["online"]["medians"]
    assert figures["decode_step_p99_s"] <= 1.3 * figures["decode_step_p50_s"]


@pytest.mark.parametrize("workload", ["W0", "W1", "W2", "W3", "W4", "W5", "W6", "W7"])
def test_memory_is_weights_and_cache_and_little_more(workload):
    record = RESULTS.record(workload, BEST_RUNG)
    (result,) = record["results"].values()
    shape = read_arch(record["model_shape"])
    cache = record["num_kv_blocks"] * record["block_size"] * shape.kv_bytes_per_token(2)
    weights = 2 * shape.n_parameters
    assert result["medians"]["peak_gpu_memory_bytes"] <= weights + cache + 1.5 * 2**30


def test_the_ledgers_account_for_the_step_and_the_gpu_is_busy():
    for batch, rungs in RESULTS.load("ledger")["figures"].items():
        for rung, figures in rungs.items():
            ledger = Ledger.from_dict(figures)
            assert ledger.unknown <= 0.05 * ledger.busy and not ledger.is_disturbed, (batch, rung)
    largest = RESULTS.load("ledger_w6")["figures"]
    for figures in (*map(RESULTS.load("ledger")["figures"].get, ("64", "256")), largest):
        assert figures[BEST_RUNG]["busy"] >= 0.95


def test_a_fresh_process_has_its_first_tokens_soon():
    assert max(RESULTS.load("cold_start")["figures"]["seconds"]["compiled anew"]) <= 15


def test_on_two_cores_a_batch_of_eight_is_past_transformers():
    """GPT-2 small's shape, fp32, 64 new tokens each; both in turn in one process."""
    results = find("cpu")
    ours, theirs = (
        results.load(f"W1-{rival}")["results"]["offline"]["medians"]["total_throughput_tok_s"]
        for rival in ("rosellm", "transformers")
    )
    assert ours >= 1.2 * theirs


# What an engine keeps to when it is pressed.


def test_a_quarter_of_the_kv_blocks_leaves_most_of_the_throughput():
    figures = RESULTS.load("kv_pressure")["figures"]
    assert all(one["ratio"] >= 0.7 for one in figures.values())
    assert all(run["preemptions"] > 0 for run in figures["W6"]["tight"]["repeats"])


def test_batch_invariance_costs_little_on_large_batches_and_changes_no_bit():
    figures = RESULTS.load("determinism")["figures"]
    assert figures["cost"]["W2"]["cost"] <= 0.1 and figures["cost"]["W3"]["cost"] <= 0.1
    for dtype, bits in figures["bits"].items():
        assert not any(bits["invariant"].values()), dtype
        assert any(bits["fast"].values()), dtype


def test_the_rooms_cost_no_throughput_and_the_staging_buffers_end_the_waits():
    noise = run_to_run(RESULTS)
    for call in RESULTS.load("turns")["calls"]:
        for workload, sides in call["workloads"].items():
            old, new = ([run["tok_s"] for run in sides[side]] for side in ("old", "new"))
            allowed = noise.get(workload, max(noise.values()))
            assert Verdict(workload, old, new, allowed).sign >= 0, workload
            runs = sides["old"] + sides["new"]
            assert len({digest for run in runs for digest in run["tokens_sha256"]}) == 1
            assert not any(run["waits"] for run in sides["new"])
    first = RESULTS.load("turns")["calls"][0]["workloads"]
    assert all(sum(run["waits"] for run in first[workload]["old"]) > 100 for workload in ("W6", "W7"))
