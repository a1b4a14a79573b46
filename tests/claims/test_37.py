"""Notebook 37's figures are those of the plan that the records give."""

from __future__ import annotations

import pytest

from rosellm.lab.records.records import find
from rosellm.lab.scale import fitting, plan, step_model
from rosellm.lab.scale.cluster import Fleet
from rosellm.roseinfer.serving.admission import SchedulerConfig
from tests.claims.prose import claim, prose

TEXT = prose("37")
RUNS = fitting.read_runs(find())
LLAMA = next(run.cut for run in RUNS if run.model == "Llama-3.1-8B")
STEPS = step_model.StepModel(LLAMA, fitting.fit(RUNS))
LONG = plan.Traffic(long=(8000, 16000), long_share=0.03)
LIMITS = plan.Limits(0.2, 0.05, lambda tokens: STEPS.prefill(1, tokens))
FLEET = Fleet(8, STEPS, config=SchedulerConfig(prefill_chunk=1024))


def test_prefills_and_steps_take_what_is_said():
    longest, *shorter = (STEPS.prefill(1, tokens) * 1e3 for tokens in (16_000, 8000, 1024))
    claim(TEXT, r"on an idle GPU, (\d+) ms for 16,000 tokens", longest)
    words = r"of 8,000 tokens takes (\d+) ms .*1,024: (\d+) ms, beside a decode step of at most (\d+) ms"
    claim(TEXT, words, *shorter, STEPS.decode(256, 256 * 512) * 1e3)


@pytest.fixture(scope="module")
def each_s():
    return plan.capacity(FLEET, LONG)


def share(fleet, each_s, router, load=0.8, each=plan.EACH):
    return 100 * LIMITS.share(plan.serve(fleet, LONG, load * each_s, router, each))


def test_routers_keep_the_limits_for_the_shares_said(each_s):
    words = r"tokens keeps .* for (\d+) % .*requests for (\S+) %, .* nothing for (\S+) to (\S+) %: their"
    ways = ("fewest tokens", "fewest requests", "round robin", "at random")
    claim(TEXT, words, *(share(FLEET, each_s, way, each=2 * plan.EACH) for way in ways))
    claim(TEXT, r"keeps them for (\S+) % only", share(Fleet(8, STEPS), each_s, "fewest tokens"))
    many = Fleet(64, STEPS, config=FLEET.config, report_s=0.2)
    words = r"64 replicas keep the limits for (\d+) % of the requests at 90 %"
    claim(TEXT, words, share(many, each_s, "by host", 0.9, each=10))
