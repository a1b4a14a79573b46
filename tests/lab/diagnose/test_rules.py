"""Each rule speaks from its threshold on, of its own cause, in the terms of the device."""

import re
from dataclasses import replace

import pytest
import torch

from rosellm.lab.diagnose.profile import AGAIN
from rosellm.lab.diagnose.rules import RULES, findings
from rosellm.lab.diagnose.trials import rungs_for
from rosellm.lab.records.host_functions import HostFunction
from rosellm.roseinfer.recipe import LADDER
from tests.lab.diagnose.planted import CEILINGS, WORK, profile, shares

GPU, HERE = torch.device("cuda"), torch.device("cpu")


def reads(us: float) -> dict:
    return {"ceilings": replace(CEILINGS, read_bytes_per_us=WORK.read_bytes / us)}


def multiplies(us: float) -> dict:
    return {"ceilings": replace(CEILINGS, flops_per_us=WORK.flops / us)}


# cause → on a GPU?, at the threshold, just below it
THRESHOLDS = {
    "launch": (True, {"rows": shares(0.75)}, {"rows": shares(0.76)}),
    "Python": (False, {"rows": shares(0.75)}, {"rows": shares(0.76)}),
    "calls": (False, {"calls": 150.0}, {"calls": 149.0}),
    "again": (False, {"computed": AGAIN * WORK.flops}, {"computed": 1.9 * WORK.flops}),
    "reread": (False, {"products": 40.0}, {"products": 39.0}),
    "copies": (False, {"copied_share": 0.1}, {"copied_share": 0.099}),
    "waits": (True, {"waits": 5.0, "waits_share": 0.1}, {"waits": 5.0, "waits_share": 0.099}),
    "transfers": (True, {"rows": shares(0.9, 0.1)}, {"rows": shares(0.905, 0.095)}),
    "bandwidth": (False, reads(400), reads(399)),
    "compute": (False, multiplies(400), multiplies(399)),
}


def causes(on_gpu: bool, **changes) -> list[str]:
    return [finding.cause for finding in findings(profile(on_gpu, **changes))]


@pytest.mark.parametrize("cause", THRESHOLDS)
def test_a_rule_speaks_from_its_threshold_on_and_of_a_cpu_in_its_own_terms(cause):
    on_gpu, at, below = THRESHOLDS[cause]
    assert causes(on_gpu, **at) == [cause] and causes(on_gpu, **below) == []
    told = " ".join(finding.sentence for finding in findings(profile(False, **at)))
    assert not re.search("GPU|CUDA|kernel|launch", told)


def test_every_rule_has_a_planted_cause_a_sentence_and_cures_that_some_rung_applies():
    assert {rule.cause for rule in RULES} == set(THRESHOLDS)
    assert {field for rule in RULES for field in rule.cures} <= set(LADDER["dense"].as_dict())


def test_nothing_is_told_of_a_sound_step_nor_of_calls_on_a_gpu_or_in_a_long_step():
    assert causes(True) == causes(False) == []
    assert causes(True, calls=400.0) == causes(False, calls=400.0, step_us=1e4) == []


def test_a_sentence_tells_the_figures_that_it_comes_from():
    rest = HostFunction("218 other functions", 900.0, 300)  # is not named as the one that takes most
    functions = (*profile().functions, rest)
    for made, share, told in (
        (profile(True, rows=shares(0.29), calls=312.0), 0.71, ("idles 71 % of", "312 l", "at most 3.45×")),
        (profile(rows=shares(0.75), functions=functions), 0.25, ("in 25 % of a step", "time is `loop.slow`")),
        (profile(copied_share=0.5, copying="cat", allocated=42e6), 0.5, ("50 %", "`cat`", "42.0 MB", "5.00")),
        (profile(computed=34 * WORK.flops), 33 / 34, ("34.0 times",)),
        (profile(products=160.0), 7 / 8, ("160 products a step for 20 matrices", "at most 8.00×")),
        (profile(True, waits=5.0, waits_share=0.2), 0.2, ("5.00 times a step the host waits for the GPU",)),
    ):  # fmt: skip
        (finding,) = findings(made)
        assert finding.share == pytest.approx(share) and all(one in finding.sentence for one in told)


def test_the_cause_that_takes_most_comes_first():
    assert causes(False, rows=shares(0.6), copied_share=0.2, calls=260.0) == ["calls", "Python", "copies"]


TRIED = [
    (GPU, "paged", ["launch"], ["cuda_graph", "split_kv"]),
    (GPU, "cuda_graph", ["waits", "transfers"], ["reused_index_buffers", "resident_tables", "split_kv"]),
    (HERE, "dense", ["copies"], ["paged", "split_kv"]),
    (HERE, "paged", ["calls"], ["no_mask", "split_kv"]),
    (HERE, "autotune", ["Python"], ["mutable_block_info", "split_kv"]),  # from where it branched off
    (HERE, "split_kv", ["copies", "Python"], []),  # there is none above
    (HERE, None, ["copies"], ["split_kv"]),  # a custom recipe
]


@pytest.mark.parametrize(("device", "rung", "found", "tried"), TRIED)
def test_the_rungs_to_try_cure_the_causes_and_end_with_the_best(monkeypatch, device, rung, found, tried):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cures = {rule.cause: rule.cures for rule in RULES if (device is GPU) in rule.on}
    assert rungs_for(rung, [cures[cause] for cause in found], device) == tried
