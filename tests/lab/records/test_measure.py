"""The command that makes the committed records."""

import json

import pytest

from rosellm.lab.records import measure

SMALL = ["--device", "cpu", "--load-format", "auto", "--model", "rose-tiny"]


def test_unknown_workloads_rungs_and_experiments_are_told_before_anything_runs(tmp_path, capsys):
    for option, known in (("--workloads", "W0"), ("--rungs", "dense"), ("--experiments", "counts")):
        assert measure.main([*SMALL, "--output", str(tmp_path / "out"), option, "W99"]) == 2
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and "W99" in message and known in message
    assert not (tmp_path / "out").exists()


def test_an_experiment_is_recorded_with_its_figures_and_environment(tmp_path):
    arguments = [*SMALL, "--output", str(tmp_path), "--workloads", "", "--experiments", "bookkeeping"]
    assert measure.main(arguments) == 0
    record = json.loads((tmp_path / "bookkeeping.json").read_text())
    assert record["kind"] == "bookkeeping" and record["environment"]["device_name"]
    assert set(record["figures"]["8"]) == {"tuple", "slots"}


@pytest.mark.gpu
def test_a_workload_is_recorded_on_a_gpu(tmp_path):
    arguments = [
        "--output",
        str(tmp_path),
        "--workloads",
        "W1",
        "--rungs",
        "reused_index_buffers",
        "--experiments",
        "",
    ]
    assert measure.main(arguments) == 0
    record = json.loads((tmp_path / "W1-reused_index_buffers.json").read_text())
    assert len(record["results"]["online"]["repeats"]) == 3
