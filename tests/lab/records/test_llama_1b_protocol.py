"""The protocol of the published megakernel: single streams, whole calls and the decode steps in them."""

import json

from rosellm.lab import measure
from rosellm.lab.records import llama_1b_protocol as protocol


def test_each_prompts_calls_are_recorded_whole_and_without_the_prefill(tmp_path, monkeypatch, capsys):
    for name, value in {"PROMPTS": 2, "PROMPT_TOKENS": 5, "NEW_TOKENS": 4}.items():
        monkeypatch.setattr(protocol, name, value)
    given = ["--model", "rose-tiny", "--load-format", "auto", "--device", "cpu", "--repeats", "3"]
    assert measure.main(["llama_1b_protocol", *given, "--output", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "rose-tiny" / "llama_1b_protocol.json").read_text())
    repeats = record["figures"]["repeats"]
    assert len(repeats) == 2 * 3 and len({one["tokens_sha256"] for one in repeats}) == 2
    for one in repeats:  # a call has one prefill more than the 3 decode steps
        assert 4 * one["call_us"] > 3 * one["decode_us"] > 0
    assert f"{record['figures']['medians']['decode_us']:.1f} µs per decode step" in capsys.readouterr().out


def test_a_folder_that_cannot_hold_the_record_is_refused_before_anything_is_measured(tmp_path, capsys):
    (tmp_path / "rose-tiny" / "llama_1b_protocol.json").mkdir(parents=True)
    assert measure.main(["llama_1b_protocol", "--model", "rose-tiny", "--output", str(tmp_path)]) != 0
    assert "not a regular file" in capsys.readouterr().err
