"""The benchmark commands as users run them: documented forms, printed lines, records, bad input."""

import json
import re
from dataclasses import replace
from importlib import import_module

import pytest

from rosellm.bench import benchmark_scheduler
from rosellm.bench.cli import print_summary
from rosellm.bench.job import SPARE_KV_BLOCKS
from rosellm.errors import RoseError
from rosellm.roseinfer.recipe import BEST_RUNG, LADDER

SUMMARIES = {
    "scheduler": """\
=== online summary ===
Warmup runs: 0
Measured runs: 2
Decode time p50/mean: S/S s
Total time p50/mean: S/S s
Throughput(completion,decode) p50/mean: N/N tokens/s
Throughput(completion,total) p50/mean: N/N tokens/s
TTFT p50/mean: N/N ms
TPOT p50/mean: N/N ms/token
Latency p50/mean: N/N ms""",
    "streaming": """\
=== streaming summary ===
Warmup runs: 0
Measured runs: 2
Total time: S s
TTFT p50/p95/p99: N/N/N ms
TPOT p50/p95/p99: N/N/N ms/token
ITL p50/p95/p99: N/N/N ms
Latency p50/p95/p99: N/N/N ms
Throughput (completion,total): N tokens/s""",
}
COMMON = (
    "--device cpu --prompt Hello --num-requests 4 --max-new-tokens 4 --no-stop-on-eos --no-prefix-cache "
    "--pretok --warmup-runs 0 --repeat-runs 2 --paged-attn"
)
FORMS = {
    "scheduler": f"{COMMON} --mode online --max-batch-size 2",
    "streaming": f"{COMMON} --prompt-repeats 1,4 --tokenize-workers 0 --submit-interval-ms 0 "
    "--max-batch-size 4 --prefill-max-batch-size 4 --prefill-admission-policy fifo",
}
HEADER = [
    r"Model: rose-tiny, auto, cpu, float32",
    r"Recipe: \w+(?: \w+)* \(\w+ kernels\)",
    r"Requests: 4, 4 new tokens each, [24] at a time",
]
SMALL = "--device cpu --num-requests 2 --max-new-tokens 3 --warmup-runs 0 --repeat-runs 1"


def without_numbers(text: str) -> str:
    """S stands for a number of six decimals and N for one of two."""
    return re.sub(r"\d+\.\d\d(?!\d)", "N", re.sub(r"\d+\.\d{6}(?!\d)", "S", text))


@pytest.mark.parametrize("name", ["scheduler", pytest.param("streaming", marks=pytest.mark.slow)])
def test_a_documented_form_prints_its_summary_and_writes_record_and_trace(name, tmp_path, capsys):
    record_path, trace_path = tmp_path / "record.json", tmp_path / "trace.json"
    main = import_module(f"rosellm.roseinfer.benchmark_{name}").main
    assert main([*FORMS[name].split(), f"--json={record_path}", f"--profile={trace_path}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(map(re.fullmatch, HEADER, lines))
    assert without_numbers("\n".join(lines[len(HEADER) :])) == SUMMARIES[name]
    record = json.loads(record_path.read_text())
    assert (record["schema_version"], record["kind"], record["model"]) == (1, name, "rose-tiny")
    assert record["rung"] is None and record["recipe"] == replace(LADDER[BEST_RUNG], runner="eager").as_dict()
    (result,) = record["results"].values()
    assert [repeat["completion_tokens"] for repeat in result["repeats"]] == [16] * 2
    assert str(tmp_path) not in record_path.read_text()
    names = [event.get("name") for event in json.loads(trace_path.read_text())["traceEvents"]]
    assert "roseinfer.decode_step_sessions" in names
    if name == "scheduler":
        assert {(one["decode_tokens"], one["decode_steps"]) for one in result["repeats"]} == {(12, 6)}
        assert record["num_kv_blocks"] == 2 + SPARE_KV_BLOCKS
        assert names.count("roseinfer.decode_step_sessions") == 3


def test_all_modes_run_dense_and_give_the_same_tokens(tmp_path):
    path = tmp_path / "record.json"
    arguments = f"{SMALL} --load-format dummy --prompt-tokens 5 --mode all --json {path}"
    assert benchmark_scheduler.main(arguments.split()) == 0
    record = json.loads(path.read_text())
    assert (record["rung"], list(record["results"])) == ("dense", ["naive", "offline", "online"])
    assert len({result["repeats"][0]["tokens_sha256"] for result in record["results"].values()}) == 1


@pytest.mark.parametrize("failing", ["print_summary", "write_trace"])
def test_what_fails_after_the_runs_costs_no_measurement(failing, tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise BrokenPipeError(32, "Broken pipe") if failing == "print_summary" else RoseError("Broken trace")

    monkeypatch.setattr(f"rosellm.bench.cli.{failing}", fail)
    record, trace = tmp_path / "record.json", tmp_path / "trace.json"
    assert benchmark_scheduler.main([*SMALL.split(), f"--json={record}", f"--profile={trace}"]) == 2
    assert "Broken" in capsys.readouterr().err
    assert json.loads(record.read_text())["results"]["online"]["repeats"]


def test_a_summary_tells_figures_in_their_units_and_what_is_missing(capsys):
    result = {
        "medians": {"total_time_s": 2.3, "total_throughput_tok_s": 1_234_567.891, "ttft_p50_s": 0.00268},
        "means": {"total_time_s": 2.4, "total_throughput_tok_s": 1_234_568.0, "ttft_mean_s": 0.00267},
    }
    sizes = {"mode": "online", "warmup_runs": 0, "repeat_runs": 1}
    print_summary(sizes | result, benchmark_scheduler.LINES)
    printed = capsys.readouterr().out.splitlines()
    assert printed[:3] == ["=== online summary ===", "Warmup runs: 0", "Measured runs: 1"]
    assert {
        "Total time p50/mean: 2.300000/2.400000 s",
        "Throughput(completion,total) p50/mean: 1234567.89/1234568.00 tokens/s",
        "TTFT p50/mean: 2.68/2.67 ms",
        "TPOT p50/mean: none/none ms/token",
    } <= set(printed)


def test_help_tells_the_defaults_of_the_workload_that_is_named(capsys):
    with pytest.raises(SystemExit, match="0"):
        benchmark_scheduler.main(["--workload", "W3", "--help"])
    assert re.search(r"--max-batch-size N .+; default: 256\n", capsys.readouterr().out)
