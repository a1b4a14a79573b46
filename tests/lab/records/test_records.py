"""Records are found by device, workload and rung; errors list what there is; floors come from shapes."""

import json
from pathlib import Path

import pytest

from rosellm.bench.record import across_repeats
from rosellm.lab.records import records
from rosellm.lab.records.records import RecordError, find, floor_tok_s, floor_us, percent_change

DEVICE = "nvidia-h200"


def write(folder: Path, name: str, time: str, record: dict) -> None:
    env = {"device_name": "NVIDIA H200", "driver": "580.1", "torch": "2.11.0", "triton": None}
    path = folder / DEVICE / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record | {"environment": env | {"time_utc": time}}))


def measured(mode: str, *tok_s: float) -> dict:
    repeats = [
        {"total_throughput_tok_s": x, "decode_throughput_tok_s": 2 * x, "ttft_p50_s": 0.1} for x in tok_s
    ]
    return {"results": {mode: across_repeats(repeats)}}


@pytest.fixture
def folder(tmp_path) -> Path:
    write(tmp_path, "W3-paged", "2026-11-21T10:00:00+00:00", measured("online", 30.0, 10.0, 20.0))
    write(tmp_path, "W3-dense", "2026-11-22T10:00:00+00:00", measured("online", 5.0))
    write(tmp_path, "W3-custom", "2026-11-20T10:00:00+00:00", measured("online", 1.0))
    write(tmp_path, "W4-dense", "2026-11-20T10:00:00+00:00", measured("streaming", 7.0))
    write(tmp_path, "kv_append", "2026-11-19T10:00:00+00:00", {"rows": [1, 2]})
    return tmp_path


def test_a_value_is_the_median_over_the_repeats_and_rungs_come_in_the_ladders_order(folder):
    results = find(DEVICE, folder)
    assert results.value("W3", "paged") == 20
    assert results.value("W3", "paged", "decode_tok_s") == 40
    assert results.value("W3", "paged", "ttft_p50_s") == 0.1
    assert results.repeats("W3", "paged", "total_tok_s") == [30, 10, 20]
    assert results.value("W4", "dense") == 7
    assert list(results.values("W3").items()) == [("dense", 5), ("paged", 20), ("custom", 1)]
    assert results.rungs("W7") == []


def test_the_environment_is_that_of_the_newest_record_or_the_one_named(folder):
    results = find(DEVICE, folder)
    assert results.device_name == "NVIDIA H200"
    assert results.environment_line() == "NVIDIA H200 · driver 580.1 · torch 2.11.0 · 2026-11-22"
    assert results.environment_line("kv_append").endswith("2026-11-19")
    assert results.load("kv_append")["rows"] == [1, 2]


def test_a_record_without_a_time_is_not_the_newest(folder):
    undated = {"environment": {"device_name": "another"}}
    (folder / DEVICE / "undated.json").write_text(json.dumps(undated))
    assert find(DEVICE, folder).device_name == "NVIDIA H200"


@pytest.mark.parametrize(
    "ask, told",
    [
        (lambda r: r.record("W3", "nope"), "nvidia-h200 has no W3 of 'nope': there are dense, paged, custom"),
        (lambda r: r.record("W7", "dense"), "nvidia-h200 has no W7 of 'dense': there are none"),
        (lambda r: r.value("W4", "dense", "nope"), "no figure is called 'nope': there are total_throughput"),
        (lambda r: r.load("counts"), "has no record 'counts': there are W3-custom, W3-dense"),
        (lambda r: r.environment_line("nope"), "has no record 'nope'"),
        (lambda r: floor_us(r, "W99"), "workload 'W99' is unknown: there are W0, W1"),
        (lambda r: percent_change(0, 1), "other than 0"),
        (lambda r: find("tpu", r.folder.parent), "no records of device 'tpu': there are nvidia-h200"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(folder, ask, told):
    with pytest.raises(RecordError, match=told):
        ask(find(DEVICE, folder))


def test_a_broken_file_and_a_folder_without_environments_are_refused(tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "broken.json").write_text("{")
    with pytest.raises(RecordError, match=r"broken\.json in cpu is not JSON"):
        find("cpu", tmp_path).load("broken")
    (tmp_path / "cpu" / "broken.json").write_text("{}")
    with pytest.raises(RecordError, match="no record of cpu tells its environment: broken"):
        find("cpu", tmp_path).environment_line()


def test_results_are_found_in_the_working_folder_where_the_package_is_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(records.rosellm, "__file__", str(tmp_path / "site" / "rosellm" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecordError, match="no folder notebooks/results"):
        records.results_folder()
    (tmp_path / "results").mkdir()
    assert records.results_folder() == Path("results")


def test_a_floor_is_weights_and_cached_tokens_over_bandwidth():
    weights = (50257 * 768 + 12 * (12 * 768**2 + 13 * 768) + 2 * 768) * 2
    results = find()
    read_us = max(results.load("ceilings")["figures"]["read_TB_s"]) * 1e6
    assert floor_us(results, "W2") == pytest.approx((weights + 64 * (1 + 256) * 36_864) / read_us)
    assert floor_tok_s(results, "W2") == pytest.approx(64 / floor_us(results, "W2") * 1e6)
