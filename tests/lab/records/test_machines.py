"""Records of several machines stand side by side; what a machine lacks, or measured otherwise, is named."""

import json
import shutil
from pathlib import Path

import pytest

from rosellm.lab.figures.ladder import ladder_chart, values_beside
from rosellm.lab.recorded import RecordedPair
from rosellm.lab.records import machines as machines_module
from rosellm.lab.records.machines import HERE, beside, check_same_size, find_machines, name_of, names_of
from rosellm.lab.records.records import REFERENCE, RecordError, Results, number, results_folder
from rosellm.lab.rung import open_rung
from tests.lab.made_up_machine import FOLDER, LACKING, NAME, add_made_up_machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Devices' folders: the committed ones and a made-up one."""
    copy = tmp_path_factory.mktemp("results") / "results"
    shutil.copytree(results_folder(), copy)
    add_made_up_machine(copy)
    return copy


@pytest.fixture(scope="module")
def machines(folder) -> list[Results]:
    return find_machines(FOLDER, folder)


def pair(one: Results, other: Results, after: str = "paged") -> RecordedPair:
    return RecordedPair(before="dense", after=after, results=one, others=(other,))


def test_the_reference_comes_first_and_each_machine_once_and_this_one_is_named_here(
    folder, tmp_path, monkeypatch
):
    for record, found in ((REFERENCE, []), (f"cpu, {REFERENCE},{FOLDER},cpu", ["cpu", FOLDER])):
        assert [results.folder.name for results in find_machines(record, folder)] == [REFERENCE, *found]
    monkeypatch.setattr(machines_module, "environment", lambda device: {"device_name": "My (GPU)"})
    (tmp_path / REFERENCE).mkdir()
    with pytest.raises(RecordError, match="no records of device 'my-gpu'"):
        find_machines(HERE, tmp_path)
    (tmp_path / "my-gpu").mkdir()
    assert [results.folder.name for results in find_machines(HERE, tmp_path)] == [REFERENCE, "my-gpu"]


def test_a_machine_is_called_by_its_device_a_cpus_dtype_and_a_folder_of_another_name(machines, tmp_path):
    assert names_of(machines[:1]) == [""] and names_of(machines) == [", NVIDIA H200", f", {NAME}"]
    assert name_of(Results(tmp_path)) == tmp_path.name
    environment = {"device_name": "Abacus", "device_memory_bytes": None, "time_utc": "2026"}
    for name, called in (("abacus", "Abacus, fp32"), ("abacus-new", "Abacus, fp32 (abacus-new)")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "W1-dense.json").write_text(json.dumps({"environment": environment}))
        assert name_of(Results(tmp_path / name)) == called


def test_rows_of_a_key_stand_below_one_another_and_what_a_machine_lacks_is_named(machines):
    rows, lacking = beside(machines, ("W2", LACKING), lambda one, w: [one.value(w, "dense")])
    assert [label for label, _ in rows] == ["W2, NVIDIA H200", f"W2, {NAME}", f"{LACKING}, NVIDIA H200"]
    assert rows[0][1] == 2 * rows[1][1]
    assert lacking == [f"no such record, {NAME}: {LACKING}"]
    rows, lacking = beside(machines, [("W1", 8), ("W2", 64)], lambda one, key: [one.figures("counts", "8")])
    assert [label for label, _ in rows] == ["W1, 8, NVIDIA H200", "W2, 64, NVIDIA H200"]
    assert lacking == [f"no such record, {NAME}"]


def test_what_the_only_machine_lacks_and_a_mistyped_figure_of_the_first_are_raised(machines):
    with pytest.raises(RecordError, match="has no W1 of 'nothing'"):
        beside(machines[:1], ["W1"], lambda one, w: [one.value(w, "nothing")])
    with pytest.raises(KeyError, match="rato"):
        beside(machines, ["W1"], lambda one, w: [one.figures(f"steps-{w}")["rato"]])


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"size": "full"}, ""),  # as one that has no size
        ({"model": None}, ""),
        ({"model": "rose-tiny"}, "another model (rose-tiny, not gpt2)"),
        ({"model": {"n_layers": 2}, "size": "small"}, "another model and another size (small, not full)"),
    ],
)
def test_a_record_of_another_model_or_size_is_not_compared_and_the_reason_is_given(
    folder, tmp_path, facts, why, capsys
):
    record = Results(folder / REFERENCE).load("kv_pressure")
    theirs = record | {"environment": record["environment"] | {"device_name": NAME}} | facts
    for where, content in ((REFERENCE, record), (FOLDER, theirs)):
        (tmp_path / where).mkdir()
        (tmp_path / where / "kv_pressure.json").write_text(json.dumps(content))
    both = find_machines(FOLDER, tmp_path)
    rows, lacking = beside(both, ["W6", "W7"], lambda of, w: [of.figures("kv_pressure", w, "ratio")])
    found = dict(pair(*both).each_machine(lambda of: of.figures("kv_pressure")))
    assert len(rows) == (2 if why else 4)
    assert lacking == ([f"recorded with {why}, {NAME}"] if why else [])
    assert list(found) == ["NVIDIA H200"] + [NAME] * (not why)
    assert capsys.readouterr().out.splitlines() == lacking


def test_steps_of_another_batch_are_not_compared(machines, tmp_path):
    check_same_size(machines[1], machines[0], "steps-W1")
    record = machines[1].load("steps-W1")
    record["figures"]["batch"] = 4
    (tmp_path / "steps-W1.json").write_text(json.dumps(record))
    with pytest.raises(RecordError, match=r"steps-W1 of .* recorded with another batch \(4, not 8\)"):
        check_same_size(Results(tmp_path), machines[0], "steps-W1")


def test_figures_and_rows_that_a_record_lacks_are_refused(machines):
    assert machines[1].figures("steps-W1", "batch") == 8
    with pytest.raises(RecordError, match="steps-W1 of made-up-gpu-9 has no 'nothing': it has batch"):
        machines[1].figures("steps-W1", "nothing")
    assert machines[0].row("grid", "few", "split_kv", batch=2, context=512)["context"] == 512
    assert machines[0].row("kv_append", variant="generic", batch_size=256)["variant"] == "generic"
    with pytest.raises(RecordError, match="kv_append of nvidia-h200 has no row of .*'batch_size': 7"):
        machines[0].row("kv_append", batch_size=7)


def test_a_run_of_another_workload_or_engine_is_no_rungs(machines, tmp_path):
    cases = [
        ({"not_comparable": ["dtype=float32 for float16"]}, ["dense"]),
        ({"not_comparable": ["max_batch_size=4 for 8"]}, []),
        ({"kind": "rivals"}, []),
    ]
    for i, (facts, found) in enumerate(cases):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "W1-dense.json").write_text(json.dumps(machines[0].load("W1-dense") | facts))
        assert Results(tmp_path / str(i)).rungs("W1") == found


def test_a_rungs_tables_and_chart_show_the_machine_beside_the_reference(machines, capsys, monkeypatch):
    shown = []
    monkeypatch.setattr("rosellm.lab.recorded.show", shown.append)
    rung = open_rung("fused_head", device="cpu", batch=2, prompt_lengths=[2], new_tokens=4)
    rung.others = (machines[1],)
    rung.predict(W1=100.0, W3=100.0)
    rung.outcome()
    rung.verdict()
    rung.ablation()
    said = capsys.readouterr().out
    old, new = rung.step_us("W1", machines[1])
    assert old.us == 2 * rung.step_us("W1")[0].us
    assert said.count(f"W1, {NAME} ") == 3 and number(old.us - new.us) in said
    assert said.count(f"no such record, {NAME}: {LACKING}\n") == 3
    assert f"no such record, {NAME}\n" in said  # of ablations
    rung.recorded()
    (chart,) = shown
    assert f"NVIDIA H200 and {NAME}" in chart.layout.title.text
    assert chart.data[0].hovertext[-1].startswith("W5: ")
    assert f"W2, {NAME}" in chart.table and f"{LACKING}, {NAME}" not in chart.table


def test_each_machine_with_a_record_is_named_and_one_without_is_listed(machines, capsys, monkeypatch):
    nb = pair(*machines, after="cuda_graph")
    both = dict(nb.each_machine(lambda one: one.value("W1", "dense")))
    assert list(both) == ["NVIDIA H200", NAME] and capsys.readouterr().out == ""
    for read in (lambda one: one.figures("first_request"), lambda one: one.value("W3", "dense")):
        assert list(dict(nb.each_machine(read))) == ["NVIDIA H200"]
        assert capsys.readouterr().out == f"no such record, {NAME}\n"
    with pytest.raises(RecordError):
        list(nb.each_machine(lambda one: one.figures("nothing")))
    monkeypatch.setattr("rosellm.lab.recorded.explore", lambda draw, **controls: None)
    nb.waterfall()
    assert capsys.readouterr().out == f"no such record, {NAME}\n"


def test_the_ladder_has_a_dot_for_each_of_a_machines_values_and_names_it(machines):
    values = values_beside(machines[1:], "W1")
    chart = ladder_chart(machines[0].values("W1"), "tok/s", title="t", beside=values)
    dots = [trace for trace in chart.data if trace.mode == "markers" and NAME in trace.hovertemplate]
    assert [list(trace.x) for trace in dots] == [list(values[NAME].values())]
    lacking = ladder_chart({"dense": 1.0}, "tok/s", title="t", beside=values_beside(machines[1:], LACKING))
    assert f"{NAME}: no record" in [note.text for note in lacking.layout.annotations]
