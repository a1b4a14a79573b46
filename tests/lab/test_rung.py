"""The calls that notebooks of a rung are made of."""

import json
import re
import shutil

import pytest
import torch

from rosellm.errors import RecipeError
from rosellm.lab.figures.svg import Picture
from rosellm.lab.recorded import MIXED_LEDGERS
from rosellm.lab.records.parameters import ParameterError
from rosellm.lab.records.records import RecordError, results_folder
from rosellm.lab.records.step_time import StepTimes
from rosellm.lab.rung import ClaimError, Rung, exercise, open_rung


@pytest.fixture(scope="module")
def rung() -> Rung:
    return open_rung("cuda_graph", device="cpu", batch=3, prompt_lengths=[2, 9], new_tokens=8)


def test_a_rung_is_told_against_the_one_it_changes(rung):
    assert (rung.before, rung.after) == ("pinned_h2d", "cuda_graph")
    assert rung.change == {"runner": ("eager", "graph")}
    assert open_rung("identity_pos", "triton_append", device="cpu").change["append"] == (
        "generic",
        "identity_pos",
    )


def test_unknown_rungs_and_parameters_out_of_range_are_refused():
    with pytest.raises(RecipeError, match="unknown"):
        open_rung("nothing")
    with pytest.raises(ParameterError, match="new_tokens is 4; this notebook needs 5 or more"):
        open_rung("cuda_graph", device="cpu", new_tokens=4, least_new_tokens=5)
    with pytest.raises(ParameterError, match="batch is 0"):
        open_rung("cuda_graph", device="cpu", batch=0)
    with pytest.raises(RecordError, match="no records of device"):
        open_rung("cuda_graph", device="cpu", record="abacus")


def test_a_sentence_is_shown_only_while_its_claims_hold(rung, capsys):
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


def test_what_one_engine_repeats_are_its_turns():
    assert StepTimes(((4.0, 2.0, 9.0),)).spread_us == (2.0, 9.0)


def test_an_ablation_shows_what_lies_between_two_rungs(capsys):
    open_rung("fused_head", device="cpu").ablation()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == ["fused_gelu", "vocabulary padded", "fused_head"]


@pytest.mark.parametrize(("after", "apart"), [("reused_index_buffers", True), ("cuda_graph", False)])
def test_a_verdict_says_which_workloads_have_no_session_in_common(after, apart, capsys):
    open_rung(after).verdict()
    assert ("W0 W1 W2 W3 W4 W5: recorded in different sessions" in capsys.readouterr().out) == apart


def test_tokens_are_compared_in_fp32_whatever_the_notebook_runs(rung, capsys):
    rung.tokens_equal()
    said = capsys.readouterr().out
    assert "fp32, here: pinned_h2d and cuda_graph generate the same 3 × 8 tokens\n" in said
    assert ("this compares the host's code only" in said) != torch.cuda.is_available()


@pytest.mark.slow
@pytest.mark.parametrize("new_tokens", [1, 4])
def test_rungs_are_compared_at_few_new_tokens(new_tokens, capsys):
    few = open_rung("resident_step", device="cpu", batch=2, prompt_lengths=[2, 9], new_tokens=new_tokens)
    few.compare()
    few.tokens_equal()
    assert "one_table and resident_step generate the same " in capsys.readouterr().out
    assert few.runs[0].tokens == few.runs[1].tokens
    assert {len(row) for row in few.runs[0].tokens} == {new_tokens}


@pytest.mark.slow
def test_prompts_that_fill_the_positions_have_equal_tokens_and_are_not_timed(capsys):
    full = open_rung("paged", device="cpu", batch=2, prompt_lengths=[510], new_tokens=2)
    full.tokens_equal()
    assert "dense and paged generate the same " in capsys.readouterr().out
    with pytest.raises(ParameterError, match="after a prompt of 510 the model's 512 positions have no room"):
        full.compare()


def test_disturbed_ledgers_are_not_drawn(rung, tmp_path, capsys):
    shutil.copytree(results_folder() / "nvidia-h200", tmp_path / "gpu")
    record = tmp_path / "gpu" / "ledger.json"
    told = json.loads(record.read_text())
    for rungs in told["figures"].values():
        rungs["cuda_graph"]["busy_us"] = 1e9
    record.write_text(json.dumps(told))
    disturbed = Rung(**vars(rung) | {"results": type(rung.results)(tmp_path / "gpu")})
    shown = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rosellm.lab.recorded.say", shown.append)
        disturbed.waterfall()
    assert "disturbed every recorded ledger" in shown[0]
    with pytest.raises(RecordError, match="disturbed the ledger of cuda_graph at batch 8"):
        disturbed.ledger(8)


def test_a_ledger_that_was_not_recorded_is_refused(rung):
    assert rung.ledger(64).name == "cuda_graph" and rung.ledger_before(64).name == "pinned_h2d"
    with pytest.raises(RecordError, match="ledger of nvidia-h200 has no '7': it has 1, 8, 64, 256"):
        rung.ledger(7)


@pytest.fixture
def beside_the_h100(rung, tmp_path):
    """A rung beside a machine whose ledgers of mixed lengths have other figures, and the path of these."""
    record = json.loads((results_folder() / MIXED_LEDGERS / "ledger_w8.json").read_text())
    record["environment"]["device_name"] = "My GPU"
    for figures in record["figures"].values():
        figures["step_us"] = figures["busy_us"] = 99_999.0
    path = tmp_path / "ledger_w8.json"
    path.write_text(json.dumps(record))
    return Rung(**vars(rung) | {"others": (type(rung.results)(tmp_path),)}), path


def test_ledgers_of_mixed_lengths_are_told_of_each_machine_that_has_them(rung, beside_the_h100, capsys):
    steps = rung.mixed_ledgers()
    table = capsys.readouterr().out
    assert list(steps) == ["W8", "W9", "W10"] and {one.batch for one in steps.values()} == {256}
    assert table.count("NVIDIA H100 80GB HBM3, µs") == table.count("step") == 1
    for name, one in steps.items():
        assert f"{one.step_us:,.0f}" in next(line for line in table.splitlines() if line.startswith(name))
    assert beside_the_h100[0].mixed_ledgers() == steps
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines if "99,999" in line] == [f"{w}, My GPU" for w in steps]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda record: record.update(model="rose-tiny"), "another model"),
        (lambda record: [one.update(busy_us=1e9) for one in record["figures"].values()], "no such record"),
    ],
)
def test_ledgers_of_mixed_lengths_that_mislead_are_left_out(beside_the_h100, capsys, change, told):
    rung, path = beside_the_h100
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    rung.mixed_ledgers()
    shown = capsys.readouterr().out
    assert "99,999" not in shown and told in shown


def test_reading_takes_as_long_as_the_recorded_bandwidth_says(rung):
    assert (
        1e6 / 4.8 < rung.read_us(1e12) < 1e6 / 4.2
    )  # between what the chip is made for and what a copy reaches


def test_recorded_steps_of_both_rungs_share_a_time_axis(rung):
    shown = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rosellm.lab.recorded.show", shown.append)
        rung.timeline()
    assert "2 decode steps of 8 sequences, profiled, NVIDIA H200" in shown[0].layout.title.text
    assert "pinned_h2d" in shown[0].table and "GPU kernels" in shown[0].table


def test_an_exercise_waits_is_right_or_is_not_yet(capsys):
    def double(n):
        """Twice n."""
        ...

    check = lambda f: f(2) == 4  # noqa: E731
    exercise(double, check)
    exercise(lambda n: n * 2, check)
    exercise(lambda n: n + 1, check)
    exercise(lambda n: 4, check)
    assert [line.split(": ")[1] for line in capsys.readouterr().out.splitlines()] == [
        "yours to write", "right", "not yet right", "right",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda a, b: [a, b], "right"),
        (lambda a, b: (a, float(b)), "right"),
        (lambda a, b: [a], "not yet right: <lambda>(1, 2) → [1], expected [1, 2]"),
        (lambda a, b: [1, 2], "not yet right: <lambda>(3, 4.5) → [1, 2], expected [3, 4.5]"),
        (lambda a, b: a, "not yet right: <lambda>(1, 2) → 1, expected [1, 2]"),
        (lambda a: a, "not yet right: <lambda>(1, 2) raises TypeError"),
    ],
)
def test_an_exercise_names_the_first_case_that_fails(answer, told, capsys):
    exercise(answer, cases=[((1, 2), [1, 2]), ((3, 4.5), [3, 4.5])])
    assert capsys.readouterr().out.removeprefix("<lambda>: ").startswith(told)


def test_an_exercise_prints_what_its_check_names(capsys):
    exercise(lambda n: n, lambda f: f(2) == 4 or f"2 gives {f(2)}, expected 4")
    assert capsys.readouterr().out == "<lambda>: not yet right: 2 gives 2, expected 4\n"


@pytest.mark.parametrize("got", [torch.tensor([1, 3]), torch.tensor([[1, 2]]), [1, 2], None])
def test_an_exercise_refuses_another_tensor(got, capsys):
    exercise(lambda: got, cases=[((), torch.tensor([1, 2]))])
    exercise(lambda: torch.tensor([1, 2]), cases=[((), torch.tensor([1, 2]))])
    assert ["not yet right" in line for line in capsys.readouterr().out.splitlines()] == [True, False]


def test_a_figure_that_is_not_there_is_named(rung):
    with pytest.raises(RecordError, match="flows/nothing.svg"):
        rung.flow("nothing")


def test_every_figure_of_a_data_flow_is_shown_by_a_notebook_and_says_in_words_what_it_shows():
    folder = results_folder().parent
    sources = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.ipynb"))
    shown = set(re.findall(r'(?:open_rung|nb\.flow)\(\\"(\w+)\\"', sources))
    flows = {path.stem: Picture(path.read_text(encoding="utf-8")) for path in folder.glob("flows/*.svg")}
    assert flows and flows.keys() <= shown
    for name, picture in flows.items():
        assert len(picture.description.splitlines()) > 2 and "<script" not in picture.svg, name
