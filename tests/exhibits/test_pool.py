"""A pool of blocks: its tables fit, every block has one owner at each moment, all that happens is drawn."""

from __future__ import annotations

import pytest

from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.recipe import BEST_RUNG
from rosellm.roseinfer.sampling import SamplingParams
from rosellm.roseinfer.serving.scheduler import OnlineScheduler
from tests.helpers import random_model, random_prompts, small_engine

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
