"""Tuning a model by a command, with a tuner that has made up its mind."""

from __future__ import annotations

import json

from rosellm.bench import tune
from rosellm.bench.__main__ import main
from rosellm.models.checkpoint import SHIPPED

CHOICE = {"rows": 1, "n": 64, "k": 64, "activation": "none", "parts": 1, "tile": [4, 2, 256, 4, 2, 1]}


def test_a_record_keeps_the_models_that_it_had(tmp_path, capsys, monkeypatch):
    path = tmp_path / "tuned.json"
    for after, model in ((50.0, SHIPPED), (80.0, "rose-tiny-qwen3"), (90.0, SHIPPED)):
        found = {"choices": [CHOICE], "steps": {"1": {"before": [100.0] * 3, "after": [after] * 3}}}
        monkeypatch.setattr(tune, "tune", lambda step, model, found=found: found)
        assert main(["tune", "--model", model, "--device", "cpu", "--json", str(path)]) == 0
        assert f"{after / 100:.3f} ×" in capsys.readouterr().out
    models = json.loads(path.read_text())["models"]
    assert {name: one["steps"]["1"]["after"][0] for name, one in models.items()} == {
        SHIPPED: 90.0,
        "rose-tiny-qwen3": 80.0,
    }
    assert models[SHIPPED]["choices"] == [CHOICE]
