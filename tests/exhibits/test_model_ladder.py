"""What is read of modern models' recorded ladders and ledgers, and predicted from GPT-2's."""

import json
from dataclasses import replace

import pytest

from rosellm.bench.workloads import MODEL_WORKLOADS, WORKLOADS
from rosellm.lab.records.records import RecordError, Results, find, floor_us, modern_rivals
from rosellm.lab.records.step_time import step_shape
from rosellm.models.families.table import KNOWN_SHAPES
from rosellm.roseinfer.exhibits import load_exhibit
from tests.ledgers import ROWS, ledger_of

ladder = load_exhibit("model_ladder")
MODEL, RESULTS, QWEN = "Qwen3-0.6B", find(), KNOWN_SHAPES["Qwen/Qwen3-0.6B"]


@pytest.mark.parametrize(("modern", "twin"), ladder.TWINS.items())
def test_gpt2_predicts_the_twin_of_a_workload_but_for_one_token_of_its_floor(modern, twin):
    assert step_shape(MODEL_WORKLOADS[modern]) == step_shape(WORKLOADS[twin])
    least = floor_us(RESULTS, twin)
    apart = ladder.step_floor_us(RESULTS, ladder.GPT2, modern) - least
    assert abs(apart) < 0.01 * least
    expected = {rung: us + apart for rung, us in ladder.gpt2_ladder(RESULTS, modern).items()}
    assert ladder.foretold_ladder(RESULTS, ladder.GPT2, modern) == pytest.approx(expected)


def test_twice_the_layers_take_twice_the_time_above_the_floor_on_rungs_that_run_the_model():
    shapes = [replace(QWEN, n_layers=n) for n in (28, 56)]
    once, twice = (ladder.foretold_ladder(RESULTS, shape, "D1") for shape in shapes)
    floors = [ladder.step_floor_us(RESULTS, shape, "D1") for shape in shapes]
    for rung in once:
        assert twice[rung] - floors[1] == pytest.approx(2 * (once[rung] - floors[0]))
    assert ladder.gpt2_ladder(RESULTS, "D1").keys() - once.keys() == {"persistent_kernel"}


def test_a_missing_record_is_refused_with_the_command_that_makes_it(tmp_path):
    with pytest.raises(RecordError, match="measure steps-D1 --model Qwen/Qwen3-0.6B"):
        ladder.recorded_ladder(Results(tmp_path), MODEL, "D1")
    with pytest.raises(RecordError, match="measure ledgers --model Qwen/Qwen3-0.6B"):
        ladder.recorded_ledgers(Results(tmp_path), MODEL)


def test_what_a_layer_takes_above_the_floor_counts_from_the_same_floor_for_both_engines():
    ours, theirs = ladder.rest_a_layer(RESULTS, MODEL, QWEN, "D1")
    step = ladder.mean_step_us(RESULTS, MODEL, "D1")
    assert (theirs - ours) * 28 == pytest.approx(1e6 / modern_rivals(MODEL)[ladder.RIVAL]["D1"] - step)
    assert ours * 28 + ladder.step_floor_us(RESULTS, QWEN, "D1") == pytest.approx(step)
    with pytest.raises(RecordError, match="no D1 of vLLM .* with gpt2"):
        ladder.rest_a_layer(RESULTS, "gpt2", ladder.GPT2, "D1")


def test_a_recorded_ladder_has_median_steps_in_order_and_disturbed_ledgers_are_left_out(tmp_path):
    both = {"D1": ledger_of(ROWS), "D8": ledger_of(ROWS, busy_us=200.0)}
    (tmp_path / MODEL).mkdir()
    for name, figures in (
        ("ledgers", {workload: one.as_dict() for workload, one in both.items()}),
        ("steps-D1", {"turns_us": {"paged": [[5.0, 6.0, 9.0]], "dense": [[8.0, 7.0]]}}),
    ):
        (tmp_path / MODEL / f"{name}.json").write_text(json.dumps({"figures": figures}))
    assert list(ladder.recorded_ledgers(Results(tmp_path), MODEL)) == ["D1"]
    found = ladder.recorded_ladder(Results(tmp_path), MODEL, "D1")
    assert list(found.items()) == [("dense", 7.5), ("paged", 6.0)]
