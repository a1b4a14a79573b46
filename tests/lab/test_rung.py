"""The calls that notebooks of a rung are made of."""

import json
import re
from dataclasses import replace

import pytest
import torch

from rosellm.errors import RecipeError
from rosellm.lab.recorded import MIXED_LEDGERS
from rosellm.lab.records.parameters import ParameterError
from rosellm.lab.records.records import RecordError, Results, results_folder
from rosellm.lab.records.step_time import StepTimes
from rosellm.lab.rung import ClaimError, Rung, exercise, open_rung


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


def test_a_sentence_is_shown_only_while_its_claims_hold(rung):
    rung.conclude("Graphs gain.", rung.gain("W1") > 0)
    with pytest.raises(ClaimError, match=r"claim \[2\].*Graphs lose"):
        rung.conclude("Graphs lose.", rung.gain("W1") > 0, rung.gain("W1") < 0)
    with pytest.raises(ClaimError, match="no claim was given"):
        rung.conclude("Nothing to rest on.")


def test_a_prediction_stands_beside_the_recorded_steps(rung, capsys):
    rung.predict(W2=1000.0)
    assert "1,000" in capsys.readouterr().out
    rung.outcome()
    old, new = rung.step_us("W2")
    said = capsys.readouterr().out
    assert f"{old.us - new.us:,.0f}" in said
    assert f"{min(old.range_us) - max(new.range_us):,.0f} to" in said
    before, after = rung.whole_run_us("W2")
    assert before == pytest.approx(64 / rung.results.value("W2", "pinned_h2d") * 1e6)
    assert f"{before - after:,.0f}" in said and "in another session" in said


def test_a_step_is_the_median_of_its_engines_medians():
    times = StepTimes(((1.0, 2.0, 9.0), (4.0, 4.0, 4.0), (3.0, 3.0, 50.0)))
    assert times.us == 3.0 and times.range_us == times.spread_us == (2.0, 4.0)
    assert StepTimes(((4.0, 2.0, 9.0),)).spread_us == (2.0, 9.0)


def test_an_ablation_shows_what_lies_between_two_rungs(capsys):
    open_rung("fused_head", device="cpu").ablation()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == ["fused_gelu", "vocabulary padded", "fused_head"]


@pytest.mark.parametrize(("after", "apart"), [("reused_index_buffers", True), ("cuda_graph", False)])
def test_a_verdict_names_the_workloads_that_have_no_session_in_common(after, apart, capsys):
    open_rung(after).verdict()
    assert ("W0 W1 W2 W3 W4 W5: recorded in different sessions" in capsys.readouterr().out) == apart


def test_tokens_are_compared_in_fp32_whatever_the_notebook_runs(rung, capsys):
    rung.tokens_equal()
    said = capsys.readouterr().out
    assert "fp32, here: pinned_h2d and cuda_graph generate the same 3 × 8 tokens\n" in said
    assert ("this compares the host's code only" in said) != torch.cuda.is_available()


@pytest.mark.slow
def test_rungs_are_compared_at_few_new_tokens_if_the_positions_have_room_to_time_them(capsys):
    few = open_rung("resident_step", device="cpu", batch=2, prompt_lengths=[2, 9], new_tokens=1)
    few.compare()
    assert few.runs[0].tokens == few.runs[1].tokens
    assert {len(row) for row in few.runs[0].tokens} == {1}
    full = open_rung("paged", device="cpu", batch=2, prompt_lengths=[510], new_tokens=2)
    full.tokens_equal()
    assert "dense and paged generate the same " in capsys.readouterr().out
    with pytest.raises(ParameterError, match="512 positions have no room"):
        full.compare()


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


@pytest.mark.parametrize(
    ("facts", "busy_us", "rows"),
    [({}, 99_999.0, 3), ({"model": "rose-tiny"}, 99_999.0, 0), ({}, 1e9, 0)],
    ids=["alike", "another model", "disturbed"],
)
def test_ledgers_of_mixed_lengths_are_shown_of_machines_that_have_like_ones(
    rung, tmp_path, capsys, facts, busy_us, rows
):
    steps = rung.mixed_ledgers()
    assert list(steps) == ["W8", "W9", "W10"] and {one.batch for one in steps.values()} == {256}
    assert f"{steps['W9'].step_us:,.0f}" in capsys.readouterr().out
    record = json.loads((results_folder() / MIXED_LEDGERS / "ledger_w8.json").read_text()) | facts
    record["environment"]["device_name"] = "My GPU"
    for figures in record["figures"].values():
        figures |= {"step_us": 99_999.0, "busy_us": busy_us}
    (tmp_path / "my-gpu").mkdir()
    (tmp_path / "my-gpu" / "ledger_w8.json").write_text(json.dumps(record))
    assert replace(rung, others=(Results(tmp_path / "my-gpu"),)).mixed_ledgers() == steps
    shown = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines() if "99,999" in line]
    assert shown == [f"{w}, My GPU" for w in steps][:rows]


def test_an_exercise_waits_is_right_or_is_not_yet(capsys):
    def double(n):
        """Twice n."""
        ...

    for answer in (double, lambda n: n * 2, lambda n: n + 1):
        exercise(answer, lambda f: f(2) == 4)
    exercise(lambda n: n, lambda f: f(2) == 4 or f"2 gives {f(2)}, expected 4")
    assert [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()] == [
        "yours to write", "right", "not yet right", "not yet right: 2 gives 2, expected 4",
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
    ],
)
def test_an_exercise_names_the_first_case_that_fails(answer, cases, told, capsys):
    exercise(answer, cases=cases)
    assert capsys.readouterr().out.removeprefix("<lambda>: ").startswith(told)


def test_every_figure_of_a_data_flow_is_shown_by_a_notebook_and_described(rung, monkeypatch):
    folder = results_folder().parent
    sources = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.ipynb"))
    shown = set(re.findall(r'(?:open_rung|nb\.flow)\(\\"(\w+)\\"', sources))
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
