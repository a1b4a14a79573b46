"""What is read of modern models' recorded ladders and ledgers, and foretold from GPT-2's."""

import json
from dataclasses import replace
from functools import partial

import pytest

from rosellm.bench.workloads import MODEL_WORKLOADS, WORKLOADS
from rosellm.lab.records.account import Row
from rosellm.lab.records.model_ladder import (
    GPT2,
    TWINS,
    by_role,
    foretold_ladder,
    gpt2_ladder,
    mean_step_us,
    recorded_ladder,
    recorded_ledgers,
    rest_a_layer,
    step_floor_us,
)
from rosellm.lab.records.model_runs import RIVAL
from rosellm.lab.records.records import RecordError, Results, find, floor_us, modern_rivals
from rosellm.lab.records.step_records import step_shape
from rosellm.models.families.table import KNOWN_SHAPES
from tests.ledgers import ROWS, ledger_of

RESULTS, QWEN = find(), KNOWN_SHAPES["Qwen/Qwen3-0.6B"]


def results_with(tmp_path, name: str, figures: dict) -> Results:
    folder = tmp_path / "Qwen3-0.6B"
    folder.mkdir()
    (folder / f"{name}.json").write_text(json.dumps({"figures": figures}))
    return Results(tmp_path)


@pytest.mark.parametrize(("modern", "twin"), TWINS.items())
def test_a_workload_and_its_twin_decode_the_same_batch_and_context(modern, twin):
    assert step_shape(MODEL_WORKLOADS[modern]) == step_shape(WORKLOADS[twin])


@pytest.mark.parametrize("workload", TWINS)
def test_gpt2_foretells_itself_but_for_one_token_of_its_floor(workload):
    apart = step_floor_us(RESULTS, GPT2, workload) - floor_us(RESULTS, TWINS[workload])
    assert abs(apart) < 0.01 * floor_us(RESULTS, TWINS[workload])
    expected = {rung: us + apart for rung, us in gpt2_ladder(RESULTS, workload).items()}
    assert foretold_ladder(RESULTS, GPT2, workload) == pytest.approx(expected)


def test_nothing_is_foretold_of_a_rung_that_cannot_run_the_model():
    missing = gpt2_ladder(RESULTS, "D1").keys() - foretold_ladder(RESULTS, QWEN, "D1").keys()
    assert missing == {"persistent_kernel"}


def test_twice_the_layers_take_twice_the_time_above_the_floor():
    once, twice = (foretold_ladder(RESULTS, replace(QWEN, n_layers=n), "D1") for n in (28, 56))
    floors = [step_floor_us(RESULTS, replace(QWEN, n_layers=n), "D1") for n in (28, 56)]
    for rung in once:
        assert twice[rung] - floors[1] == pytest.approx(2 * (once[rung] - floors[0]))


def test_a_recorded_ladder_has_the_median_step_of_each_rung_in_order(tmp_path):
    turns = {"paged": [[5.0, 6.0, 9.0]], "dense": [[8.0, 7.0]]}
    results = results_with(tmp_path, "steps-D1", {"turns_us": turns})
    assert list(recorded_ladder(results, "Qwen3-0.6B", "D1").items()) == [("dense", 7.5), ("paged", 6.0)]


@pytest.mark.parametrize(
    ("read", "option"),
    [(partial(recorded_ladder, workload="D1"), "--ladder D1"), (recorded_ledgers, "--ledgers D1,D8")],
    ids=["ladder", "ledgers"],
)
def test_a_missing_record_is_told_with_the_command_that_makes_it(read, option, tmp_path):
    with pytest.raises(RecordError, match=f"--model Qwen/Qwen3-0.6B --workloads '' {option}") as caught:
        read(Results(tmp_path), "Qwen3-0.6B")
    assert "\n" not in str(caught.value)


def test_what_a_layer_takes_above_the_floor_is_of_both_engines_the_same_floor():
    ours, theirs = rest_a_layer(RESULTS, "Qwen3-0.6B", QWEN, "D1")
    apart = 1e6 / modern_rivals("Qwen3-0.6B")[RIVAL]["D1"] - mean_step_us(RESULTS, "Qwen3-0.6B", "D1")
    assert (theirs - ours) * 28 == pytest.approx(apart)
    least = step_floor_us(RESULTS, QWEN, "D1")
    assert ours * 28 + least == pytest.approx(mean_step_us(RESULTS, "Qwen3-0.6B", "D1"))


def test_nothing_is_told_of_a_rival_that_was_not_measured():
    with pytest.raises(RecordError, match="no D1 of vLLM .* with gpt2 is recorded"):
        rest_a_layer(RESULTS, "gpt2", GPT2, "D1")


def test_disturbed_ledgers_are_left_out(tmp_path):
    both = {"D1": ledger_of(ROWS), "D8": ledger_of(ROWS, busy_us=200.0)}
    results = results_with(tmp_path, "ledgers", {name: one.as_dict() for name, one in both.items()})
    assert list(recorded_ledgers(results, "Qwen3-0.6B")) == ["D1"]


def test_roles_add_up_to_the_step_and_their_floors_to_its_floor():
    rows = (*ROWS, Row("append", "work", 3.0, 0.03, 1, 2.0), Row("attention", "work", 4.0, 0.04, 1, 1.0))
    roles = by_role(ledger_of(rows))
    assert list(roles) == ["GEMM", "head", "attention", "other work", "idle"]
    assert roles["attention"] == (7.0, 3.0) and roles["idle"] == (25.0, None)
    assert sum(time.us for time in roles.values()) == sum(row.us for row in rows)
    assert sum(time.floor_us or 0 for time in roles.values()) == ledger_of(rows).floor_us
