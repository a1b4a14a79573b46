"""The benchmark commands as users run them: documented forms, printed lines, records, bad input."""

import json
import re
from dataclasses import replace
from importlib import import_module

import pytest

from rosellm.bench import benchmark_scheduler
from rosellm.bench.job import SPARE_KV_BLOCKS
from rosellm.roseinfer.recipe import BEST_RUNG, LADDER

PRINTED = {
    "scheduler": {"decode_throughput_tok_s", "total_throughput_tok_s", "ttft_p50_s", "decode_step_p99_s"},
    "streaming": {"total_time_s", "ttft_p99_s", "tpot_p95_s", "itl_p99_s", "latency_p50_s"},
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


@pytest.mark.parametrize("name", ["scheduler", pytest.param("streaming", marks=pytest.mark.slow)])
def test_a_documented_form_prints_its_summary_and_writes_its_record(name, tmp_path, capsys):
    record_path = tmp_path / "record.json"
    main = import_module(f"rosellm.roseinfer.benchmark_{name}").main
    assert main([*FORMS[name].split(), f"--json={record_path}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(map(re.fullmatch, HEADER, lines))
    mode = "online" if name == "scheduler" else name
    assert lines[len(HEADER)] == f"=== {mode}: medians of 2 runs after 0 for warm-up ==="
    printed = {figure: float(median) for figure, median in map(str.split, lines[len(HEADER) + 1 :])}
    record = json.loads(record_path.read_text())
    assert (record["schema_version"], record["kind"], record["model"]) == (1, name, "rose-tiny")
    assert record["rung"] is None and record["recipe"] == replace(LADDER[BEST_RUNG], runner="eager").as_dict()
    (result,) = record["results"].values()
    assert printed == {figure: float(f"{median:.6g}") for figure, median in result["medians"].items()}
    assert printed.keys() >= PRINTED[name]
    assert [repeat["completion_tokens"] for repeat in result["repeats"]] == [16] * 2
    assert str(tmp_path) not in record_path.read_text()
    if name == "scheduler":
        assert {(one["decode_tokens"], one["decode_steps"]) for one in result["repeats"]} == {(12, 6)}
        assert record["num_kv_blocks"] == 2 + SPARE_KV_BLOCKS


def test_a_broken_pipe_after_the_runs_costs_no_measurement(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("rosellm.bench.job.print_summary", fail)
    record = tmp_path / "record.json"
    assert benchmark_scheduler.main([*SMALL.split(), f"--json={record}"]) == 2
    assert "Broken" in capsys.readouterr().err
    assert json.loads(record.read_text())["results"]["online"]["repeats"]
