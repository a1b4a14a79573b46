"""The fit finds what a device achieves, and a model that it has not seen is planned without its records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rosellm.lab.records.records import find
from rosellm.lab.scale.fitting import KINDS, Run, check, fit, planned_us, read_runs, worst
from rosellm.lab.scale.step_model import Achieved

KNOWN = Achieved((11.0, 1.05, 0.2, 1.15, 4.0), (38.0, 1.1, 0.1, 1.6, 1.4, 12.0), 190.0)


@pytest.fixture(scope="module")
def recorded() -> list[Run]:
    return read_runs(find())


def made_up(run: Run) -> Run:
    """As it would have been recorded of a device that achieves what is ``KNOWN``."""
    decode, prefill, whole = planned_us(run, KNOWN)
    steps = run.medians["decode_steps"]
    figures = {
        "decode_time_s": decode * steps / 1e6,
        "prefill_time_s": prefill / 1e6,
        "total_time_s": whole / 1e6,
    }
    return replace(run, medians=run.medians | figures)


@pytest.mark.slow
def test_known_coefficients_are_found_again_and_leave_no_error(recorded) -> None:
    runs = [made_up(run) for run in recorded]
    found = fit(runs)
    assert found.decode == pytest.approx(KNOWN.decode) and found.prefill == pytest.approx(KNOWN.prefill)
    assert found.host_us == pytest.approx(KNOWN.host_us)
    checks = check(runs)
    for kind in KINDS:
        assert worst(checks, kind) < 1e-6 and worst(checks, kind, held_out=True) < 1e-6


@pytest.mark.slow
def test_a_held_out_model_is_planned_without_its_own_records(recorded) -> None:
    model = recorded[0].model
    slower = [
        replace(run, medians=run.medians | {"decode_time_s": 3 * run.medians["decode_time_s"]})
        if run.model == model
        else run
        for run in recorded
    ]
    before, after = ([one for one in check(runs) if one.model == model] for runs in (recorded, slower))
    assert [one.held_out for one in before] == [one.held_out for one in after]
    assert [one.planned for one in before] != [one.planned for one in after]


def test_each_recorded_run_is_checked_as_a_step_as_prefills_and_as_a_whole(recorded) -> None:
    checks = check(recorded)
    assert {one.kind for one in checks if one.workload == "D64"} == set(KINDS)
    assert {one.kind for one in checks if one.workload == "PRE"} == {"prefill", "whole run"}
    assert all(one.measured > 0 and one.planned > 0 for one in checks)
    long = next(run for run in recorded if run.workload == "L32K")
    assert long.requests[0].prompt_tokens == 32000 and long.rows == 1


def test_what_notebook_37_says_of_the_recorded_gpus_errors_holds(recorded) -> None:
    """Every decode step and every whole run within 10 %."""
    checks = check(recorded)
    assert worst(checks, "decode step") <= 0.10 and worst(checks, "whole run") <= 0.10
