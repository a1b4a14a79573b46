"""Runs on two GPUs are planned from the same coefficients, and the recorded sums over ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rosellm.bench.workloads import MODEL_WORKLOADS, WORKLOADS
from rosellm.lab.records.records import Results, find
from rosellm.lab.scale.pairs import pair_checks
from rosellm.lab.scale.step_model import Achieved
from rosellm.models.families.table import KNOWN_SHAPES, write_arch

ACHIEVED = Achieved((12.0, 1.0, 0.25, 1.2, 4.0), (40.0, 1.1, 0.0, 1.6, 1.4, 0.0))


def took(seconds: float) -> dict:
    return {"medians": {"total_time_s": seconds}}


@pytest.fixture()
def alone(tmp_path: Path) -> Results:
    """A device with its ceilings, and the records of a pair."""
    results, pair = Results(tmp_path / "gpu"), tmp_path / "gpu-x2"
    results.folder.mkdir()
    folder = pair / "Llama-3.1-8B"
    folder.mkdir(parents=True)
    shutil.copy(find().folder / "ceilings.json", results.folder)
    flat = {str(kb): {"median": us} for kb, us in ((8, 2.0), (131072, 2.0))}
    sums = {str(kb): {"median": us} for kb, us in ((8, 12.0), (131072, 400.0))}
    (pair / "all_reduce.json").write_text(
        json.dumps({"figures": {"ranks": 2, "us": {"none": flat, "library": sums}}})
    )
    shape = write_arch(KNOWN_SHAPES["meta-llama/Llama-3.1-8B"])
    shared = {"1": took(1.0), "2 library": took(1.0), "2 one_shot": took(1.0)}
    apart = {"1": took(1.0), "2": took(1.0)}
    runs = (("tensor_parallel", MODEL_WORKLOADS["D1"], shared), ("replicas", WORKLOADS["W8"], apart))
    for kind, workload, sides in runs:
        facts = {"workload": workload.id, "flags": workload.flags(), "figures": sides}
        (folder / f"{kind}-{workload.id}.json").write_text(json.dumps({"model_shape": shape, **facts}))
    return results


def test_each_recorded_side_is_planned_but_for_ways_to_sum_that_are_not_recorded(alone) -> None:
    planned = {(one.workload, one.side): one.planned for one in pair_checks(alone, ACHIEVED)}
    assert set(planned) == {("D1", "1"), ("D1", "2 library"), ("W8", "1"), ("W8", "2")}
    weights_s = 512 * 2 * 7.5e9 / 4.47e12  # a step reads them all; two ranks half of them each
    assert planned["D1", "1"] == pytest.approx(weights_s, rel=0.2)
    sums_s = 512 * 65 * 10e-6
    assert planned["D1", "2 library"] == pytest.approx(weights_s / 2 + sums_s, rel=0.25)
    assert 1.5 < planned["W8", "1"] / planned["W8", "2"] < 2


def test_the_error_is_of_the_measured_time(alone) -> None:
    one, two, *_ = pair_checks(alone, ACHIEVED)
    assert one.error_beyond_one == pytest.approx(0.0)
    assert two.error_beyond_one == pytest.approx(two.planned / one.planned - 1)
    assert one.error == pytest.approx(one.planned - 1.0) and one.model == "Llama-3.1-8B"


def test_without_records_of_a_pair_nothing_is_checked(alone) -> None:
    shutil.rmtree(alone.folder.with_name("gpu-x2"))
    assert pair_checks(alone, ACHIEVED) == []
