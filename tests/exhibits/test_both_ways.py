"""Prompts joined with decode steps make fewer passes over the weights than prompts apart."""

from __future__ import annotations

import torch

from rosellm.bench.workloads import Workload
from rosellm.roseinfer.exhibits import load_exhibit
from rosellm.roseinfer.recipe import BEST_RUNG, LADDER
from tests.helpers import random_model

both_ways, passes = map(load_exhibit, ("both_ways", "passes"))


def test_the_two_ways_differ_in_the_prefill_alone() -> None:
    ways = both_ways.ways_of(torch.device("cpu"))
    assert ways["apart"] == LADDER[BEST_RUNG]
    assert ways["apart"].difference(ways["joined"]) == {"exhibit": ("none", "one_pass")}


def test_joined_prompts_take_no_passes_of_their_own() -> None:
    sizes = {"min_new_tokens": 4, "prompt_tokens": 9, "max_batch_size": 4}
    found = both_ways.both_ways(random_model(0), Workload("ten", 10, 31, **sizes))
    apart, joined = (passes.counted(run.passes) for run in found.values())
    assert apart["joined"] == 0 and joined["joined"] > 0
    assert joined["prompts"] < apart["prompts"] and sum(joined.values()) < sum(apart.values())
    for run in found.values():
        assert sum(one.tokens for one in run.passes) == 10 * 9
        assert sum(one.rows for one in run.passes) == sum(len(tokens) - 1 for tokens in run.tokens)
        assert all(one.seconds > 0 for one in run.passes) and run.seconds > 0
    assert found["apart"].tokens == found["joined"].tokens
