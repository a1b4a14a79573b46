"""The benchmark commands' records and errors."""

import json
import re
from dataclasses import replace

import pytest
import torch

from rosellm.bench import benchmark_kv_append, benchmark_scheduler, benchmark_streaming
from rosellm.bench.benchmark_scheduler import run_scheduler_benchmark
from rosellm.bench.benchmark_streaming import StreamingLoad, run_streaming_benchmark
from rosellm.bench.job import SPARE_KV_BLOCKS, Job, choose_recipe, kv_blocks_wanted
from rosellm.bench.prompts import make_prompts
from rosellm.bench.summary import print_summary
from rosellm.command_line import command
from rosellm.errors import PromptError, RoseError
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.kernels.table import TORCH
from rosellm.roseinfer.recipe import BEST_RUNG, LADDER
from rosellm.roseinfer.serving.admission import SchedulerConfig
from rosellm.roseinfer.serving.scheduler import OnlineScheduler
from tests.helpers import random_model, random_prompts
from tests.roseinfer.test_benchmarks import (
    MODULES,
    engine_for,
    greedy,
    run_command,
    scheduler_options,
    streaming_engine,
    without_numbers,
)
from tests.soak.fake_step import POISON, fake_engine, poison
from tests.soak.streaming_driver import Letters


def test_the_gain_of_an_append_reads_as_the_record_does():
    rows = [
        {"batch_size": 128, "variant": "index_put", "medians_s": {"wall": 9e-5, "device_rotating": 19.02e-6}},
        {"batch_size": 128, "variant": "generic", "medians_s": {"wall": 5e-5, "device_rotating": 19.01e-6}},
    ]
    line = "B=128: baseline 19.02us, triton 19.01us, speedup 1.001x"
    assert benchmark_kv_append.gain_line(rows) == line
    for row in rows:
        del row["medians_s"]["device_rotating"]
    assert benchmark_kv_append.gain_line(rows) == "B=128: baseline 90.00us, triton 50.00us, speedup 1.800x"


def test_the_table_of_appends_gives_gains_over_the_same_batch_size():
    times = {(8, "index_put"): 9e-5, (8, "generic"): 3e-5, (16, "index_put"): 8e-4, (16, "generic"): 1e-4}
    rows = [
        {"batch_size": batch, "variant": variant, "medians_s": {"wall": seconds}, "floor_s": 1e-6}
        for (batch, variant), seconds in times.items()
    ]
    assert [line.split() for line in benchmark_kv_append.table(rows)[1:]] == [
        ["8", "index_put", "90.00", "1.00x", "1.00"],
        ["8", "generic", "30.00", "3.00x", "1.00"],
        ["16", "index_put", "800.00", "1.00x", "1.00"],
        ["16", "generic", "100.00", "8.00x", "1.00"],
    ]


@pytest.mark.slow
def test_a_model_that_cannot_be_had_is_one_line_with_the_ways_out():
    done = run_command("scheduler", "--hf-model-id", "gpt2", "--device", "cpu", HF_HOME="/nonexistent")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("error: model 'gpt2'")
    assert "use 'rose-tiny', a local folder, or --load-format dummy" in line


# Bad input, in this process: one line on stderr, status 2.

BAD_INPUT = [
    ("scheduler", "--cuda-graph", "--cuda-graph needs --paged-attn"),
    ("scheduler", "--rung dense --cuda-graph", "--rung names a whole recipe: leave out --paged-attn"),
    ("streaming", "--workload W4 --rung paged --paged-attn", "--rung names a whole recipe"),
    ("scheduler", "--rung nope", "rung 'nope' is unknown; use one of dense, paged"),
    ("scheduler", "--workload W4", "W4 is run by benchmark_streaming"),
    ("scheduler", "--workload W99", "'W99' is unknown"),
    (
        "scheduler",
        "--workload W7 --hf-model-id rose-tiny",
        "512 prompt tokens and 128 new ones exceed the model's 512 positions",
    ),
    ("scheduler", "--max-new-tokens 1000", "exceed the model's 512 positions"),
    ("scheduler", "--num-requests 0", "'0' is not a whole number, 1 or more"),
    ("scheduler", "--num-requests x", "'x' is not a whole number"),
    ("scheduler", "--max-batch-size -1", "'-1' is not a whole number"),
    ("scheduler", "--repeat-runs 0", "'0' is not a whole number, 1 or more"),
    ("scheduler", "--warmup-runs -1", "'-1' is not a whole number, 0 or more"),
    ("scheduler", "--prompt-tokens 0", "'0' is not a whole number"),
    ("scheduler", "--block-size 48", "block_size is 48; it must be a power of two"),
    ("scheduler", "--num-kv-blocks 1 --block-size 4", "the cache has 1"),
    ("scheduler", "--mode fast", "invalid choice: 'fast'"),
    ("scheduler", "--dtype int8", "invalid choice: 'int8'"),
    ("scheduler", "--device tpu", "invalid choice: 'tpu'"),
    ("scheduler", "--load-format gguf", "invalid choice: 'gguf'"),
    ("scheduler", "--hf-model-id some-model --load-format dummy", "no shape is known for 'some-model'"),
    ("scheduler", "--json /nonexistent/record.json", "there is no folder /nonexistent"),
    ("scheduler", "--profile /dev/null", "not a regular file"),
    ("scheduler", "--prompt=", "--prompt is empty"),
    ("scheduler", "--prompt-repeats 1,,4", "'' is not a whole number"),
    ("scheduler", "--num-req 4", "unrecognized arguments: --num-req"),
    ("scheduler", "--workload", "expected one argument"),
    ("streaming", "--submit-interval-ms nan", "'nan' is not a number of milliseconds, 0 or more"),
    ("streaming", "--submit-interval-ms -1", "'-1' is not a number of milliseconds"),
    ("streaming", "--stream-interval 0", "'0' is not a whole number, 1 or more"),
    ("streaming", "--tokenize-workers -1", "'-1' is not a whole number, 0 or more"),
    ("streaming", "--prefill-admission-policy random", "invalid choice: 'random'"),
    ("streaming", "--max-new-tokens 1000", "exceed the model's 512 positions"),
    ("streaming", "--max-new-tokens 1000 --tokenize-workers 1", "exceed the model's 512 positions"),
    ("streaming", "--workload W0", "W0 is run by benchmark_scheduler"),
    ("kv_append", "--batch-sizes 128,x", "'x' is not a whole number"),
    ("kv_append", "--num-heads 0", "'0' is not a whole number"),
    ("kv_append", "--json /nonexistent/record.json", "there is no folder /nonexistent"),
    ("kv_append", "--batch-sizes 100000000000", "out of memory"),
]


@pytest.mark.parametrize(("name", "arguments", "wanted"), BAD_INPUT, ids=lambda value: value[:40])
def test_bad_input_is_one_line_and_status_2(name, arguments, wanted, capsys):
    try:
        status = MODULES[name].main(["--device", "cpu", *arguments.split()])
    except SystemExit as leaving:
        status = leaving.code
    [line] = capsys.readouterr().err.splitlines()
    assert status == 2
    assert line.startswith("error: ") and wanted in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("name", MODULES)
def test_a_missing_gpu_is_one_line_and_status_2(name, capsys):
    assert MODULES[name].main(["--device", "cuda"]) == 2
    assert (
        capsys.readouterr().err == "error: device 'cuda' is not available on this machine; use --device cpu\n"
    )


def test_an_error_of_ours_is_not_taken_for_the_users():
    @command
    def main(_argv):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        main()


def test_help_tells_the_defaults_of_the_workload_that_is_named(capsys):
    with pytest.raises(SystemExit) as leaving:
        benchmark_scheduler.main(["--workload", "W3", "--help"])
    text = capsys.readouterr().out
    assert leaving.value.code == 0
    assert re.search(r"--max-batch-size N +requests that run together; default: 256\n", text)
    assert re.search(r"--pretok, --no-pretok +tokenize before the clock starts; default: on\n", text)


# What the figures mean.


@pytest.mark.parametrize(
    ("flags", "recipe"),
    [
        ("", "dense"),
        ("--paged-attn", replace(LADDER[BEST_RUNG], runner="eager")),
        ("--paged-attn --cuda-graph", BEST_RUNG),
        ("--rung pinned_h2d", "pinned_h2d"),
        ("--workload W3 --rung paged", "paged"),
    ],
)
def test_flags_choose_the_documented_recipe(flags, recipe):
    assert choose_recipe(scheduler_options(flags)) == recipe


def test_prompts_cycle_through_the_repeats():
    options = benchmark_streaming.BENCHMARK.parse_options(["--prompt-repeats", "1,4", "--num-requests", "3"])
    assert make_prompts(options, vocab_size=100) == ["Hello", "Hello" * 4, "Hello"]


def test_prompt_tokens_are_random_ids_of_the_asked_length_from_the_seed():
    def prompts(seed: int) -> list[list[int]]:
        options = scheduler_options(f"--prompt-tokens 7 --num-requests 3 --seed {seed}")
        return make_prompts(options, vocab_size=11)

    assert [len(prompt) for prompt in prompts(0)] == [7, 7, 7]
    assert all(0 <= token < 11 for prompt in prompts(0) for token in prompt)
    assert prompts(0) == prompts(0) != prompts(1)
    assert len({tuple(prompt) for prompt in prompts(0)}) == 3


def test_the_kv_cache_holds_what_runs_together_and_no_more():
    gpt = random_model(0)  # 64 positions
    options = scheduler_options("--num-requests 100 --max-batch-size 3 --max-new-tokens 20 --block-size 8")
    assert kv_blocks_wanted(options, gpt, longest_prompt=10) == 3 * 4 + SPARE_KV_BLOCKS
    assert kv_blocks_wanted(options, gpt, longest_prompt=10_000) == 3 * 8 + SPARE_KV_BLOCKS


@pytest.mark.parametrize(("mode", "decode_steps"), [("naive", 5 * 4), ("offline", 3 * 4), ("online", 3 * 4)])
def test_tokens_and_steps_are_counted_in_every_mode(mode, decode_steps):
    prompts = random_prompts([3, 5, 2, 9, 4])
    result = run_scheduler_benchmark(
        Job(engine_for(), prompts, greedy(5), SchedulerConfig(max_batch_size=2)), 1, 2, mode
    )
    for repeat in result["repeats"]:
        assert (repeat["completion_tokens"], repeat["decode_tokens"]) == (25, 20)
        assert repeat["decode_steps"] == decode_steps
        assert repeat["decode_throughput_tok_s"] == 20 / repeat["decode_time_s"]
        assert repeat["total_throughput_tok_s"] == 25 / repeat["total_time_s"]
        assert repeat["decode_time_s"] + repeat["prefill_time_s"] <= repeat["total_time_s"]
        assert repeat["decode_step_mean_s"] * decode_steps == pytest.approx(repeat["decode_time_s"])
    assert len({repeat["tokens_sha256"] for repeat in result["repeats"]}) == 1


def test_a_naive_request_arrives_when_the_one_before_has_ended():
    prompts = random_prompts([4, 1, 9])
    outputs = benchmark_scheduler.MODES["naive"](OnlineScheduler(engine_for()), prompts, greedy(5))
    assert [output.prompt_token_ids for output in outputs] == prompts
    for before, output in zip(outputs, outputs[1:], strict=False):
        assert output.metrics.arrival >= before.metrics.token_times[-1]


def test_rungs_and_modes_and_streaming_give_one_digest():
    prompts = random_prompts([3, 9, 5])
    runs = [
        run_scheduler_benchmark(Job(engine_for(recipe=rung), prompts, greedy(6)), 0, 1, mode)
        for rung, mode in (("dense", "naive"), ("dense", "online"), (BEST_RUNG, "offline"))
    ]
    runs.append(run_streaming_benchmark(Job(streaming_engine(), prompts, greedy(6)), StreamingLoad(), 0, 1))
    assert len({run["repeats"][0]["tokens_sha256"] for run in runs}) == 1


def test_one_token_a_request_leaves_decode_figures_without_value(capsys):
    result = run_scheduler_benchmark(Job(engine_for(), random_prompts([3]), greedy(1)), 0, 1)
    assert result["repeats"][0]["decode_throughput_tok_s"] is None
    print_summary(result, benchmark_scheduler.LINES)
    lines = without_numbers(capsys.readouterr().out)
    assert "Throughput(completion,decode) p50/mean: none/none tokens/s" in lines
    assert "TPOT p50/mean: none/none ms/token" in lines


def test_every_run_starts_with_an_empty_prefix_cache():
    engine = engine_for(prefix_cache=True)
    prompts = random_prompts([20, 20])
    result = run_scheduler_benchmark(Job(engine, prompts, greedy(3), SchedulerConfig()), 1, 2)
    assert engine.prefix_cache.hits == 0
    assert len({repeat["tokens_sha256"] for repeat in result["repeats"]}) == 1


def test_a_refused_prompt_ends_a_streaming_run_at_once():
    engine = streaming_engine()
    with pytest.raises(PromptError, match="exceed the model's 64 positions"):
        run_streaming_benchmark(Job(engine, random_prompts([3, 60]), greedy(20)), StreamingLoad(), 0, 1)
    engine.check_integrity()
    assert engine.blocks.num_free_blocks() == engine.num_kv_blocks


def engine_whose_second_request_fails() -> Engine:
    engine = fake_engine(3, num_kv_blocks=30, tokenizer=Letters())
    poison(engine, 2)
    return engine


REFUSED = f"request 2 of 3 failed: {POISON}"


@pytest.mark.parametrize("mode", benchmark_scheduler.MODES)
def test_a_run_in_which_a_request_failed_is_refused(mode):
    engine = engine_whose_second_request_fails()
    with pytest.raises(RoseError) as raised:
        run_scheduler_benchmark(Job(engine, [[1], [2], [3]], greedy(4)), 0, 1, mode)
    assert str(raised.value) == REFUSED


def test_a_streaming_run_in_which_a_request_failed_is_refused():
    engine = engine_whose_second_request_fails()
    with pytest.raises(RoseError, match=POISON):
        run_streaming_benchmark(Job(engine, [[1], [2], [3]], greedy(4)), StreamingLoad(), 0, 1)


def test_submissions_keep_their_interval():
    engine = streaming_engine()
    load = StreamingLoad(times=(0.0, 0.05, 0.1))
    result = run_streaming_benchmark(Job(engine, random_prompts([3, 3, 3]), greedy(2)), load, 0, 1)
    assert result["repeats"][0]["total_time_s"] >= 0.1


def append_shape(dtype: torch.dtype) -> benchmark_kv_append.Shape:
    return benchmark_kv_append.Shape(6, 2, 8, 4, dtype, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_append_sets_share_no_slot(dtype):
    sets = benchmark_kv_append.make_operands(append_shape(dtype), n_sets=9)
    slots = {(id(s.caches), block, s.pos) for s in sets for block in s.block_idx.tolist()}
    assert len(slots) == 9 * 6
    for variant in benchmark_kv_append.VARIANTS:
        benchmark_kv_append.check_variant(variant, sets[-1], TORCH, append_shape(dtype))


@pytest.mark.parametrize("variant", ["generic", "full_batch", "identity_pos"])
def test_a_wrong_append_is_not_timed(variant):
    def one_slot_off(spec):
        return lambda **operands: spec(**(operands | {"pos": operands["pos"] - 1}))

    shape = append_shape(torch.float32)
    names = ("kv_append", "kv_append_full_batch", "kv_append_identity_pos")
    wrong = replace(TORCH, **{name: one_slot_off(getattr(TORCH, name)) for name in names})
    operands = benchmark_kv_append.make_operands(shape, n_sets=2)[-1]
    with pytest.raises(AssertionError, match=f"{variant} at batch 6: k_cache_layer differs"):
        benchmark_kv_append.check_variant(variant, operands, wrong, shape)


@pytest.mark.gpu
def test_on_a_gpu_appends_are_timed_on_the_device(tmp_path):
    path = tmp_path / "record.json"
    assert benchmark_kv_append.main(["--batch-sizes", "8", "--repeats", "3", "--json", str(path)]) == 0
    for row in json.loads(path.read_text())["rows"]:
        assert row["repeats_s"].keys() == {"wall", "device_rotating", "device_same"}
        assert all(0 < seconds < 1e-3 for seconds in row["repeats_s"]["device_rotating"])


@pytest.mark.gpu
@pytest.mark.parametrize("rung", LADDER)
def test_on_a_gpu_every_rung_is_measured_and_the_tokens_agree(rung, tmp_path):
    path = tmp_path / "record.json"
    sizes = "--num-requests 4 --max-new-tokens 8 --repeat-runs 2 --dtype float32"
    arguments = f"{sizes} --device cuda --rung {rung} --json {path}"
    assert benchmark_scheduler.main(arguments.split()) == 0
    record = json.loads(path.read_text())
    repeats = record["results"]["online"]["repeats"]
    assert record["environment"]["driver"] and repeats[0]["peak_gpu_memory_bytes"] > 0
    assert len({repeat["tokens_sha256"] for repeat in repeats}) == 1
