"""The time of a decode step for each number of rows."""

from __future__ import annotations

import json
from statistics import median

import pytest

from rosellm.bench import steps
from rosellm.bench.__main__ import main


def test_the_record_holds_every_turn_and_reads_weights_and_keys_once(tmp_path, capsys):
    path = tmp_path / "steps.json"
    options = ["steps", "--rows", "1,3", "--prompt-tokens", "9", "--turns", "2", "--device", "cpu"]
    assert main([*options, "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    shape, figures = record["engine"]["model_shape"], record["figures"]
    assert record["kind"] == "steps_by_rows" and list(figures) == ["1", "3"]
    for one in figures.values():
        assert len(one["turns_us"]) == 2 and one["median_us"] == median(one["turns_us"]) > 0
        assert one["read_TB_s"] * one["median_us"] * 1e6 == pytest.approx(one["read_bytes"])
    context, kv_token = 9 + steps.STEPS // 2, 2 * shape["n_layer"] * shape["n_embd"] * 4
    assert figures["3"]["read_bytes"] - figures["1"]["read_bytes"] == 2 * context * kv_token
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == ["1", "3"] and "1.00 × the first" in shown[0]
