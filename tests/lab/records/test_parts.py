"""A record's file and a run that measures some of its parts."""

import json

import pytest

from rosellm.lab.records.experiment import Asked, in_parts, kept_parts
from rosellm.lab.records.records import RecordError
from rosellm.lab.records.sizes import SMALL

ENVIRONMENT = {"device_name": "GPU", "git_commit": "abc", "time_utc": "2026-01-01T00:00:00"}
BEGUN = {"kind": "ledgers", "model": "gpt2", "figures": {}, "environment": ENVIRONMENT}


@pytest.fixture
def path(tmp_path):
    """A record of D1 and D8."""
    path = tmp_path / "ledgers.json"
    path.write_text(json.dumps(BEGUN | {"figures": {"D1": 1, "D8": 8}}))
    return path


def another(**facts: str) -> dict:
    return BEGUN | {"environment": ENVIRONMENT | facts}


def test_parts_of_the_same_model_device_and_commit_are_kept_whatever_the_time(path):
    later = another(time_utc="2026-02-02T00:00:00")
    assert kept_parts(path, later, ["D8"]) == kept_parts(path, later, []) == {"D1": 1, "D8": 8}


def test_a_part_measured_alone_is_put_in_order_among_the_others(path):
    asked = Asked("gpt2", "auto", "cpu", SMALL, path.parent)
    (record,) = in_parts(asked, BEGUN, {"D4": lambda: 4, "D2": lambda: None}, order=["D1", "D4", "D8"].index)
    assert list(record["figures"].items()) == [("D1", 1), ("D4", 4), ("D8", 8)]


@pytest.mark.parametrize(
    ("today", "told"),
    [
        (another(git_commit="def"), "another git_commit"),
        (another(device_name="CPU"), "another device_name"),
        (another(host="one", lease="two"), "another host and lease"),
        (another() | {"model": "Qwen3"}, "another model"),
        (another(git_commit="def") | {"model": "Qwen3"}, "another model and git_commit"),
    ],
)
def test_parts_of_another_are_not_taken_over_and_losing_them_is_refused_in_a_line(path, today, told):
    with pytest.raises(RecordError) as error:
        kept_parts(path, today, ["D8", "D64"])
    said = str(error.value)
    assert said.startswith(f"{path} would lose D1, measured with {told}: ") and "\n" not in said


def test_a_run_that_measures_all_of_them_anew_or_none_of_them_is_not_refused(path):
    assert kept_parts(path, another(git_commit="def"), ["D8", "D1"]) == {}
    assert kept_parts(path, another(git_commit="def"), []) == {}


def test_figures_beside_the_parts_must_be_alike_too(tmp_path):
    path, figures = tmp_path / "steps.json", {"context": 256, "sizes": (1, 2), "turns_us": {}}
    path.write_text(json.dumps(BEGUN | {"figures": figures | {"turns_us": {"dense": [[1.0]]}}}))
    assert kept_parts(path, BEGUN | {"figures": figures}, [], "turns_us") == {"dense": [[1.0]]}
    assert kept_parts(path, BEGUN | {"figures": figures | {"context": 4}}, [], "turns_us") == {}
