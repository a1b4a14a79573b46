"""How long the device takes to prefill prompts: fresh ones each time, timed apart from the host."""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import median

import pytest

from rosellm.errors import RoseError
from rosellm.lab.records import prefill_times
from rosellm.lab.records.prefill_times import (
    AIMS_MS,
    BUSY_CYCLES,
    Shape,
    measure,
    shapes_of,
    timed_prefill,
    verdicts,
)
from rosellm.lab.records.records import Results
from rosellm.lab.records.sizes import SMALL, WHOLE
from rosellm.lab.records.watched_step import watched
from rosellm.roseinfer.engine import Engine
from rosellm.roseinfer.steps.captured_prefill import CapturedPrefill
from rosellm.roseinfer.steps.packed_prefill import PackedPrefill
from tests.helpers import ON_GPU, random_model, random_prompts, small_engine
from tests.roseinfer.steps.fake_graphs import captured

__all__ = ["captured"]
SHAPES = [Shape(1, 9), Shape(3, 20)]


@pytest.fixture
def engine() -> Engine:
    return small_engine(random_model(0))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["rose-tiny", "rose-tiny-qwen3"])
def test_the_command_records_every_prefill_of_a_shape_and_their_median(model, tmp_path, capsys) -> None:
    given = [f"--model={model}", "--device=cpu", "--repeats=3", f"--output={tmp_path}"]
    assert prefill_times.main(given) == 0
    record = json.loads((tmp_path / model / "prefill_times.json").read_text())
    assert record["kind"] == "prefill_times" and record["environment"]["device_name"]
    assert (record["model"], record["size"]) == (model, "small")
    figures = record["figures"]
    assert list(figures["shapes"]) == ["1x64", "1x96", "4x96"]
    for shape, found in figures["shapes"].items():
        prompts, tokens = map(int, shape.split("x"))
        ms = [one["ms"] for one in found["repeats"]]
        assert len(ms) == 3 and min(ms) > 0 and found["medians"]["ms"] == median(ms)
        assert [one["tokens"] for one in found["repeats"]] == 3 * [prompts * tokens]
    assert figures["engine"]["rung"] == "split_kv" and figures["engine"]["late_captures"] == 0
    assert prefill_times.recorded(Results(tmp_path)) == {model: figures} and verdicts(figures) == []
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(figures["shapes"])


def test_each_repeat_prefills_all_tokens_of_fresh_sequences_and_releases_them(engine) -> None:
    free = engine.budget.available
    with watched(engine) as steps:
        measure(engine, SHAPES, 2)
    engine.check_integrity()
    assert engine.budget.available == free
    assert {(one.kind, one.cached) for one in steps} == {("prefill", 0)}
    warm_ups = prefill_times.WARM_UPS * SHAPES
    turns = 3 * SHAPES  # the first does not count
    assert [(one.rows, one.tokens) for one in steps] == [(n, n * tokens) for n, tokens in warm_ups + turns]


@pytest.mark.parametrize("seconds", [[0.5, 0.001, 0.002, 0.009], [0.5, 0.009, 0.001, 0.002]])
def test_the_median_is_of_the_repeats_without_the_turn_before_them(engine, monkeypatch, seconds) -> None:
    left: Iterator[float] = iter(seconds)
    monkeypatch.setattr(prefill_times, "timed_prefill", lambda *_given: {"ms": next(left) * 1e3, "tokens": 9})
    found = measure(engine, SHAPES[:1], 3)["1x9"]
    assert [one["ms"] for one in found["repeats"]] == pytest.approx([s * 1e3 for s in seconds[1:]])
    assert found["medians"]["ms"] == pytest.approx(2.0)


def test_captured_prefills_are_replayed_and_none_is_captured_late(captured, monkeypatch) -> None:
    engine, kinds = small_engine(random_model(0)), []
    for kind in (CapturedPrefill, PackedPrefill):
        monkeypatch.setattr(kind, "run", noting(kind, kinds))
    measure(engine, SHAPES, 2)
    assert set(kinds) == {CapturedPrefill} and engine.late_captures == 0


def noting(kind: type, kinds: list[type]):
    run = kind.run

    def noted(self, *given):
        kinds.append(kind)
        return run(self, *given)

    return noted


def test_a_prefill_that_leaves_tokens_out_is_no_measurement(engine, monkeypatch) -> None:
    prompts, begin = random_prompts([9, 20]), engine.begin_prefill
    monkeypatch.setattr(engine, "begin_prefill", lambda sequences: begin(sequences, [9, 19]))
    with pytest.raises(RoseError, match="2 prompts of 29 tokens were not all prefilled"):
        timed_prefill(engine, prompts)


@pytest.mark.parametrize("needed", range(len(BUSY_CYCLES)))
def test_a_prefill_that_a_device_has_waited_for_is_repeated_with_more_time_for_the_host(
    engine, monkeypatch, needed
) -> None:
    given: list[int] = []
    free = engine.budget.available

    def keep_busy(_device, cycles):
        given.append(cycles)
        return lambda: cycles >= BUSY_CYCLES[needed]

    monkeypatch.setattr(prefill_times, "keep_busy", keep_busy)
    assert timed_prefill(engine, random_prompts([9]))["tokens"] == 9
    assert given == BUSY_CYCLES[: needed + 1] and engine.budget.available == free


def test_a_device_that_has_waited_for_the_host_is_no_measurement(engine, monkeypatch) -> None:
    monkeypatch.setattr(prefill_times, "keep_busy", lambda _device, _cycles: lambda: False)
    with pytest.raises(RoseError, match="the host took longer"):
        timed_prefill(engine, random_prompts([9]))


@pytest.mark.parametrize("device", [ON_GPU])
def test_a_gpu_is_busy_until_the_prefill_is_submitted_which_its_time_leaves_out(device) -> None:
    engine = small_engine(random_model(0).to(device))
    found = measure(engine, SHAPES, 3)
    assert all(0 < one["ms"] < 10 for shape in found.values() for one in shape["repeats"])


def test_sizes_are_those_of_the_aims_and_a_small_one_has_no_shape_twice() -> None:
    assert shapes_of(WHOLE) == list(AIMS_MS) == [(1, 64), (1, 512), (4, 256), (16, 1000)]
    assert shapes_of(SMALL) == [(1, 64), (1, 96), (4, 96)]


def test_an_aim_is_kept_by_a_median_of_at_most_as_many_milliseconds() -> None:
    medians = {"1x64": 0.29, "1x512": 0.50, "4x256": 0.71, "16x1000": 6.0}
    aims = prefill_times.aims_of(AIMS_MS, "gpt2", "full")
    shapes = {shape: {"medians": {"ms": ms, "tokens": 1.0}} for shape, ms in medians.items()}
    found = verdicts({"aims_ms": aims, "shapes": shapes})
    assert [(one.told, one.found, one.is_kept) for one in found] == [
        ("prefill of 1x64", 0.29, True),
        ("prefill of 1x512", 0.50, True),
        ("prefill of 4x256", 0.71, False),
        ("prefill of 16x1000", 6.0, False),
    ]
    assert [one.aim for one in found] == [0.30, 0.50, 0.70, 5.0]


def test_a_model_with_too_few_positions_is_told_in_one_line_and_nothing_is_made(tmp_path, capsys) -> None:
    given = ["--model=rose-tiny", "--device=cpu", "--size=full", f"--output={tmp_path / 'out'}"]
    assert prefill_times.main(given) == 2
    told = "error: a prompt and its token need 1001 positions; the model has 512\n"
    assert capsys.readouterr().err == told and not (tmp_path / "out").exists()
