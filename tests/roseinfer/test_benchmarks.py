"""The benchmark commands: their documented forms, their records, what they say to bad input."""

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rosellm.bench import benchmark_kv_append, benchmark_rivals, benchmark_scheduler, benchmark_streaming
from rosellm.bench.benchmark_rivals import THROUGHPUT
from rosellm.bench.job import SPARE_KV_BLOCKS
from rosellm.bench.summary import print_summary
from rosellm.errors import RoseError
from rosellm.models.tokenizer import load_dummy_tokenizer
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.recipe import BEST_RUNG, LADDER
from rosellm.roseinfer.sampling import SamplingParams
from tests.helpers import random_model, small_engine

ROOT = Path(__file__).parents[2]
MODULES = {
    "scheduler": benchmark_scheduler,
    "streaming": benchmark_streaming,
    "kv_append": benchmark_kv_append,
}
ONLINE_LINES = """\
Warmup runs: 1
Measured runs: 3
Decode time p50/mean: S/S s
Total time p50/mean: S/S s
Throughput(completion,decode) p50/mean: N/N tokens/s
Throughput(completion,total) p50/mean: N/N tokens/s
TTFT p50/mean: N/N ms
TPOT p50/mean: N/N ms/token
Latency p50/mean: N/N ms""".splitlines()
STREAMING_LINES = """\
Warmup runs: 1
Measured runs: 3
Total time: S s
TTFT p50/p95/p99: N/N/N ms
TPOT p50/p95/p99: N/N/N ms/token
ITL p50/p95/p99: N/N/N ms
Latency p50/p95/p99: N/N/N ms
Throughput (completion,total): N tokens/s""".splitlines()
SCHEDULER_FORM = (
    "--device cpu --prompt Hello --num-requests 4 --max-new-tokens 6 --mode online --max-batch-size 2 "
    "--no-stop-on-eos --no-prefix-cache --pretok --warmup-runs 1 --repeat-runs 3 --paged-attn"
)
STREAMING_FORM = (
    "--device cpu --prompt Hello --prompt-repeats 1,4 --pretok --tokenize-workers 0 --num-requests 4 "
    "--max-new-tokens 6 --submit-interval-ms 0 --max-batch-size 4 --prefill-max-batch-size 4 "
    "--prefill-admission-policy fifo --paged-attn --no-prefix-cache --no-stop-on-eos --warmup-runs 1 "
    "--repeat-runs 3"
)


def run_command(name: str, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | variables
    command = [sys.executable, "-m", f"rosellm.roseinfer.benchmark_{name}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)


def without_numbers(text: str) -> list[str]:
    """Lines with S for a number of six decimals and N for one of two."""
    return re.sub(r"\d+\.\d\d(?!\d)", "N", re.sub(r"\d+\.\d{6}(?!\d)", "S", text)).splitlines()


def lines_after(text: str, title: str) -> list[str]:
    lines = without_numbers(text)
    return lines[lines.index(title) + 1 :]


def scheduler_options(text: str) -> argparse.Namespace:
    return benchmark_scheduler.BENCHMARK.parse_options(text.split())


def streaming_engine() -> Engine:
    """A small random model with the shipped tokenizer's stand-in, which can decode any id."""
    gpt = random_model(0)
    return small_engine(gpt, tokenizer=load_dummy_tokenizer(gpt.config))


def engine_for(**options):
    return small_engine(random_model(0), **options)


def greedy(n: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)


# The documented forms, as processes.


def test_the_scheduler_form_prints_its_summary_and_writes_record_and_trace(tmp_path):
    record_path, trace_path = tmp_path / "record.json", tmp_path / "trace.json"
    done = run_command("scheduler", *SCHEDULER_FORM.split(), "--json", record_path, "--profile", trace_path)
    assert done.returncode == 0, done.stderr
    assert lines_after(done.stdout, "=== online summary ===") == ONLINE_LINES
    record = json.loads(record_path.read_text())
    assert (record["schema_version"], record["kind"], record["model"]) == (1, "scheduler", "rose-tiny")
    assert record["rung"] is None and record["recipe"] == replace(LADDER[BEST_RUNG], runner="eager").as_dict()
    repeats = record["results"]["online"]["repeats"]
    assert [(r["completion_tokens"], r["decode_tokens"], r["decode_steps"]) for r in repeats] == [
        (24, 20, 10)
    ] * 3
    assert record["num_kv_blocks"] == 2 + SPARE_KV_BLOCKS
    assert str(tmp_path) not in record_path.read_text()
    names = [event.get("name") for event in json.loads(trace_path.read_text())["traceEvents"]]
    assert names.count("roseinfer.decode_step_sessions") == 5


@pytest.mark.slow
def test_the_cuda_graph_form_takes_the_best_rung_and_the_switches_show_in_the_record(tmp_path):
    path = tmp_path / "record.json"
    done = run_command(
        "scheduler", *SCHEDULER_FORM.split(), "--cuda-graph", "--json", path, ROSELLM_TRITON_KV_APPEND="0"
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    assert record["rung"] == BEST_RUNG and record["append_gate_min_batch"] is None


@pytest.mark.slow
def test_all_modes_run_dense_and_give_the_same_tokens(tmp_path):
    path = tmp_path / "record.json"
    sizes = ("--num-requests", 3, "--max-new-tokens", 4, "--warmup-runs", 0, "--repeat-runs", 1)
    shape = ("--hf-model-id", "rose-tiny", "--load-format", "dummy", "--prompt-tokens", 5)
    done = run_command("scheduler", "--device", "cpu", "--mode", "all", *sizes, *shape, "--json", path)
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    assert (record["rung"], list(record["results"])) == ("dense", ["naive", "offline", "online"])
    assert len({result["repeats"][0]["tokens_sha256"] for result in record["results"].values()}) == 1


@pytest.mark.slow
def test_the_streaming_form_prints_its_summary_and_writes_record_and_trace(tmp_path):
    record_path, trace_path = tmp_path / "record.json", tmp_path / "trace.json"
    done = run_command("streaming", *STREAMING_FORM.split(), "--json", record_path, "--profile", trace_path)
    assert done.returncode == 0, done.stderr
    assert lines_after(done.stdout, "=== streaming summary ===") == STREAMING_LINES
    record = json.loads(record_path.read_text())
    assert record["kind"] == "streaming"
    assert [r["completion_tokens"] for r in record["results"]["streaming"]["repeats"]] == [24] * 3
    names = {event.get("name") for event in json.loads(trace_path.read_text())["traceEvents"]}
    assert "roseinfer.decode_step_sessions" in names


def test_a_trace_that_fails_costs_no_measurement(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise RoseError("no trace can be made")

    monkeypatch.setattr("rosellm.bench.cli.write_trace", fail)
    record, trace = tmp_path / "record.json", tmp_path / "trace.json"
    sizes = "--device cpu --num-requests 1 --max-new-tokens 2 --warmup-runs 0 --repeat-runs 1"
    written = ["--json", str(record), "--profile", str(trace)]
    assert benchmark_scheduler.main([*sizes.split(), *written]) == 2
    assert capsys.readouterr().err == "error: no trace can be made\n"
    assert json.loads(record.read_text())["results"]["online"]["repeats"]


def test_a_summary_that_cannot_be_printed_costs_no_measurement(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("rosellm.bench.cli.print_summary", fail)
    sizes, record = (
        "--device cpu --num-requests 1 --max-new-tokens 2 --warmup-runs 0",
        tmp_path / "record.json",
    )
    assert benchmark_scheduler.main([*sizes.split(), "--repeat-runs=1", "--json", str(record)]) == 2
    assert "Broken pipe" in capsys.readouterr().err
    assert json.loads(record.read_text())["results"]["online"]["repeats"]


@pytest.mark.slow
def test_the_append_form_prints_a_line_a_batch_then_a_row_a_variant_and_writes_its_record(tmp_path):
    path = tmp_path / "record.json"
    shape = ("--num-heads", 2, "--head-dim", 8, "--block-size", 4, "--repeats", 2)
    done = run_command("kv_append", "--batch-sizes", "8,16", *shape, "--device", "cpu", "--json", path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    wanted = [(batch, variant) for batch in (8, 16) for variant in benchmark_kv_append.VARIANTS]
    assert [(row["batch_size"], row["variant"]) for row in rows] == wanted
    assert all(len(row["repeats_s"]["wall"]) == 2 and row["floor_s"] > 0 for row in rows)
    lines = without_numbers(done.stdout)
    gain = r"B=%d: baseline Nus, triton Nus, speedup \d+\.\d{3}x"
    assert re.fullmatch(gain % 8, lines[2]) and re.fullmatch(gain % 16, lines[3])
    assert len(lines) == 2 + 2 + 1 + len(rows)


# What is printed, line by line.

SECONDS, HUNDREDTHS, MODES = (
    r"(?:\d+\.\d{6}|none)",
    r"(?:\d+\.\d\d|none)",
    r"(?:naive|offline|online|streaming)",
)
HEADER = (
    r"Model: \S+, (?:auto|dummy), (?:cpu|cuda), \w+",
    r"Recipe: \w+(?: \w+)* \(\w+ kernels\)",
    r"Requests: \d+, \d+ new tokens each, \d+ at a time",
    rf"=== {MODES} summary ===",
    r"(?:Warmup|Measured) runs: \d+",
)
SUMMARY = (
    rf"(?:Decode|Total) time p50/mean: {SECONDS}/{SECONDS} s",
    rf"Throughput\(completion,(?:decode|total)\) p50/mean: {HUNDREDTHS}/{HUNDREDTHS} tokens/s",
    rf"(?:TTFT|Latency) p50/mean: {HUNDREDTHS}/{HUNDREDTHS} ms",
    rf"TPOT p50/mean: {HUNDREDTHS}/{HUNDREDTHS} ms/token",
)
STREAMING_SUMMARY = (
    rf"Total time: {SECONDS} s",
    rf"(?:TTFT|ITL|Latency) p50/p95/p99: {HUNDREDTHS}/{HUNDREDTHS}/{HUNDREDTHS} ms",
    rf"TPOT p50/p95/p99: {HUNDREDTHS}/{HUNDREDTHS}/{HUNDREDTHS} ms/token",
    rf"Throughput \(completion,total\): {HUNDREDTHS} tokens/s",
)
APPENDS = (
    r"KV append, \w+ kernels, (?:cpu|cuda), torch\.\w+",
    r"Copy bandwidth: \d+\.\d GB/s",
    r"B=\d+: baseline \d+\.\d\dus, triton \d+\.\d\dus, speedup \d+\.\d{3}x",
    r" +B  variant( +\w+( \w+)* us)+ +gain \(\w+\) +floor us",
    r" +\d+  \w+( +\d+\.\d\d)+ +\d+\.\d\dx +\d+\.\d\d",
)
RIVALS = (
    r"\w+: \d+ requests, \d+ new tokens each, \d+ at a time, by \w+(, \w+)*",
    r" +rival +tokens/s +lowest +highest +ratio",
    r"W\d +\w+( +\d+\.\d){3} +\d+\.\d\dx",
)
TINY_APPENDS = "--device cpu --batch-sizes 8 --num-heads 2 --head-dim 8 --block-size 4 --repeats 2"
TINY_RIVALS = (
    "--rival rosellm --workloads W1 --device cpu --hf-model-id rose-tiny --num-requests 2 --max-new-tokens 3 "
    "--max-batch-size 2 --warmup-runs 0 --repeat-runs 1"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "arguments", "forms"),
    [
        (benchmark_scheduler, SCHEDULER_FORM.replace("online", "all"), HEADER + SUMMARY),
        (benchmark_streaming, STREAMING_FORM, HEADER + STREAMING_SUMMARY),
        (benchmark_kv_append, TINY_APPENDS, APPENDS),
        (benchmark_rivals, TINY_RIVALS, RIVALS),
    ],
    ids=["scheduler", "streaming", "kv_append", "rivals"],
)
def test_every_line_that_a_benchmark_prints_can_be_parsed(module, arguments, forms, capsys):
    assert module.main(arguments.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not any(re.fullmatch(form, line) for form in forms)] == []
    assert [form for form in forms if not any(re.fullmatch(form, line) for line in lines)] == []


def test_large_figures_are_printed_without_commas():
    rows = [
        {"batch_size": 9, "variant": variant, "medians_s": {"wall": 12.345678}, "floor_s": 0.0123456}
        for variant in ("index_put", "generic")
    ]
    results = {"offline": {"medians": {THROUGHPUT: 1234567.8}, "repeats": [{THROUGHPUT: 7654321.0}]}}
    lines = benchmark_rivals.comparison([{"workload": "W3", "rival": "rosellm", "results": results}])
    for line in [*benchmark_kv_append.table(rows), *lines]:
        assert any(re.fullmatch(form, line) for form in APPENDS + RIVALS), line


# What is printed, to the letter.


def test_the_online_summary_reads_as_the_record_does(capsys):
    medians = {
        "decode_time_s": 2.145921,
        "total_time_s": 2.3,
        "decode_throughput_tok_s": 1908.74,
        "total_throughput_tok_s": 1_234_567.891,
        "ttft_p50_s": 0.00268,
        "tpot_p50_s": 0.00845,
        "latency_p50_s": 2.1565,
    }
    means = {
        "decode_time_s": 2.146833,
        "total_time_s": 2.4,
        "decode_throughput_tok_s": 1907.93,
        "total_throughput_tok_s": 1_234_568.0,
        "ttft_mean_s": 0.00267,
        "tpot_mean_s": 0.00846,
        "latency_mean_s": 2.15754,
    }
    result = {"mode": "online", "warmup_runs": 1, "repeat_runs": 3, "medians": medians, "means": means}
    print_summary(result, benchmark_scheduler.LINES)
    assert (
        capsys.readouterr().out
        == """\
=== online summary ===
Warmup runs: 1
Measured runs: 3
Decode time p50/mean: 2.145921/2.146833 s
Total time p50/mean: 2.300000/2.400000 s
Throughput(completion,decode) p50/mean: 1908.74/1907.93 tokens/s
Throughput(completion,total) p50/mean: 1234567.89/1234568.00 tokens/s
TTFT p50/mean: 2.68/2.67 ms
TPOT p50/mean: 8.45/8.46 ms/token
Latency p50/mean: 2156.50/2157.54 ms
"""
    )


def test_the_streaming_summary_reads_as_the_record_does(capsys):
    medians = {"total_time_s": 1.5, "total_throughput_tok_s": 29764.4}
    for name, seconds in (("ttft", 0.0123), ("latency", 1.6)):
        medians |= {f"{name}_p{percent}_s": seconds + percent / 1e5 for percent in (50, 95, 99)}
    result = {"mode": "streaming", "warmup_runs": 0, "repeat_runs": 1, "medians": medians, "means": {}}
    print_summary(result, benchmark_streaming.LINES)
    assert (
        capsys.readouterr().out
        == """\
=== streaming summary ===
Warmup runs: 0
Measured runs: 1
Total time: 1.500000 s
TTFT p50/p95/p99: 12.80/13.25/13.29 ms
TPOT p50/p95/p99: none/none/none ms/token
ITL p50/p95/p99: none/none/none ms
Latency p50/p95/p99: 1600.50/1600.95/1600.99 ms
Throughput (completion,total): 29764.40 tokens/s
"""
    )
