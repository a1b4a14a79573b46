"""The step of 64 rows at 500 cached tokens: what is measured, and how its aim is judged."""

from __future__ import annotations

import json
from argparse import Namespace
from statistics import median

import pytest

from rosellm.lab import measure
from rosellm.lab.records import long_step, recordings, step_records
from rosellm.lab.records.records import Results
from rosellm.lab.records.sizes import SIZES, positions_needed
from rosellm.lab.records.step_time import STRETCH, StepTimes, room, step_times
from tests.helpers import random_model


@pytest.mark.slow
def test_the_command_records_every_turn_and_their_median_is_read_back(tmp_path) -> None:
    given = ["--device=cpu", f"--output={tmp_path}", "--workloads=", "--experiments=step-64x500"]
    assert measure.main(given) == 0
    record = json.loads((tmp_path / "step-64x500.json").read_text())
    assert (record["model"], record["size"]) == ("rose-tiny", "small")
    figures = long_step.recorded(Results(tmp_path))
    assert (figures["batch"], figures["context"]) == (4, 96) and figures["aims_us"] == {}
    ((engine_turns,),) = figures["turns_us"].values()
    assert len(engine_turns) == 5 and min(engine_turns) > 0 and long_step.verdicts(figures) == []
    assert step_times(figures["turns_us"])["split_kv"].us == median(engine_turns)


@pytest.mark.parametrize(
    ("model", "aims"), [("gpt2", {"split_kv": 400.0}), ("Qwen/Qwen3-0.6B", {})], ids=["gpt2", "another"]
)
def test_at_full_size_64_equal_rows_have_500_tokens_in_the_middle_of_a_stretch(model, aims, monkeypatch):
    makers = {}

    def measured(given, **effort):
        makers.update(given)
        assert effort == SIZES["full"].effort
        return {rung: StepTimes(((1.0,),)) for rung in given}

    monkeypatch.setattr(step_records, "measure_steps", measured)
    monkeypatch.setattr(recordings, "_model", lambda _arguments: random_model(0))
    figures = recordings.EXPERIMENTS[long_step.NAME](Namespace(model=model, size=SIZES["full"]))
    assert {key: figures[key] for key in ("batch", "context", "aims_us")} == {
        "batch": 64,
        "context": 500,
        "aims_us": aims,
    }
    (maker,) = makers.values()
    _, rung, prompts, new_tokens = maker.args
    assert rung == "split_kv" and {len(prompt) + STRETCH // 2 for prompt in prompts} == {500}
    assert len(prompts) == 64 and new_tokens == room()
    assert positions_needed(SIZES["full"])[long_step.NAME] == len(prompts[0]) + new_tokens


def test_its_aim_is_kept_by_a_median_of_at_most_400_us(tmp_path) -> None:
    assert long_step.recorded(Results(tmp_path)) == {} and long_step.verdicts({}) == []
    for us, is_kept in ((399.0, True), (400.0, True), (401.0, False)):
        turns = {"split_kv": [[us, 1.0, 900.0], [us], [9000.0]]}
        figures = {"batch": 64, "context": 500, "aims_us": long_step.AIMS_US, "turns_us": turns}
        (found,) = long_step.verdicts(figures)
        assert found == ("step of 64 × 500, split_kv", 400.0, us, "µs") and found.is_kept == is_kept
