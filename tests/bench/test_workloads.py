"""The named workloads and how they preset a command's options."""

from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest

from rosellm.bench import benchmark_scheduler, benchmark_streaming
from rosellm.bench.job import check_positions, choose_recipe, print_header
from rosellm.bench.options import departures, request_facts
from rosellm.bench.prompts import make_prompts, new_tokens, request_params
from rosellm.bench.workloads import MODEL_WORKLOADS, MODERN_MODEL, WORKLOADS, get_workload
from rosellm.errors import OptionError, PromptError, RoseError
from rosellm.models.families.table import KNOWN_SHAPES
from rosellm.models.loading import resolve_device
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import LADDER, get_rung
from tests.helpers import CPU, random_model, small_config

BENCHMARKS = {"scheduler": benchmark_scheduler.BENCHMARK, "streaming": benchmark_streaming.BENCHMARK}
FP32 = "dtype=float32 for float16"
TABLE = {  # requests, new tokens, concurrency, prompt tokens, prompt repeats, form
    "W0": (1, 512, 1, None, (1,), "scheduler"),
    "W1": (16, 256, 8, None, (1,), "scheduler"),
    "W2": (64, 512, 64, None, (1,), "scheduler"),
    "W3": (256, 64, 256, None, (1,), "scheduler"),
    "W4": (128, 128, 128, None, (1, 4), "streaming"),
    "W5": (128, 128, 8, None, (1, 4), "streaming"),
    "W6": (1024, 256, 1024, 128, (1,), "scheduler"),
    "W7": (256, 128, 256, 512, (1,), "scheduler"),
    "W8": (512, 512, 256, 512, (1,), "scheduler"),
    "W9": (512, 512, 256, 512, (1,), "scheduler"),
    "W10": (512, 512, 256, 512, (1,), "scheduler"),
    "PFX": (512, 64, 256, 32, (1,), "scheduler"),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_command_takes_a_workload_for_its_defaults(name):
    form = TABLE[name][-1]
    options = BENCHMARKS[form].parse_options(["--workload", name])
    shape = (options.num_requests, options.max_new_tokens, options.max_batch_size, options.prompt_tokens)
    assert (*shape, options.prompt_repeats, form) == TABLE[name]
    assert (options.stop_on_eos, options.prefix_cache, options.pretok) == (False, name == "PFX", True)
    assert request_facts(options)["workload_overrides"] == {}
    assert (options.hf_model_id, options.load_format) == ("gpt2", "dummy")
    assert choose_recipe(options) == get_rung(None, resolve_device("auto"))


@pytest.mark.parametrize(
    ("given", "model", "recipe"),
    [
        ("--rung paged", ("gpt2", "dummy"), "paged"),
        ("--paged-attn", ("gpt2", "dummy"), replace(LADDER[get_rung(None, CPU)], runner="eager")),
        ("--hf-model-id=rose-tiny", ("rose-tiny", "auto"), get_rung(None, CPU)),
        ("--hf-model-id rose-tiny --load-format dummy", ("rose-tiny", "dummy"), get_rung(None, CPU)),
    ],
)
def test_a_model_or_a_recipe_of_ones_own_wins_over_the_workloads(given, model, recipe):
    options = benchmark_scheduler.BENCHMARK.parse_options(["--workload=W3", "--device=cpu", *given.split()])
    assert (options.hf_model_id, options.load_format) == model
    assert choose_recipe(options) == recipe


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--num-requests 2", ["num_requests=2 for 256", FP32]),
        ("--rung paged", [FP32]),
        ("--paged-attn", [FP32, "a recipe that is no rung"]),
        ("--hf-model-id rose-tiny", ["hf_model_id=rose-tiny for gpt2", "load_format=auto for dummy", FP32]),
    ],
)
def test_header_and_record_say_in_what_a_run_is_not_the_workload(given, told, capsys):
    options = benchmark_scheduler.BENCHMARK.parse_options(["--workload=W3", "--device=cpu", *given.split()])
    engine = Engine(random_model(0), recipe=choose_recipe(options), max_batch_size=2)
    assert departures(options, engine) == told
    print_header(engine, options)
    assert f"Not comparable with W3's records: {', '.join(told)}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("form", "given", "told"),
    [
        ("scheduler", "--seed 7", "seed=7 for 0"),
        ("scheduler", "--block-size 16", "block_size=16 for 64"),
        ("scheduler", "--num-kv-blocks 40", "num_kv_blocks=40 for None"),
        ("scheduler", "--all-reduce one_shot", "all_reduce=one_shot for library"),
        ("scheduler", "--prefill-max-batch-size 2", "prefill_max_batch_size=2 for 256"),
        ("scheduler", "--prefill-token-budget 512", "prefill_token_budget=512 for 16384"),
        ("scheduler", "--prefill-chunk 16", "prefill_chunk=16 for None"),
        ("scheduler", "--prefill-admission-policy pack", "prefill_admission_policy=pack for fifo"),
        ("streaming", "--seed 7", "seed=7 for 0"),
        ("streaming", "--tokenize-workers 2", "tokenize_workers=2 for 0"),
        ("streaming", "--stream-interval 16", "stream_interval=16 for 1"),
        ("streaming", "--submit-interval-ms 5", "submit_interval_ms=5.0 for 0.0"),
        ("streaming", "--request-rate 20", "request_rate=20.0 for None"),
    ],
)
def test_a_run_departs_from_its_workload_by_any_option_that_changes_what_is_measured(form, given, told):
    name = "W3" if form == "scheduler" else "W4"
    options = BENCHMARKS[form].parse_options(["--workload", name, "--device=cpu", *given.split()])
    assert departures(options, Engine(random_model(0), max_batch_size=2)) == [told, FP32]
    assert "defaults" not in request_facts(options)["options"]


def test_a_trace_and_a_long_prompt_are_no_workloads_arrivals(tmp_path):
    trace = tmp_path / "trace"
    trace.write_text("seconds,prompt_tokens,new_tokens\n0,1,2\n")
    engine, streaming = Engine(random_model(0), max_batch_size=2), benchmark_streaming.BENCHMARK
    of_trace = streaming.parse_options(["--workload=W4", "--device=cpu", "--trace", str(trace)])
    assert "the arrivals of a trace" in departures(of_trace, engine)
    joined = ["--long-prompt-tokens=90", "--prefill-chunk=16"]
    told = departures(streaming.parse_options(["--workload=W4", "--device=cpu", *joined]), engine)
    assert "long_prompt_tokens=90 for None" in told and "prefill_chunk=16 for None" in told


@pytest.mark.parametrize("name", [*WORKLOADS, *MODEL_WORKLOADS])
def test_a_workload_as_it_is_departs_by_the_dtype_of_the_device_at_most(name):
    form = TABLE[name][-1] if name in TABLE else "scheduler"
    options = BENCHMARKS[form].parse_options(["--workload", name, "--device=cpu"])
    assert departures(options, Engine(random_model(0), max_batch_size=2)) == [FP32]


def test_without_a_workload_there_is_nothing_to_compare_with(capsys):
    options = benchmark_scheduler.BENCHMARK.parse_options(["--device=cpu"])
    assert departures(options, Engine(random_model(0))) == []


def test_there_are_as_many_workloads_as_the_table_has():
    assert list(WORKLOADS) == list(TABLE)
    assert all(workload.id == name for name, workload in WORKLOADS.items())


def test_explicit_options_win_over_the_workload_and_show_in_the_record():
    options = benchmark_scheduler.BENCHMARK.parse_options(
        ["--num-requests", "3", "--prefix-cache", "--workload=W3"]
    )
    assert (options.num_requests, options.max_batch_size, options.prefix_cache) == (3, 256, True)
    facts = request_facts(options)
    assert facts["workload"] == "W3"
    assert facts["workload_overrides"] == {"num_requests": 3, "prefix_cache": True}


def lengths_of(*given: str) -> tuple[list[int], list[int]]:
    """Tokens of every prompt, and how many each request asks for."""
    options = benchmark_scheduler.BENCHMARK.parse_options(["--workload=MIX", "--device=cpu", *given])
    return [len(prompt) for prompt in make_prompts(options, 50)], new_tokens(options)


def test_uniform_lengths_are_seeded_within_their_bounds_and_reach_them_nearly():
    both = lengths_of()
    assert both == lengths_of() and both != lengths_of("--seed=1")
    for lengths in both:
        assert len(lengths) == 256 and 100 <= min(lengths) < 120 and 1000 < max(lengths) <= 1024
        assert abs(sum(lengths) / 256 - 562) < 50


def test_a_requests_prompt_says_nothing_about_its_output():
    prompts, outputs = lengths_of("--num-requests=1000")
    assert abs(np.corrcoef(prompts, outputs)[0, 1]) < 0.1


def test_each_request_of_a_job_has_its_own_length_and_prompts_begin_alike_whatever_their_lengths():
    options = benchmark_scheduler.BENCHMARK.parse_options(["--workload=MIX", "--device=cpu"])
    assert [own.max_tokens for own in request_params(options)] == new_tokens(options)
    ragged = make_prompts(options, 50)
    options.min_prompt_tokens = options.min_new_tokens = None
    whole = make_prompts(options, 50)
    assert all(row == long[: len(row)] for row, long in zip(ragged, whole, strict=True))
    assert new_tokens(options) == [1024] * 256


@pytest.mark.parametrize("given", [["--workload=W6"], ["--workload=W8"], ["--workload=PFX"]])
def test_prompts_of_random_ids_are_those_of_one_draw_at_the_longest_length(given):
    options = benchmark_scheduler.BENCHMARK.parse_options([*given, "--device=cpu", "--num-requests=40"])
    sizes = options.num_requests, options.prompt_tokens
    drawn = np.random.default_rng(options.seed).integers(50257, size=sizes).tolist()
    prefix = options.shared_prefix_tokens
    own = [prompt[prefix:] for prompt in make_prompts(options, 50257)]
    assert own == [row[: len(prompt)] for row, prompt in zip(drawn, own, strict=True)]


def test_requests_of_unequal_lengths_fit_if_each_of_them_does():
    options = benchmark_scheduler.BENCHMARK.parse_options(["--workload=MIX", "--device=cpu"])
    longest = max(map(len, make_prompts(options, 50)))
    check_positions(options, longest, 947 + 998)
    with pytest.raises(PromptError, match="MIX: 947 prompt tokens and 998 new ones exceed"):
        check_positions(options, longest, 947 + 998 - 1)


def test_bounds_the_wrong_way_round_are_refused():
    for given in ("--prompt-tokens=99", "--max-new-tokens=99"):
        with pytest.raises(OptionError, match="the shortest length is 100, the longest 99"):
            lengths_of(given)


def test_a_model_of_too_few_positions_is_one_line_before_anything_is_built(capsys):
    assert benchmark_scheduler.main(["--workload=MIX", "--device=cpu", "--hf-model-id=rose-tiny"]) == 2
    told = capsys.readouterr()
    assert told.err == "error: MIX: 947 prompt tokens and 998 new ones exceed the model's 512 positions\n"
    assert told.out == ""


@pytest.mark.parametrize("name", MODEL_WORKLOADS)
def test_a_workload_of_several_models_takes_a_modern_one_unless_another_is_named(name):
    options = benchmark_scheduler.BENCHMARK.parse_options(["--workload", name, "--device=cpu"])
    assert (options.hf_model_id, options.load_format) == (MODERN_MODEL, "dummy")
    assert request_facts(options)["workload_overrides"] == {}
    workload = MODEL_WORKLOADS[name]
    assert workload.id == name and workload.prompt_tokens
    longest = workload.prompt_tokens + workload.max_new_tokens
    assert longest <= KNOWN_SHAPES[MODERN_MODEL].n_positions


def test_of_a_workload_of_several_models_the_dtype_is_the_models_own_and_the_model_is_free():
    argv = ["--workload=D8", "--device=cpu", "--hf-model-id=Qwen/Qwen3-0.6B", "--load-format=dummy"]
    options = benchmark_scheduler.BENCHMARK.parse_options(argv)
    for own, told in (("float32", []), ("bfloat16", ["dtype=float32 for bfloat16"]), (None, [FP32])):
        engine = Engine(random_model(0, small_config(dtype=own)), max_batch_size=2)
        assert departures(options, engine) == told


def test_every_workload_fits_the_model_it_is_meant_for():
    positions = KNOWN_SHAPES["gpt2"].n_positions
    for workload in WORKLOADS.values():
        text_tokens = len(workload.prompt) * max(workload.prompt_repeats)
        prompt = workload.shared_prefix_tokens + (workload.prompt_tokens or text_tokens)
        assert prompt + workload.max_new_tokens <= positions


def options_of(*given: str) -> Namespace:
    return benchmark_scheduler.BENCHMARK.parse_options([*given, "--device=cpu"])


@pytest.mark.parametrize(
    ("name", "temperature", "top_k", "top_p"),
    [("W8", 0.0, 0, 1.0), ("W9", 0.6, 0, 1.0), ("W10", 0.8, 50, 0.9)],
)
def test_unequal_workloads_differ_in_how_they_sample_and_each_request_has_a_seed_of_its_own(
    name, temperature, top_k, top_p
):
    options = options_of("--workload", name)
    params = request_params(options)
    assert {(own.temperature, own.top_k, own.top_p) for own in params} == {(temperature, top_k, top_p)}
    assert len({own.seed for own in params}) == (512 if temperature else 1)
    assert [own.max_tokens for own in params] == new_tokens(options_of("--workload=W8"))
    assert make_prompts(options, 50) == make_prompts(options_of("--workload=W8"), 50)
    assert params == request_params(options_of("--workload", name))
    if temperature:
        assert params != request_params(options_of("--workload", name, "--seed=1"))


@pytest.mark.parametrize("option", [["--top-k", "-1"], ["--top-k=-1"], ["--top-k=0"]])
def test_a_top_k_of_minus_one_is_zero_on_the_command_line_too(option: list[str]) -> None:
    assert options_of(*option).top_k == 0


def test_prompts_with_a_shared_prefix_have_just_that_in_common():
    prompts = make_prompts(options_of("--workload=PFX"), 50257)
    assert {len(prompt) for prompt in prompts} == {544}
    assert len({tuple(prompt[:512]) for prompt in prompts}) == 1
    assert len({prompt[512] for prompt in prompts}) > 400
    with pytest.raises(OptionError, match="--shared-prefix-tokens needs --prompt-tokens"):
        make_prompts(options_of("--shared-prefix-tokens=4"), 50)


def test_the_context_of_a_running_request_counts_long_requests_for_longer():
    assert WORKLOADS["W6"].mean_context == 128 + 128
    assert WORKLOADS["W5"].mean_context == 2.5 + 64
    assert WORKLOADS["PFX"].mean_context == 544 + 32
    new = np.array(new_tokens(options_of("--workload=W8", "--num-requests=20000")))
    assert WORKLOADS["W8"].mean_context == pytest.approx(264 + (new**2).sum() / new.sum() / 2, rel=0.01)


def test_a_workload_is_refused_by_name_where_it_cannot_run():
    with pytest.raises(
        RoseError, match="'W99' is unknown; benchmark_scheduler runs W0, W1, W2, W3, W6, W7, W8"
    ):
        get_workload("W99", "scheduler")
    with pytest.raises(RoseError, match="W4 is run by benchmark_streaming"):
        get_workload("W4", "scheduler")
    with pytest.raises(RoseError, match="W0 is run by benchmark_scheduler"):
        get_workload("W0", "streaming")
