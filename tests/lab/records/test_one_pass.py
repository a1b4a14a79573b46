"""The command that records prompts joined with the decode step against prompts apart from it."""

from __future__ import annotations

import json

import pytest
import torch

from rosellm.lab.records import arrivals, one_pass
from rosellm.lab.records.records import Results
from rosellm.roseinfer.bench.job import Job
from rosellm.roseinfer.bench.workloads import Workload
from rosellm.roseinfer.recipe import BEST_RUNG, LADDER
from rosellm.roseinfer.sampling import SamplingParams
from tests.helpers import random_model, random_prompts, small_engine

MODEL = random_model(0)


def job_of(way: str) -> Job:
    """Requests that end one after another, so that each next one finds others decoding."""
    recipe = one_pass.ways_of(torch.device("cpu"))[way]
    params = [SamplingParams(temperature=0.0, max_tokens=4 + 3 * i, ignore_eos=True) for i in range(10)]
    return Job(small_engine(MODEL, recipe=recipe, max_batch_size=4), random_prompts([9] * 10), params)


def test_the_two_ways_differ_in_the_prefill_alone() -> None:
    ways = one_pass.ways_of(torch.device("cpu"))
    assert ways["apart"] == LADDER[BEST_RUNG] and ways["joined"] == LADDER["one_pass"]
    assert ways["apart"].difference(ways["joined"]) == {"prefill": ("packed", "joined")}


def test_joined_prompts_take_no_passes_of_their_own() -> None:
    jobs = {way: job_of(way) for way in ("apart", "joined")}
    passes = {way: one_pass.passes_of(job.engine, job) for way, job in jobs.items()}
    assert passes["apart"]["joined"] == 0 and passes["joined"]["joined"] == 6
    assert passes["joined"]["prompts"] == 1 and passes["apart"]["prompts"] == 7
    assert sum(passes["joined"].values()) < sum(passes["apart"].values())
    step = jobs["joined"].engine.step
    assert type(step.joined).__name__ == "JoinedPass"  # no longer watched


@pytest.mark.parametrize("way", ["apart", "joined"])
def test_each_decode_step_with_a_prompt_beside_it_is_timed_once_and_leaves_no_blocks(way: str) -> None:
    engine = job_of(way).engine
    with one_pass.watched_joins(engine) as joins:
        seconds = one_pass.beside_seconds(engine, rows=2, context=9, tokens=7, repeats=3)
    assert len(seconds) == 3 and min(seconds) > 0
    assert joins == ([7] * (3 + one_pass.IN_FLIGHT) if way == "joined" else [])
    assert engine.blocks.num_free_blocks() == engine.num_kv_blocks


def test_a_small_record_has_runs_passes_and_latencies_of_both_ways(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(arrivals, "LONG_RUNNING", Workload("long", 3, 80, 4, prompt_tokens=8))
    monkeypatch.setattr(arrivals, "LONG_AFTER_MS", 10)
    assert one_pass.main(["--device=cpu", "--repeats=2", f"--output={tmp_path}"]) == 0
    record = json.loads((tmp_path / "rose-tiny" / "one_pass.json").read_text())
    assert record["kind"] == "one_pass" and record["workload"] == "W8" and record["model"] == "rose-tiny"
    figures = one_pass.recorded(Results(tmp_path))["rose-tiny"]
    assert figures == record["figures"]
    for way in ("apart", "joined"):
        assert len(figures["runs"][way]["repeats"]) == 2 and sum(figures["runs"][way]["passes"].values()) > 8
        assert figures["ways"][way]["prefill"] == {"apart": "packed", "joined": "joined"}[way]
        for kind in ("chunked", "whole"):
            medians = figures["long_prompt"][way][kind]["medians"]
            assert 0 < medians["itl_beside_p50_s"] <= medians["itl_beside_p99_s"]
    assert all(len(us) == 2 for us in figures["beside_us"]["4"]["96"].values())
    tokens = {run["repeats"][0]["tokens_sha256"] for run in figures["runs"].values()}
    assert len(tokens) == 1
    said = capsys.readouterr().out
    assert "W8: apart" in said and "4 rows, a prompt of 96: apart" in said and "beside a long prompt" in said


def test_nothing_recorded_is_no_figures(tmp_path) -> None:
    assert one_pass.recorded(Results(tmp_path)) == {}


def test_a_bad_number_of_repeats_is_told_in_one_line(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        one_pass.main(["--output", str(tmp_path), "--repeats", "0"])
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "'0'" in said
