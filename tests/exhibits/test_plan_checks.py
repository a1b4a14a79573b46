"""Plans of recorded runs, on one GPU and on two, and the tables of their errors."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rosellm.bench.workloads import MODEL_WORKLOADS, WORKLOADS
from rosellm.lab.records.records import Results, find
from rosellm.lab.scale.fitting import KINDS, Run, read_runs
from rosellm.lab.scale.step_model import Achieved
from rosellm.models.families.table import KNOWN_SHAPES, write_arch
from rosellm.roseinfer.exhibits import load_exhibit

plan_checks = load_exhibit("plan_checks")
ACHIEVED = Achieved((12.0, 1.0, 0.25, 1.2, 4.0), (40.0, 1.1, 0.0, 1.6, 1.4, 0.0))


@pytest.fixture(scope="module")
def recorded() -> list[Run]:
    return read_runs(find())


def test_a_model_that_was_not_fitted_is_planned_without_its_own_records(recorded) -> None:
    model = recorded[0].model
    slower = [
        replace(run, measured_us=(3 * run.measured_us[0], *run.measured_us[1:]))
        if run.model == model
        else run
        for run in recorded
    ]
    before, after = (
        [one for one in plan_checks.check(runs) if one.model == model] for runs in (recorded, slower)
    )
    assert [one.other for one in before] == [one.other for one in after]
    assert [one.planned for one in before] != [one.planned for one in after]


def test_each_recorded_run_is_checked_and_has_a_row_with_its_errors(recorded) -> None:
    checks = plan_checks.check(recorded)
    assert {one.what for one in checks if one.workload == "D64"} == set(KINDS)
    assert {one.what for one in checks if one.workload == "PRE"} == {"prefill", "whole run"}
    assert plan_checks.worst(checks, "decode step") <= 0.10 and plan_checks.worst(checks, "whole run") <= 0.10
    rows = plan_checks.run_rows(checks)
    assert [row[:2] for row in rows] == [[run.model, run.workload] for run in recorded]
    assert all(len(row) == len(plan_checks.RUNS) and row[-1].endswith("%") for row in rows)


def took(seconds: float) -> dict:
    return {"medians": {"total_time_s": seconds}}


@pytest.fixture()
def device(tmp_path: Path) -> Results:
    """A device with its ceilings, and the records of a pair."""
    results, pair = Results(tmp_path / "gpu"), tmp_path / "gpu-x2"
    results.folder.mkdir()
    folder = pair / "Llama-3.1-8B"
    folder.mkdir(parents=True)
    shutil.copy(find().folder / "ceilings.json", results.folder)
    flat = {str(kb): {"median": us} for kb, us in ((8, 2.0), (131072, 2.0))}
    sums = {str(kb): {"median": us} for kb, us in ((8, 12.0), (131072, 400.0))}
    figures = {"ranks": 2, "us": {"none": flat, "library": sums}}
    (pair / "all_reduce.json").write_text(json.dumps({"figures": figures}))
    shape = write_arch(KNOWN_SHAPES["meta-llama/Llama-3.1-8B"])
    shared = {"1": took(1.0), "2 library": took(1.0), "2 one_shot": took(1.0)}
    apart = {"1": took(1.0), "2": took(1.0)}
    runs = (("tensor_parallel", MODEL_WORKLOADS["D1"], shared), ("replicas", WORKLOADS["W8"], apart))
    for kind, workload, sides in runs:
        facts = {"workload": workload.id, "flags": workload.flags(), "figures": sides}
        (folder / f"{kind}-{workload.id}.json").write_text(json.dumps({"model_shape": shape, **facts}))
    return results


def test_each_recorded_side_is_planned_but_for_ways_to_sum_that_are_not_recorded(device) -> None:
    checks = plan_checks.pair_checks(device, ACHIEVED)
    planned = {(one.workload, one.what): one.planned for one in checks}
    assert set(planned) == {("D1", "1"), ("D1", "2 library"), ("W8", "1"), ("W8", "2")}
    weights_s = 512 * 2 * 7.5e9 / 4.47e12  # a step reads them all; two ranks half of them each
    assert planned["D1", "1"] == pytest.approx(weights_s, rel=0.2)
    sums_s = 512 * 65 * 10e-6
    assert planned["D1", "2 library"] == pytest.approx(weights_s / 2 + sums_s, rel=0.25)
    assert 1.5 < planned["W8", "1"] / planned["W8", "2"] < 2
    one, two, *_ = checks
    assert one.error == pytest.approx(one.planned - 1.0) and one.other_error == pytest.approx(0.0)
    assert two.other_error == pytest.approx(two.planned / one.planned - 1)
