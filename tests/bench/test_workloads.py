"""The named workloads and how they preset a command's options."""

from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest

from rosellm.bench import benchmark_scheduler, benchmark_streaming
from rosellm.bench.job import choose_recipe, print_header
from rosellm.bench.options import departures
from rosellm.bench.prompts import make_prompts, most_tokens, new_tokens, request_params
from rosellm.bench.workloads import ALL_WORKLOADS, MODERN_MODEL, WORKLOADS
from rosellm.errors import PromptError
from rosellm.models.families.table import KNOWN_SHAPES
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import LADDER, get_rung
from tests.helpers import CPU, random_model, small_config

BENCHMARKS = {"scheduler": benchmark_scheduler.BENCHMARK, "streaming": benchmark_streaming.BENCHMARK}
FP32 = "dtype=float32 for float16"


def options_of(name: str, *given: str) -> Namespace:
    """The options of the benchmark that runs this workload, on a CPU."""
    argv = ["--workload", name, "--device=cpu", *given]
    return BENCHMARKS[ALL_WORKLOADS[name].form].parse_options(argv)


@pytest.mark.parametrize("name", ALL_WORKLOADS)
def test_a_command_takes_a_workload_for_its_defaults(name):
    options, workload = options_of(name), ALL_WORKLOADS[name]
    assert workload.id == name and workload.flags() == {one: vars(options)[one] for one in workload.flags()}
    assert (options.stop_on_eos, options.prefix_cache, options.pretok) == (False, name == "PFX", True)
    assert (options.hf_model_id, options.load_format) == (workload.model or MODERN_MODEL, "dummy")
    assert choose_recipe(options) == get_rung(None, CPU)
    assert departures(options, Engine(random_model(0), max_batch_size=2)) == [FP32]


@pytest.mark.parametrize("workload", ALL_WORKLOADS.values(), ids=ALL_WORKLOADS)
def test_every_workload_fits_the_model_it_is_meant_for(workload):
    text_tokens = len(workload.prompt) * max(workload.prompt_repeats)
    prompt = workload.shared_prefix_tokens + (workload.prompt_tokens or text_tokens)
    model = workload.model or MODERN_MODEL
    assert prompt + workload.max_new_tokens <= KNOWN_SHAPES[model].n_positions


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
    options = options_of("W3", *given.split())
    assert (options.hf_model_id, options.load_format) == model
    assert choose_recipe(options) == recipe


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("W3", "", []),
        ("W3", "--num-requests 2", ["num_requests=2 for 256"]),
        ("W3", "--hf-model-id rose-tiny", ["hf_model_id=rose-tiny for gpt2", "load_format=auto for dummy"]),
        ("W3", "--all-reduce one_shot", ["all_reduce=one_shot for None"]),
        ("W3", "--prefill-admission-policy pack", ["prefill_admission_policy=pack for fifo"]),
        ("W4", "--tokenize-workers 1", ["tokenize_workers=1 for 0"]),
    ],
)
def test_header_and_record_say_in_what_a_run_is_not_the_workload(name, given, told, capsys):
    options, engine = options_of(name, *given.split()), Engine(random_model(0), max_batch_size=2)
    assert departures(options, engine) == [*told, FP32]
    print_header(engine, options)
    assert f"Not comparable with {name}'s records: {', '.join([*told, FP32])}\n" in capsys.readouterr().out


def test_chunks_and_a_recipe_of_ones_own_are_no_workloads():
    engine = Engine(random_model(0), max_batch_size=2)
    assert "prefill_chunk=16 for None" in departures(options_of("W4", "--prefill-chunk=16"), engine)
    eager = options_of("W3", "--paged-attn")
    engine = Engine(random_model(0), recipe=choose_recipe(eager), max_batch_size=2)
    assert departures(eager, engine) == [FP32, "a recipe that is no rung"]


def test_of_a_workload_of_several_models_the_dtype_is_the_models_own_and_the_model_is_free():
    options = options_of("D8", "--hf-model-id=Qwen/Qwen3-0.6B", "--load-format=dummy")
    for own, told in (("float32", []), ("bfloat16", ["dtype=float32 for bfloat16"]), (None, [FP32])):
        engine = Engine(random_model(0, small_config(dtype=own)), max_batch_size=2)
        assert departures(options, engine) == told


def lengths_of(*given: str) -> tuple[list[int], list[int]]:
    """Tokens of every prompt, and how many each request asks for."""
    options = options_of("MIX", *given)
    return [len(prompt) for prompt in make_prompts(options, 50)], new_tokens(options)


def test_uniform_lengths_are_seeded_independent_within_their_bounds_and_reach_them_nearly():
    both = lengths_of()
    assert both == lengths_of() and both != lengths_of("--seed=1")
    for lengths in both:
        assert len(lengths) == 256 and 100 <= min(lengths) < 120 and 1000 < max(lengths) <= 1024
        assert abs(sum(lengths) / 256 - 562) < 50
    assert abs(np.corrcoef(*lengths_of("--num-requests=1000"))[0, 1]) < 0.1


def test_prompts_of_text_cycle_through_the_repeats():
    options = options_of("W4", "--num-requests=3")
    assert make_prompts(options, vocab_size=100) == ["Hello", "Hello" * 4, "Hello"]


@pytest.mark.parametrize("name", ["W6", "W8", "MIX", "PFX"])
def test_prompts_of_random_ids_are_those_of_one_draw_at_the_longest_length(name):
    options = options_of(name, "--num-requests=40")
    drawn = np.random.default_rng(0).integers(50257, size=(40, options.prompt_tokens)).tolist()
    prefix = options.shared_prefix_tokens
    prompts = make_prompts(options, 50257)
    own = [prompt[prefix:] for prompt in prompts]
    assert len({tuple(prompt[:prefix]) for prompt in prompts}) == 1
    assert own == [row[: len(prompt)] for row, prompt in zip(drawn, own, strict=True)]


def test_requests_fit_if_the_longest_prompt_and_output_do():
    options = options_of("MIX")
    assert most_tokens(options, None, 2048) == 2048
    with pytest.raises(PromptError, match="MIX: 1024 prompt tokens and 1024 new ones exceed"):
        most_tokens(options, None, 2047)


@pytest.mark.parametrize(
    ("name", "sampling"), [("W8", (0.0, 0, 1.0)), ("W9", (0.6, 0, 1.0)), ("W10", (0.8, 50, 0.9))]
)
def test_unequal_workloads_differ_in_how_they_sample_and_each_request_has_a_seed_of_its_own(name, sampling):
    options = options_of(name)
    params = request_params(options)
    assert {(own.temperature, own.top_k, own.top_p) for own in params} == {sampling}
    assert len({own.seed for own in params}) == (512 if options.temperature else 1)
    assert [own.max_tokens for own in params] == new_tokens(options_of("W8"))
    assert make_prompts(options, 50) == make_prompts(options_of("W8"), 50)
    assert params == request_params(options_of(name))
    assert not options.temperature or params != request_params(options_of(name, "--seed=1"))


def test_the_context_of_a_running_request_counts_long_requests_for_longer():
    assert WORKLOADS["W6"].mean_context == 128 + 128
    assert WORKLOADS["W5"].mean_context == 2.5 + 64
    assert WORKLOADS["PFX"].mean_context == 544 + 32
    new = np.array(new_tokens(options_of("W8", "--num-requests=20000")))
    assert WORKLOADS["W8"].mean_context == pytest.approx(264 + (new**2).sum() / new.sum() / 2, rel=0.01)
