"""What the benchmarks' runs measure, whatever the rung, the mode, or the variant of the KV append."""

import json
import re
from dataclasses import replace

import pytest
import torch

from rosellm.bench import benchmark_kv_append as append, benchmark_scheduler
from rosellm.bench.benchmark_scheduler import run_scheduler
from rosellm.bench.benchmark_streaming import run_streaming
from rosellm.bench.job import Job
from rosellm.errors import PromptError, RoseError
from rosellm.models.tokenizer import load_dummy_tokenizer
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.kernels.table import TORCH
from rosellm.roseinfer.recipe import BEST_RUNG, LADDER
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.admission import SchedulerConfig
from tests.helpers import random_model, random_prompts, small_engine
from tests.soak.fake_step import POISON, Letters, fake_engine, poison


def engine_for(**options) -> Engine:
    return small_engine(random_model(0), **options)


def streaming_engine() -> Engine:
    """A small random model with the shipped tokenizer's stand-in, which can decode any id."""
    gpt = random_model(0)
    return small_engine(gpt, tokenizer=load_dummy_tokenizer(gpt.config))


def greedy(n: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_tokens_and_steps_are_counted_in_every_mode(mode):
    decode_steps = 3 * 4  # of five requests, two at a time
    job = Job(engine_for(), random_prompts([3, 5, 2, 9, 4]), greedy(5), SchedulerConfig(max_batch_size=2))
    run = run_scheduler(job, mode)
    assert (run["completion_tokens"], run["decode_tokens"], run["decode_steps"]) == (25, 20, decode_steps)
    assert run["decode_throughput_tok_s"] == 20 / run["decode_time_s"]
    assert run["total_throughput_tok_s"] == 25 / run["total_time_s"]
    assert run["decode_time_s"] + run["prefill_time_s"] <= run["total_time_s"]
    assert run["decode_step_mean_s"] * decode_steps == pytest.approx(run["decode_time_s"])


def test_rungs_and_modes_and_streaming_give_one_digest():
    prompts = random_prompts([3, 9, 5])
    runs = [
        run_scheduler(Job(engine_for(recipe=rung), prompts, greedy(6)), mode)
        for rung, mode in (("dense", "online"), (BEST_RUNG, "offline"))
    ]
    runs.append(run_streaming(Job(streaming_engine(), prompts, greedy(6))))
    assert len({run["tokens_sha256"] for run in runs}) == 1


def test_every_run_starts_with_an_empty_prefix_cache():
    engine = engine_for(prefix_cache=True)
    for _ in range(2):
        run_scheduler(Job(engine, random_prompts([20, 20]), greedy(3)))
    assert engine.prefix_cache.hits == 0


def test_a_refused_prompt_ends_a_streaming_run_at_once():
    engine = streaming_engine()
    with pytest.raises(PromptError, match="leave no room"):
        run_streaming(Job(engine, random_prompts([3, 64]), greedy(20)))
    with pytest.raises(RoseError, match="request 2 of 2 ended after 4 of 20 tokens"):
        run_streaming(Job(engine, random_prompts([3, 60]), greedy(20)))
    engine.check_integrity()
    assert engine.blocks.num_free_blocks() == engine.num_kv_blocks


@pytest.mark.parametrize("mode", [*benchmark_scheduler.MODES, "streaming"])
def test_a_run_in_which_a_request_failed_is_refused(mode):
    engine = fake_engine(3, num_kv_blocks=30, tokenizer=Letters())
    poison(engine, 2)
    job = Job(engine, [[1], [2], [3]], greedy(4))
    which = "" if mode == "streaming" else "request 2 of 3 failed: "
    with pytest.raises(RoseError, match=f"{which}{POISON}"):
        run_streaming(job) if mode == "streaming" else run_scheduler(job, mode)


# The KV append.


@pytest.mark.slow
def test_the_append_form_prints_a_line_a_batch_and_writes_its_record(tmp_path, capsys):
    path = tmp_path / "record.json"
    shape = ["--num-heads=2", "--head-dim=8", "--block-size=4", "--repeats=2", "--device=cpu"]
    assert append.main(["--batch-sizes=8,16", *shape, f"--json={path}"]) == 0
    rows = json.loads(path.read_text())["rows"]
    wanted = [(batch, variant) for batch in (8, 16) for variant in append.VARIANTS]
    assert [(row["batch_size"], row["variant"]) for row in rows] == wanted
    assert all(len(row["repeats_s"]["wall"]) == 2 for row in rows)
    forms = [r"KV append, torch kernels, cpu, torch\.float32"]
    times = r"baseline \d+\.\d\dus, triton \d+\.\d\dus, speedup \d+\.\d{3}x"
    forms += [f"B={batch}: {times}" for batch in (8, 16)]
    lines = capsys.readouterr().out.splitlines()
    assert all(map(re.fullmatch, forms, lines)) and len(lines) == 1 + 2


def test_the_gain_of_an_append_is_over_index_put_at_the_same_batch_by_device_time_if_known():
    times = {"index_put": {"wall": 9e-5}, "generic": {"wall": 3e-5}}
    rows = [{"batch_size": 8, "variant": name, "medians_s": medians} for name, medians in times.items()]
    assert append.gain_line(rows) == "B=8: baseline 90.00us, triton 30.00us, speedup 3.000x"
    for row in rows:
        row["medians_s"]["device_rotating"] = 19e-6
    assert append.gain_line(rows) == "B=8: baseline 19.00us, triton 19.00us, speedup 1.000x"


SHAPE = append.Shape(6, 2, 8, 4, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_append_sets_share_no_slot(dtype):
    shape = replace(SHAPE, dtype=dtype)
    sets = append.make_operands(shape, n_sets=9)
    slots = {(id(s.caches), block, s.pos) for s in sets for block in s.block_idx.tolist()}
    assert len(slots) == 9 * 6
    for variant in append.VARIANTS:
        append.check_variant(variant, sets[-1], TORCH, shape)


@pytest.mark.parametrize("variant", append.VARIANTS[1:])
def test_a_wrong_append_is_not_timed(variant):
    def one_slot_off(spec):
        return lambda **operands: spec(**(operands | {"pos": operands["pos"] - 1}))

    names = ("kv_append", "kv_append_full_batch", "kv_append_identity_pos")
    wrong = replace(TORCH, **{name: one_slot_off(getattr(TORCH, name)) for name in names})
    operands = append.make_operands(SHAPE, n_sets=2)[-1]
    with pytest.raises(AssertionError, match=f"{variant} at batch 6: k_cache_layer differs"):
        append.check_variant(variant, operands, wrong, SHAPE)


@pytest.mark.gpu
def test_on_a_gpu_appends_are_timed_on_the_device(tmp_path):
    path = tmp_path / "record.json"
    assert append.main(["--batch-sizes", "8", "--repeats", "3", "--json", str(path)]) == 0
    for row in json.loads(path.read_text())["rows"]:
        assert row["repeats_s"].keys() == {"wall", "device_rotating"}
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
