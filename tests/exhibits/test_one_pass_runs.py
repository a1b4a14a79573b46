"""The command that records prompts joined with the decode step against prompts apart from it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from rosellm.bench.benchmark_scheduler import run_scheduler
from rosellm.bench.job import Job
from rosellm.bench.workloads import Workload
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.recipe import BEST_RUNG, LADDER
from rosellm.roseinfer.sampling import SamplingParams
from tests.helpers import random_model, random_prompts, small_engine
from tests.lab.measuring import measured

arrivals, passes, one_pass = map(load_exhibit, ("arrival_runs", "passes", "one_pass_runs"))
MODEL = random_model(0)


def job_of(way: str) -> Job:
    """Requests that end one after another, so that each next one finds others decoding."""
    recipe = one_pass.ways_of(torch.device("cpu"))[way]
    params = [SamplingParams(temperature=0.0, max_tokens=4 + 3 * i, ignore_eos=True) for i in range(10)]
    return Job(small_engine(MODEL, recipe=recipe, max_batch_size=4), random_prompts([9] * 10), params)


def test_the_two_ways_differ_in_the_prefill_alone() -> None:
    ways = one_pass.ways_of(torch.device("cpu"))
    assert ways["apart"] == LADDER[BEST_RUNG] and ways["joined"] == LADDER["one_pass"]
    assert ways["apart"].difference(ways["joined"]) == {"exhibit": ("none", "one_pass")}


def run_of(job: Job) -> Callable[[], object]:
    return partial(run_scheduler, job)


def test_joined_prompts_take_no_passes_of_their_own() -> None:
    jobs = {way: job_of(way) for way in ("apart", "joined")}
    taken = {way: passes.passes_of(job.engine, run_of(job)) for way, job in jobs.items()}
    apart, joined = (passes.counted(own) for own in taken.values())
    assert apart["joined"] == 0 and apart["prompts"] == 7
    assert joined["joined"] == 6 and joined["prompts"] == 1
    assert sum(joined.values()) < sum(apart.values())
    for own in taken.values():
        assert sum(one.tokens for one in own) == 10 * 9 and all(one.seconds > 0 for one in own)
        assert sum(one.rows for one in own) == sum(3 + 3 * i for i in range(10))
    assert "_begin_joined" not in vars(jobs["joined"].engine.step)  # no longer watched


@pytest.mark.parametrize("way", ["apart", "joined"])
def test_each_decode_step_with_a_prompt_beside_it_is_timed_once_and_leaves_no_blocks(way: str) -> None:
    engine = job_of(way).engine
    with passes.watched_joins(engine) as began:
        seconds = one_pass.beside_seconds(engine, rows=2, context=9, tokens=7, repeats=3)
    assert len(seconds) == 3 and min(seconds) > 0
    assert len(began) == (3 + one_pass.IN_FLIGHT if way == "joined" else 0)
    assert engine.blocks.num_free_blocks() == engine.num_kv_blocks


@pytest.mark.slow
def test_a_small_record_has_runs_passes_and_latencies_of_both_ways(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(arrivals, "LONG_RUNNING", Workload("long", 3, 80, 4, prompt_tokens=8))
    monkeypatch.setattr(arrivals, "LONG_AFTER_MS", 10)
    record = measured(tmp_path, "one_pass", "--repeats=2")
    assert record["kind"] == "one_pass" and record["workload"] == "W8" and record["model"] == "rose-tiny"
    figures = record["figures"]
    for way in ("apart", "joined"):
        assert len(figures["runs"][way]["repeats"]) == 2 and sum(figures["runs"][way]["passes"].values()) > 8
        assert figures["ways"][way]["exhibit"] == {"apart": "none", "joined": "one_pass"}[way]
        for kind in ("chunked", "whole"):
            medians = figures["long_prompt"][way][kind]["medians"]
            assert 0 < medians["itl_beside_p50_s"] <= medians["itl_beside_p99_s"]
    assert all(len(us) == 2 for us in figures["beside_us"]["4"]["32"].values())
    tokens = {run["repeats"][0]["tokens_sha256"] for run in figures["runs"].values()}
    assert len(tokens) == 1
