"""The calls that notebooks of a rung are made of."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch

from rosellm.errors import RecipeError
from rosellm.lab.records.parameters import ParameterError
from rosellm.lab.records.records import RecordError, Results, results_folder
from rosellm.lab.records.step_time import StepTimes
from rosellm.lab.rung import Rung, exercise, open_rung


@pytest.fixture(scope="module")
def rung() -> Rung:
    return open_rung("cuda_graph", device="cpu", batch=3, prompt_lengths=[2, 9], new_tokens=8)


def test_a_rung_is_compared_with_the_one_it_changes(rung):
    assert (rung.before, rung.after) == ("pinned_h2d", "cuda_graph")
    assert rung.change == {"runner": ("eager", "graph")}
    assert open_rung("identity_pos", "triton_append", device="cpu").change["append"] == (
        "generic",
        "identity_pos",
    )
    assert 1e6 / 4.8 < rung.read_us(1e12) < 1e6 / 4.2  # TB/s: by the GPU's maker, and of a copy


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("nothing", {}, RecipeError, "unknown"),
        ("paged", {"new_tokens": 4, "least_new_tokens": 5}, ParameterError, "new_tokens is 4; .* 5 or more"),
        ("paged", {"batch": 0}, ParameterError, "batch is 0"),
        ("paged", {"record": "abacus"}, RecordError, "no records of device"),
    ],
)
def test_unknown_rungs_and_parameters_out_of_range_are_refused(name, options, error, words):
    with pytest.raises(error, match=words):
        open_rung(name, device="cpu", **options)


def test_a_step_is_the_median_of_its_engines_medians():
    times = StepTimes(((1.0, 2.0, 9.0), (4.0, 4.0, 4.0), (3.0, 3.0, 50.0)))
    assert times.us == 3.0 and times.range_us == times.spread_us == (2.0, 4.0)
    assert StepTimes(((4.0, 2.0, 9.0),)).spread_us == (2.0, 9.0)


def test_missing_and_disturbed_ledgers_are_refused_and_not_drawn(rung, tmp_path, monkeypatch):
    assert rung.ledger(64).name == "cuda_graph" and rung.ledger_before(64).name == "pinned_h2d"
    with pytest.raises(RecordError, match="ledger of nvidia-h200 has no '7': it has 1, 8, 64, 256"):
        rung.ledger(7)
    record = rung.results.load("ledger")
    for rungs in record["figures"].values():
        rungs["cuda_graph"]["busy_us"] = 1e9
    (tmp_path / "ledger.json").write_text(json.dumps(record))
    shown = []
    monkeypatch.setattr("rosellm.lab.recorded.say", shown.append)
    disturbed = replace(rung, results=Results(tmp_path))
    disturbed.waterfall()
    assert "disturbed every recorded ledger" in shown[0]
    with pytest.raises(RecordError, match="disturbed the ledger of cuda_graph at batch 8"):
        disturbed.ledger(8)


def test_an_exercise_waits_is_right_or_is_not_yet(capsys):
    def double(n):
        """Twice n."""
        ...

    for answer in (double, lambda n: n * 2, lambda n: n + 1):
        exercise(answer, lambda f: f(2) == 4)
    exercise(lambda n: n, lambda f: f(2) == 4 or f"2 gives {f(2)}, expected 4")
    exercise(lambda n: None, lambda f: max(f(2)) == 4)
    assert [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()] == [
        "yours to write", "right", "not yet right", "not yet right: 2 gives 2, expected 4",
        "not yet right: the check ends with TypeError(\"'NoneType' object is not iterable\")",
    ]  # fmt: skip


TENSOR = torch.tensor([1, 2])
CASES = [((1, 2), [1, 2]), ((3, 4.5), [3, 4.5])]


@pytest.mark.parametrize(
    ("answer", "cases", "told"),
    [
        (lambda a, b: (a, float(b)), CASES, "right"),
        (lambda a, b: [a], CASES, "not yet right: <lambda>(1, 2) → [1], expected [1, 2]"),
        (lambda a, b: [1, 2], CASES, "not yet right: <lambda>(3, 4.5) → [1, 2], expected [3, 4.5]"),
        (lambda a, b: a, CASES, "not yet right: <lambda>(1, 2) → 1, expected [1, 2]"),
        (lambda a: a, CASES, "not yet right: <lambda>(1, 2) raises TypeError"),
        (lambda: TENSOR.clone(), [((), TENSOR)], "right"),
        (lambda: TENSOR[None], [((), TENSOR)], "not yet right"),
        (lambda: [1, 2], [((), TENSOR)], "not yet right"),
        (lambda: torch.tensor(0.5), [((), 0.5)], "right"),
        (lambda: TENSOR, [((), 1)], "not yet right: <lambda>() → tensor([1, 2]), expected 1"),
        (lambda n: 1.0, [((math.sqrt,), 2.0)], "not yet right: <lambda>(sqrt) → 1, expected 2"),
    ],
)
def test_an_exercise_names_the_first_case_that_fails(answer, cases, told, capsys):
    exercise(answer, cases=cases)
    assert capsys.readouterr().out.removeprefix("<lambda>: ").startswith(told)


def test_every_figure_of_a_data_flow_is_shown_by_a_notebook_and_described(rung, monkeypatch):
    folder = results_folder().parent
    sources = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.ipynb"))
    shown = set(re.findall(r'(?:open_rung|\.flow)\(\\"(\w+)\\"', sources))
    flows = {path.stem for path in folder.glob("flows/*.svg")}
    assert flows and flows <= shown
    displayed = []
    monkeypatch.setattr("rosellm.lab.rung.display", lambda data, raw: displayed.append(data))
    for name in flows:
        rung.flow(name)
    for data in displayed:
        assert len(data["text/plain"].splitlines()) > 2 and "<script" not in data["image/svg+xml"]
    with pytest.raises(RecordError, match="flows/nothing.svg"):
        rung.flow("nothing")
