"""Each rule speaks from its threshold on, of its own cause, in the terms of the device."""

import re
from dataclasses import replace

import pytest
import torch

from rosellm.lab.diagnose.rules import AGAIN, RULES, findings
from rosellm.lab.diagnose.trials import CURES_ON_CPU, CURES_ON_GPU, rungs_for
from rosellm.lab.records.host_functions import HostFunction
from rosellm.roseinfer.recipe import LADDER
from tests.lab.diagnose.planted import CEILINGS, WORK, profile, shares

GPU, HERE = torch.device("cuda"), torch.device("cpu")
SLOW_READS = replace(CEILINGS, read_bytes_per_us=WORK.read_bytes / 400)
SLOW_PRODUCTS = replace(CEILINGS, flops_per_us=WORK.flops / 400)
IDLE = {"rows": shares(0.75)}
# cause → on a GPU?, at the threshold, just below it
THRESHOLDS = {
    "launch": (True, IDLE, {"rows": shares(0.76)}),
    "Python": (False, IDLE, {"rows": shares(0.76)}),
    "calls": (False, {"calls": 150.0}, {"calls": 149.0}),
    "again": (False, {"computed": AGAIN * WORK.flops}, {"computed": 1.9 * WORK.flops}),
    "reread": (False, {"products": 40.0}, {"products": 39.0}),
    "copies": (False, {"copied_share": 0.1}, {"copied_share": 0.099}),
    "waits": (True, {"waits": 5.0, "waits_share": 0.1}, {"waits": 5.0, "waits_share": 0.099}),
    "transfers": (True, {"rows": shares(0.9, 0.1)}, {"rows": shares(0.905, 0.095)}),
    "bandwidth": (
        False,
        {"ceilings": SLOW_READS},
        {"ceilings": replace(SLOW_READS, read_bytes_per_us=WORK.read_bytes / 399)},
    ),
    "compute": (
        False,
        {"ceilings": SLOW_PRODUCTS},
        {"ceilings": replace(SLOW_PRODUCTS, flops_per_us=WORK.flops / 399)},
    ),
}


def causes(on_gpu: bool, **changes) -> list[str]:
    return [finding.cause for finding in findings(profile(on_gpu, **changes))]


def test_every_rule_has_a_planted_cause():
    assert len(THRESHOLDS) == len(RULES) + 1  # idle time has two names
    assert causes(True) == causes(False) == []


@pytest.mark.parametrize("cause", THRESHOLDS)
def test_a_rule_speaks_from_its_threshold_on(cause):
    on_gpu, at, below = THRESHOLDS[cause]
    assert causes(on_gpu, **at) == [cause]
    assert causes(on_gpu, **below) == []


def test_one_wait_a_step_is_how_tokens_arrive():
    assert causes(True, waits=1.0, waits_share=0.2) == []


def test_few_calls_on_a_gpu_or_in_a_long_step_are_nothing_to_tell():
    assert causes(True, calls=400.0) == causes(False, calls=400.0, step_us=1e4) == []


@pytest.mark.parametrize("cause", THRESHOLDS)
def test_a_cpu_is_told_of_in_its_own_terms(cause):
    _, at, _ = THRESHOLDS[cause]
    told = " ".join(finding.sentence for finding in findings(profile(False, **at)))
    assert not re.search("GPU|CUDA|kernel|launch", told)


def test_a_sentence_tells_the_figures_that_it_comes_from():
    [launch] = findings(profile(True, rows=shares(0.29), calls=312.0))
    assert "idles 71 % of a step" in launch.sentence and "312 launches" in launch.sentence
    assert launch.bound == pytest.approx(1 / 0.29) and "at most 3.45×" in launch.sentence
    [python] = findings(profile(False, **IDLE))
    assert "in 25 % of a step no operator runs" in python.sentence and "`loop.slow`" in python.sentence
    [copies] = findings(profile(copied_share=0.5, copying="cat", allocated=42e6))
    assert all(word in copies.sentence for word in ("50 %", "`cat`", "42.0 MB", "5.00 MB", "at most 2.00×"))
    [again] = findings(profile(computed=34 * WORK.flops))
    [reread] = findings(profile(products=160.0))
    assert "160 products a step for 20 matrices" in reread.sentence and reread.share == pytest.approx(7 / 8)
    assert "34.0 times" in again.sentence and again.share == pytest.approx(33 / 34)


def test_the_rest_of_all_functions_is_not_named_as_the_one_that_takes_most():
    rest = HostFunction("218 other functions", 900.0, 300)
    (finding,) = findings(profile(**IDLE, functions=(*profile().functions, rest)))
    assert "the host's time is `loop.slow`" in finding.sentence


def test_only_wide_weights_are_advised_to_become_16_bit():
    wide = replace(WORK, dtype=torch.float32)
    [narrow_told] = findings(profile(ceilings=SLOW_READS))
    [wide_told] = findings(profile(work=wide, ceilings=SLOW_READS))
    assert "16-bit weights" in wide_told.sentence and "16-bit" not in narrow_told.sentence
    assert "reads 51 %" in wide_told.sentence and wide_told.bound is None


def test_the_cause_that_takes_most_comes_first():
    assert causes(False, rows=shares(0.6), copied_share=0.2, calls=260.0) == ["calls", "Python", "copies"]


def test_every_cure_is_a_field_that_a_rung_changes():
    fields = {field for cures in (CURES_ON_CPU, CURES_ON_GPU) for names in cures.values() for field in names}
    assert fields <= set(LADDER["dense"].as_dict())
    assert set(CURES_ON_CPU) | set(CURES_ON_GPU) <= set(THRESHOLDS)


def test_the_rungs_to_try_take_the_causes_away_and_end_with_the_best(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert rungs_for("paged", ["launch"], GPU) == ["cuda_graph", "split_kv"]
    assert rungs_for("cuda_graph", ["waits", "transfers"], GPU) == [
        "reused_index_buffers",
        "resident_tables",
        "split_kv",
    ]
    assert rungs_for("dense", ["copies"], HERE) == ["paged", "split_kv"]
    assert rungs_for("paged", ["calls"], HERE) == ["no_mask", "split_kv"]


def test_of_a_side_branch_the_rungs_above_where_it_branched_off_are_tried():
    assert rungs_for("autotune", ["Python"], HERE) == ["mutable_block_info", "split_kv"]


def test_above_the_best_rung_there_is_none_and_a_custom_recipe_has_only_the_best():
    assert rungs_for("split_kv", ["copies", "Python"], HERE) == []
    assert rungs_for(None, ["copies"], HERE) == ["split_kv"]
