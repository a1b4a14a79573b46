"""The command that records arrivals: rates follow from the capacity, a run from its options."""

from __future__ import annotations

import pytest

from rosellm.bench.benchmark_streaming import BENCHMARK
from rosellm.bench.workloads import Workload
from rosellm.lab.records import arrivals
from rosellm.lab.records.serving_times import ServingTimes
from rosellm.roseinfer.exhibits import load_exhibit
from tests.lab.measuring import measured

runs = load_exhibit("arrival_runs")
simulated_run = load_exhibit("simulated_fleet").simulated_run
LONG = "long_prompt", "long_prompt_joined"


@pytest.mark.slow
def test_a_small_record_tells_capacity_runs_at_shares_of_it_and_step_times(
    tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(runs, "SECONDS", 1)
    monkeypatch.setattr(runs, "LIMITS_S", (60.0, 60.0))
    record = measured(tmp_path, "arrivals")
    figures = record["figures"]
    assert record["kind"] == "arrivals" and record["rung"] and figures["limits_s"] == [60.0, 60.0]
    capacity, tokens = figures["capacity_req_s"], figures["at_once"]["completion_tokens"]
    assert capacity == pytest.approx(16 / figures["at_once"]["total_time_s"]) and tokens == 16 * 8
    assert [run["rate"] for run in figures["runs"]] == [capacity * share for share in runs.SHARES]
    for run in figures["runs"]:
        requests = arrivals.arrivals_of(run["options"])
        assert len(requests) == max(1, round(run["rate"]))
        assert run["completion_tokens"] == 8 * len(requests) and run["within_limits_share"] == 1
    assert ServingTimes.from_dict(figures["times"]).rows == (1, 2, 4)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("50% of capacity")


@pytest.mark.slow
def test_a_model_with_the_positions_is_also_measured_beside_a_long_prompt(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(runs, "LONG_RUNNING", Workload("long", 3, 80, 4, prompt_tokens=8))
    monkeypatch.setattr(runs, "LONG_AFTER_MS", 10)
    monkeypatch.setattr(runs, "LONG_TOKENS", 400)
    monkeypatch.setattr(runs.long_prompt_options, "__defaults__", (400, (512,), None, None, None))
    for name, exhibit in zip(LONG, ("none", "one_pass"), strict=True):
        record = measured(tmp_path, name, "--chunks=64,32")
        assert record["options"]["long_prompt_tokens"] == 400 and record["options"]["prefill_chunk"] == 64
        assert list(record["results"]) == ["chunked", "chunks of 32", "whole"]
        assert all("itl_beside_p99_s" in result["medians"] for result in record["results"].values())
        assert record["recipe"]["exhibit"] == exhibit


@pytest.mark.parametrize("chunks", [(512,), (512, 128), (96, 32)])
def test_running_requests_have_a_token_for_every_chunk_of_the_long_prompt(chunks: tuple[int, ...]) -> None:
    asked = BENCHMARK.parse_options(runs.long_prompt_options(chunks=chunks))
    running = [tokens for _, prompt, tokens in asked.trace if prompt != 16_000]
    assert min(running) >= 256 + 16_000 / min(chunks)
    assert (asked.prefill_chunk, *(asked.long_prompt_chunks or ())) == chunks
