"""Plans as rows: every recorded way and size has its cell, errors their signs."""

from __future__ import annotations

import pytest

from rosellm.lab.records.floors import Ceiling
from rosellm.lab.records.records import find
from rosellm.lab.scale import fitting, plan, tables
from rosellm.lab.scale.cluster import Failures, Fleet, Outcome
from rosellm.lab.scale.pairs import PairCheck
from rosellm.lab.scale.replica import Request
from rosellm.lab.scale.step_model import Achieved
from rosellm.lab.scale.sums import Sums
from rosellm.lab.scale.work import Cut
from rosellm.models.families.table import KNOWN_SHAPES

ACHIEVED = Achieved((12.0, 1.0, 0.25, 1.2, 4.0), (40.0, 1.1, 0.0, 1.6, 1.4, 0.0))
LLAMA = Cut(KNOWN_SHAPES["meta-llama/Llama-3.1-8B"], Ceiling(4.4e6, 7e8))


def test_a_way_that_was_not_measured_at_a_size_has_an_empty_cell() -> None:
    us = {"library": {"8": {"median": 20.0}, "64": {"median": 21.0}}, "one_shot": {"8": {"median": 5.0}}}
    rows = tables.sum_rows({"us": us})
    assert rows == [["µs", "8 KB", "64 KB"], ["library", 20.0, 21.0], ["one_shot", 5.0, None]]


def test_every_recorded_run_has_a_row_with_its_errors() -> None:
    runs = fitting.read_runs(find())
    rows = tables.step_rows(runs, fitting.check(runs))
    assert [row[:2] for row in rows] == [[run.model, run.workload] for run in runs]
    assert all(len(row) == len(tables.STEPS) for row in rows)
    assert all(row[-1] == "0%" or row[-1][0] in "+−" for row in rows)
    assert [line.split()[0] for line in tables.coefficients(ACHIEVED)] == ["decode", "prefill", "host"]


def test_a_pair_is_told_with_the_sign_of_its_error() -> None:
    (row,) = tables.pair_rows([PairCheck("m", "D1", "2 library", measured=2.0, planned=1.9)])
    assert row == ["m", "D1", "2 library", 2.0, 1.9, "−5%", "−5%"] and len(row) == len(tables.PAIRS)
    (row,) = tables.pair_rows([PairCheck("m", "D1", "2", measured=2.0, planned=1.8, alone=1.1)])
    assert row[-2:] == ["−10%", "−1%"]


@pytest.mark.parametrize("planned", [1.991, 2.0 - 1e-9, 2.0, 2.0 + 1e-9, 2.009])
def test_an_error_that_rounds_to_nothing_has_no_sign(planned) -> None:
    (row,) = tables.pair_rows([PairCheck("m", "D1", "2", measured=2.0, planned=planned)])
    assert row[-2] == "0%"


def test_a_host_is_cut_in_every_way_that_its_gpus_allow() -> None:
    rows = tables.layout_rows(LLAMA.on, ACHIEVED, Sums(2, (8192,), (5.0,)), 8, plan.Traffic())
    assert [row[0] for row in rows] == ["8 × 1", "4 × 2", "2 × 4", "1 × 8"]
    lone, served = ([row[i] for row in rows] for i in (1, 2))
    assert lone == sorted(lone, reverse=True) and lone[0] > 2 * lone[-1]
    assert served[0] == pytest.approx(8 * plan.capacity(Fleet(1, ALONE), plan.Traffic()), rel=1e-6)


ALONE = tables.StepModel(LLAMA, ACHIEVED)


def outcome(first: float, attempts: int = 1) -> Outcome:
    request = Request(0, 0.0, 10, 1, first=first, attempts=attempts)
    return Outcome([request], first + 1, 1.0, attempts - 1, 0)


def test_a_router_is_told_by_the_share_within_limits_and_by_waiting_times() -> None:
    row = tables.route_row("even", "own", outcome(0.1), plan.Limits(0.2, 1.0))
    assert row == ["even", "own", 100.0, 100, 100] and len(row) == len(tables.ROUTES)
    assert tables.route_row("even", "own", outcome(0.3), plan.Limits(0.2, 1.0))[2] == 0


def test_failures_are_told_with_the_share_of_time_that_a_replica_is_away() -> None:
    asked: list[Failures] = []

    def serve(failures: Failures) -> Outcome:
        asked.append(failures)
        return outcome(0.1, attempts=2)

    never, often = tables.failure_rows((float("inf"), 15.0), serve, load_s=5.0, together=8)
    assert never == ["never", 1, 0.0, 100.0, 100, 100] and often[0] == 15.0 and often[2] == 25.0
    assert [(one.mean_s, one.load_s, one.together) for one in asked] == [
        (float("inf"), 5.0, 8),
        (15.0, 5.0, 8),
    ]
