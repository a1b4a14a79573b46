"""Tuning a model by a command, with a tuner that has made up its mind."""

from __future__ import annotations

import json

from rosellm.bench import tune
from rosellm.bench.__main__ import main
from rosellm.models.checkpoint import SHIPPED

CHOICE = {"rows": 1, "n": 64, "k": 64, "activation": "none", "parts": 1, "tile": [4, 2, 256, 4, 2, 1]}


def test_a_record_keeps_the_models_that_it_had(tmp_path, capsys, monkeypatch):
    path = tmp_path / "tuned.json"
    in_8_bits = "--quantization", "int8"
    for after, *model in ((50, SHIPPED), (80, "rose-tiny-qwen3"), (90, SHIPPED), (70, SHIPPED, *in_8_bits)):
        found = {"choices": [CHOICE], "steps": {"1": {"before": [100.0] * 3, "after": [after * 1.0] * 3}}}
        monkeypatch.setattr(tune, "tune", lambda step, model, found=found: found)
        assert main(["tune", "--model", *model, "--device", "cpu", "--json", str(path)]) == 0
        assert f"{after / 100:.3f} ×" in capsys.readouterr().out
    models = json.loads(path.read_text())["models"]
    assert {name: one["steps"]["1"]["after"][0] for name, one in models.items()} == {
        SHIPPED: 90.0,
        "rose-tiny-qwen3": 80.0,
        f"{SHIPPED} int8": 70.0,
    }
    assert models[SHIPPED]["choices"] == [CHOICE]
