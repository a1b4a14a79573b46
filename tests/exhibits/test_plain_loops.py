"""Loops in plain torch generate what the engine generates; the record of their steps, here on a CPU."""

from __future__ import annotations

import json

import pytest
import torch

from rosellm.lab.diagnose.steps import ROOM
from rosellm.lab.records.account import account
from rosellm.lab.records.bench import decode_tokens, get_model, make_prompts
from rosellm.lab.records.floors import Ceiling
from rosellm.lab.records.trace import PROFILED_STEP, Event, Trace, read_trace
from rosellm.roseinfer.exhibits import load_exhibit
from tests.lab.measuring import measured, refusal

plain, runs = load_exhibit("plain_loops"), load_exhibit("plain_loop_runs")


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch):
    """Trace the model as torch.compile does, without generating kernels, which takes half a minute."""
    compiled = torch.compile

    def traced(function, mode, **options):
        assert mode == "reduce-overhead"
        return compiled(function, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", traced)


@pytest.mark.parametrize("name", ["rose-tiny", "rose-tiny-qwen3"])
def test_every_loop_generates_the_tokens_of_the_engine_also_from_its_start_again(name):
    gpt = get_model(name, "cpu", "float32")
    prompts = make_prompts(2, 20, gpt.config.vocab_size)
    expected = decode_tokens(gpt, "dense", prompts, ROOM)
    assert len({token for row in expected for token in row}) > 4
    for kind in plain.LOOPS:
        one = kind(gpt, prompts, ROOM)
        for _ in range(2):
            one.start()
            for _ in range(ROOM):
                one.step()
            assert one.tokens[:, 20:].tolist() == expected, kind.__name__


@pytest.mark.slow
def test_the_record_has_every_loop_and_their_equal_tokens(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runs, "CONTEXT", 12)
    record = measured(tmp_path, "plain_loops", "--model=rose-tiny", "--repeats=2")
    names = [kind.__name__ for kind in plain.LOOPS]
    single, half = (record["figures"]["parts"][f"{dtype}, 1"] for dtype in runs.DTYPES)
    assert list(single["loops"]) == names[:-1] and single["equal_tokens"] == dict.fromkeys(names[:-1], 1.0)
    others = ["transformers", "transformers, static cache", *runs.RUNGS]
    assert list(half["loops"]) == [*names, *others] and list(half["equal_tokens"]) == names
    assert half["read_bytes"] * 2 == single["read_bytes"]
    for one in half["loops"].values():
        assert len(one["turns_us"]) == 2 and one["us"] * one["tok_s"] == pytest.approx(1e6)
        assert one["launches"] > 1 and 0 < one["busy"] <= 1 and "kernels" not in one
    assert half["loops"]["InPlace"]["launches"] < half["loops"]["Padded"]["launches"]
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(" s; ")[0].rpartition(", ")[0] for line in said[:2]] == [
        "float32, 1",
        "bfloat16, 1",
    ]


def test_a_model_without_room_for_the_context_is_refused(tmp_path, capsys):
    told = refusal(capsys, tmp_path, "plain_loops", "--model=rose-tiny", "--size=full")
    assert "context 512" in told and "512 positions" in told


def test_a_traced_kernel_keeps_what_the_profiler_tells_of_its_launch(tmp_path):
    told = {"grid": [7, 1, 1], "shared memory": 4096, "est. achieved occupancy %": 25}
    kernel = {"ts": 1, "dur": 2, "name": "k", "cat": "kernel", "args": told | {"stream": 7}}
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [kernel]}))
    (event,) = read_trace(tmp_path / "trace.json").events
    assert event.launch == told and event.kind == "kernel"


def gpu_step(t: float) -> list[Event]:
    """A GEMM of 10 µs, attention of 20, and the head in 40, which are launched at once."""
    kernels = (("_few_rows_kernel", 20, 10), ("_attend", 30, 20), ("nvjet", 60, 40))
    facts = {"registers per thread": 128, "grid": [7, 1, 1]}
    norm = Event("layer_norm", "kernel", t + 50, 10, t + 10)
    made = [Event(name, "kernel", t + at, us, t + 10, launch=facts | {"at": at}) for name, at, us in kernels]
    return [Event(PROFILED_STEP, "range", t, 15, t), *made, norm]


def test_kernels_have_their_bytes_per_second_and_their_launch(monkeypatch):
    gpt = get_model("rose-tiny", "cpu", "float32")
    steps = runs.steps.EngineSteps(gpt, "dense", 2, 16)
    monkeypatch.setattr(runs, "measure_ceiling", lambda *_of: Ceiling(2e6, 1e6))
    trace = Trace(event for i in range(3) for event in gpu_step(i * 100))
    found = runs.kernel_figures(steps, trace, account(trace))
    assert found.pop("peak_GB_s") == 2000 and set(found) == set(runs.CAUSES)
    assert [found[cause]["us"] for cause in runs.CAUSES] == [10, 20, 40]
    assert [found[cause]["at"] for cause in runs.CAUSES] == [20, 30, 60]
    head, c = found["head"], gpt.config
    assert head["bytes"] == 4 * (c.vocab_size + 2) * c.d_model and head["kernel"] == "nvjet"
    assert head["GB_s"] == pytest.approx(head["bytes"] / 40e3)
    assert head["share_of_peak"] == pytest.approx(head["GB_s"] / 2000)
    assert head["registers per thread"] == 128 and head["launches"] == 1
