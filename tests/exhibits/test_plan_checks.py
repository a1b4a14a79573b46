"""Plans of recorded runs, and the table of their errors."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from rosellm.lab.records import all_reduce
from rosellm.lab.records.records import find
from rosellm.roseinfer.exhibits import load_exhibit

plan_checks = load_exhibit("plan_checks")
KNOWN = plan_checks.Achieved((11.0, 1.05, 0.2, 1.15, 4.0), (38.0, 1.1, 0.1, 1.6, 1.4, 12.0), 190.0)


@pytest.fixture(scope="module")
def recorded() -> list:
    return plan_checks.read_runs(find())


def test_a_model_that_was_not_fitted_is_planned_without_its_own_records(recorded) -> None:
    model, other, *_ = dict.fromkeys(run.model for run in recorded)
    some = [run for run in recorded if run.model in (model, other)]
    slower = [
        replace(run, measured_us=tuple(us * (3 if run.model == model else 1) for us in run.measured_us))
        for run in some
    ]
    before, after = (
        [one for one in plan_checks.check(runs) if one.model == model] for runs in (some, slower)
    )
    assert [one.other for one in before] == [one.other for one in after]
    assert [one.planned for one in before] != [one.planned for one in after]


def test_known_coefficients_are_found_again(recorded) -> None:
    assert next(run for run in recorded if run.workload == "L32K").requests[0].prompt_tokens == 32000
    found = plan_checks.fit(replace(run, measured_us=run.planned_us(KNOWN)) for run in recorded)
    assert found.decode == pytest.approx(KNOWN.decode) and found.prefill == pytest.approx(KNOWN.prefill)
    assert found.host_us == pytest.approx(KNOWN.host_us)


def test_planned_hosts_start_from_one_gpu_and_gain_less_than_they_have_gpus(recorded):
    sums = load_exhibit("planned_steps").read_sums(all_reduce.recorded(find()))
    achieved = plan_checks.fit(recorded)
    rows = plan_checks.host_rows(recorded, achieved, sums)
    (one,) = (run for run in recorded if (run.model, run.workload) == ("Llama-3.1-8B", "D1"))
    lone = {row[0]: row[3] for row in rows if row[1] == "D1"}
    assert lone["Llama-3.1-8B"] == pytest.approx(512e6 / one.planned_us(achieved)[2])
    assert [row[3] for row in rows if row[0] == "Llama-3.1-70B"] == [None] * 4
    assert all(all(row[4:]) for row in rows)
    rates = [[rate for rate in row[3:] if rate] for row in rows]
    assert all(few < more < 2 * few for each in rates for few, more in pairwise(each))
