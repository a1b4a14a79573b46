"""The command that records prompts joined with the decode step against prompts apart from it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from rosellm.bench.benchmark_scheduler import run_scheduler
from rosellm.bench.job import Job
from rosellm.bench.workloads import Workload
from rosellm.lab.figures.charts import ChartError
from rosellm.lab.records import arrivals, one_pass, passes
from rosellm.lab.records.passes import Pass
from rosellm.lab.records.records import Results
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.recipe import BEST_RUNG, LADDER
from rosellm.roseinfer.sampling import SamplingParams
from tests.helpers import random_model, random_prompts, small_engine
from tests.lab.measuring import measured

pass_timeline, both_ways = load_exhibit("pass_timeline").pass_timeline, load_exhibit("both_ways")

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
    assert type(jobs["joined"].engine.step.joined) is load_exhibit("one_pass").JoinedPass  # no longer watched


@pytest.mark.parametrize("way", ["apart", "joined"])
def test_each_decode_step_with_a_prompt_beside_it_is_timed_once_and_leaves_no_blocks(way: str) -> None:
    engine = job_of(way).engine
    with passes.watched_joins(engine) as began:
        seconds = one_pass.beside_seconds(engine, rows=2, context=9, tokens=7, repeats=3)
    assert len(seconds) == 3 and min(seconds) > 0
    assert len(began) == (3 + one_pass.IN_FLIGHT if way == "joined" else 0)
    assert engine.blocks.num_free_blocks() == engine.num_kv_blocks


def test_passes_are_drawn_one_after_the_other_with_their_numbers_below() -> None:
    own = [Pass("prompts", 0, 9, 1.0), Pass("decode", 2, 0, 1.0), Pass("joined", 2, 5, 1.0)]
    chart = pass_timeline({"one": own, "other": own[:1]}, lambda one: 10.0 * (one.rows + 1), "title", 35.0)
    drawn = {bar.name: list(bar.base) for bar in chart.data}
    assert drawn == {"decode step": [10.0], "prompts alone": [0.0, 0.0], "both in one pass": []}
    assert chart.table.splitlines()[-2].split() == ["one", "1", "1", "1", "70.0"]
    with pytest.raises(ChartError, match="no pass"):
        pass_timeline({"one": []}, lambda one: 1.0, "title", 1.0)


FASTER = {"apart": [100.0, 101.0], "joined": [110.0, 111.0]}


def made_up_figures(tok_s: dict[str, list[float]]) -> dict:
    runs = {
        way: {"passes": {"decode": 5, "prompts": 9 - 4 * (way == "joined"), "joined": 0},
              "repeats": [{"total_throughput_tok_s": one} for one in own]}
        for way, own in tok_s.items()
    }  # fmt: skip
    return {"runs": runs}


def test_the_verdict_counts_only_turns_that_do_not_overlap() -> None:
    verdict = both_ways.verdict_of(made_up_figures(FASTER))
    assert verdict.word == "faster" and verdict.change == "+10.0 %"
    both = made_up_figures({"apart": [100.0, 101.0], "joined": [90.0, 120.0]})
    assert both_ways.verdict_of(both).word == "no difference beyond the noise"


def test_the_verdict_is_told_with_what_was_predicted() -> None:
    told = both_ways.told_verdict("gpt2", made_up_figures(FASTER), predicted=(0.03, 0.1))
    assert told == "**gpt2: kept.** Joined, W8 changes by +10.0 % (faster), as predicted: +3% to +10%."
    slower = made_up_figures({"apart": FASTER["joined"], "joined": FASTER["apart"]})
    assert "not kept" in (told := both_ways.told_verdict("gpt2", slower, (0.03, 0.1))) and "not as" in told


def test_tables_have_a_row_for_each_size_and_each_way() -> None:
    medians = {"itl_beside_p50_s": 0.001, "itl_beside_p99_s": 0.002, "long_prompt_ttft_s": 0.05}
    kinds = {kind: {"medians": medians} for kind in ("chunked", "whole")}
    figures = {
        "beside_us": {"8": {"128": {"apart": [300.0, 320.0], "joined": [248.0, 248.0]}}},
        "long_prompt": {"options": [], "apart": kinds, "joined": kinds},
    }
    assert both_ways.beside_rows(figures) == [[8, 128, 310.0, 248.0, "−20.0 %"]]
    rows = both_ways.long_rows(figures)
    assert rows[0] == ["chunked", "apart", 1.0, 2.0, 50.0] and [row[:2] for row in rows[2:]] == [
        ["whole", "apart"],
        ["whole", "joined"],
    ]


def test_both_ways_give_the_same_tokens_and_the_joined_one_takes_fewer_passes() -> None:
    workload = Workload("small", 16, 14, 4, prompt_tokens=9, min_new_tokens=3, min_prompt_tokens=2)
    runs = both_ways.both_ways(random_model(0), workload)
    assert runs["apart"].tokens == runs["joined"].tokens and len(runs["joined"].tokens) == 16
    assert len(runs["joined"].passes) < len(runs["apart"].passes)


@pytest.mark.slow
def test_a_small_record_has_runs_passes_and_latencies_of_both_ways(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(arrivals, "LONG_RUNNING", Workload("long", 3, 80, 4, prompt_tokens=8))
    monkeypatch.setattr(arrivals, "LONG_AFTER_MS", 10)
    record = measured(tmp_path, "one_pass", "--repeats=2")
    assert record["kind"] == "one_pass" and record["workload"] == "W8" and record["model"] == "rose-tiny"
    figures = both_ways.recorded(Results(tmp_path))["rose-tiny"]
    assert figures == record["figures"]
    for way in ("apart", "joined"):
        assert len(figures["runs"][way]["repeats"]) == 2 and sum(figures["runs"][way]["passes"].values()) > 8
        assert figures["ways"][way]["exhibit"] == {"apart": "none", "joined": "one_pass"}[way]
        for kind in ("chunked", "whole"):
            medians = figures["long_prompt"][way][kind]["medians"]
            assert 0 < medians["itl_beside_p50_s"] <= medians["itl_beside_p99_s"]
    assert all(len(us) == 2 for us in figures["beside_us"]["4"]["32"].values())
    tokens = {run["repeats"][0]["tokens_sha256"] for run in figures["runs"].values()}
    assert len(tokens) == 1
