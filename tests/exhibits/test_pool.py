"""A pool of blocks: its tables fit, every block has one owner at each moment, all that happens is drawn."""

from __future__ import annotations

import json

import pytest

from rosellm.lab.figures.charts import PLOTLY, Chart, ChartError, bundle
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.recipe import BEST_RUNG
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.scheduler import OnlineScheduler
from tests.helpers import random_model, random_prompts, small_engine

pool_over_time = load_exhibit("pool").pool_over_time


def pool(steps: int = 12, **changes) -> Chart:
    """Two requests of which the younger is preempted twice at step 3, beside two cached blocks."""
    requests = {"1": [2] * steps, "2": [2, 2, 3] + [0] * (steps - 3)}
    marks = {"preempted": [(3, "request 2"), (3, "request 3")], "evicted": [], "finished": [(9, "1")]}
    rest = {"n_blocks": 8, "cached": [2] * steps, "lost": [0] * steps}
    figures = {"requests": requests, "marks": marks} | rest | changes
    return pool_over_time(**figures, title="Who holds the blocks?")


def test_a_pool_is_stacked_from_the_oldest_request_to_the_prefix_cache():
    chart = pool()
    bands = [one for one in chart.data if one.stackgroup]
    held = {one.name: one.y[2] for one in bands}
    assert list(held.items()) == [("request 1", 2), ("request 2", 3), ("prefix cache", 2)]
    assert len({one.fillcolor for one in bands}) == 3
    assert [(one.text, one.y) for one in chart.layout.annotations] == [("1", 1), ("2", 3)]
    assert chart.table.splitlines()[-1].split()[-2:] == ["7", "2"]


def test_what_happens_to_a_pool_is_marked_above_it_and_counted_where_it_happens_together():
    marks = {one.name: one for one in pool().data if one.mode == "markers+text"}
    assert set(marks) == {"preempted", "finished"}
    assert (marks["preempted"].x, marks["preempted"].text) == ((3,), ("2",))
    assert all(y > 8 for one in marks.values() for y in one.y)
    assert len({(one.marker.symbol, one.y[0]) for one in marks.values()}) == 2


def test_of_a_long_run_every_kth_step_of_a_pool_is_drawn_and_every_mark():
    chart = pool(1_000, marks={"finished": [(999, "1")]})
    assert all(len(one.y) == 200 and one.dx == 5 for one in chart.data if one.stackgroup)
    assert chart.data[-1].x == (999,) and len(json.dumps(bundle(chart)[PLOTLY])) < 8_000


@pytest.mark.parametrize(
    ("steps", "changes", "told"),
    [
        (12, {"cached": [1]}, "lengths differ: cached 1, lost 12, 1 12, 2 12"),
        (0, {"requests": {}, "lost": [], "cached": []}, "there is no step to draw"),
        (12, {"n_blocks": 6}, "7 blocks are held, of a pool of 6"),
    ],
)
def test_a_pool_that_does_not_fit_is_refused(steps, changes, told):
    with pytest.raises(ChartError, match=told):
        pool(steps, **changes)


PoolLog = load_exhibit("pool_log").PoolLog

PROMPTS = random_prompts([3, 9, 1, 17, 8, 5], seed=3)


def logged(prompts: list[list[int]], max_tokens: int = 20, **options) -> PoolLog:
    scheduler = OnlineScheduler(small_engine(random_model(0), **options))
    log = PoolLog(scheduler)
    scheduler.add_requests(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
    return log


@pytest.mark.parametrize(("rung", "prefix_cache"), [("dense", False), (BEST_RUNG, False), (BEST_RUNG, True)])
def test_at_every_moment_each_block_is_free_or_somebodys(rung, prefix_cache):
    log = logged(PROMPTS, recipe=rung, num_kv_blocks=8, prefix_cache=prefix_cache).run()
    for moment in log.moments:
        assert sum(moment.requests.values()) + moment.cached + moment.lost + moment.free == 8
        assert moment.lost == 0 <= min(moment.cached, moment.free)
    assert log.moments[0].free == 8 and log.moments[1].requests
    assert any(moment.cached for moment in log.moments) == prefix_cache


@pytest.mark.parametrize("rung", ["dense", BEST_RUNG])
def test_it_counts_the_preemptions_and_ends_that_the_scheduler_does(rung):
    log = logged(PROMPTS, recipe=rung, num_kv_blocks=5).run()
    assert log.count("preempted") == log.scheduler.preemptions > 0
    assert log.count("finished") == len(PROMPTS) and log.count("cancelled") == log.count("failed") == 0
    preempted = [one for one in log.happenings if one.kind == "preempted"]
    assert "request 1" not in {one.who for one in preempted}, "the oldest is never preempted"


def test_evicted_prefixes_are_told_with_their_length():
    log = logged([[i] * 12 for i in range(3)], max_tokens=1, num_kv_blocks=8, prefix_cache=True).run()
    assert log.moments[-1].cached == 6
    log.scheduler.add_requests([[7], [8]], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    log.run()
    assert {one.who for one in log.happenings if one.kind == "evicted"} == {"a prefix of 12 tokens"}
    assert log.count("evicted") >= 2 and log.count("preempted") == 0


def test_cancelled_and_failed_requests_are_told_from_finished_ones(monkeypatch):
    log = logged(PROMPTS[:3])
    log.scheduler.step()
    log.note()
    log.scheduler.cancel(2)
    log.scheduler.take_result(2)
    monkeypatch.setattr(log.engine, "begin_decode", lambda _sequences: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        log.scheduler.step()
    log.note()
    ends = [(one.moment, one.kind, one.who) for one in log.happenings]
    assert ends == [(2, "failed", "request 1"), (2, "cancelled", "request 2"), (2, "failed", "request 3")]
    assert log.moments[-1].free == log.engine.num_kv_blocks


_blocks = load_exhibit("blocks")
DiagramError, block_pool = _blocks.DiagramError, _blocks.block_pool


@pytest.mark.parametrize(
    "tables, lengths, message",
    [
        ({"A": [6]}, {"A": 1}, "A has block 6, but the pool has blocks 0 to 5"),
        ({"A": [0]}, {}, "the length of A is missing: there are none"),
        ({"A": [0]}, {"A": 65}, "A: 65 tokens do not fill 1 blocks of 64"),
        ({"A": [0, 1]}, {"A": 64}, "A: 64 tokens do not fill 2 blocks of 64"),
    ],
)
def test_a_pool_that_contradicts_its_tables_is_refused(tables, lengths, message):
    with pytest.raises(DiagramError, match=message):
        block_pool(tables, 6, lengths, 64, "t")
