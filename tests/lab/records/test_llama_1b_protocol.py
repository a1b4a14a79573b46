"""The protocol of the published megakernel: single streams, whole calls and the decode steps in them."""

from rosellm.lab.records import llama_1b_protocol as protocol
from tests.lab.measuring import measured


def test_each_prompts_calls_are_recorded_whole_and_without_the_prefill(tmp_path, monkeypatch, capsys):
    for name, value in {"PROMPTS": 2, "PROMPT_TOKENS": 5, "NEW_TOKENS": 4}.items():
        monkeypatch.setattr(protocol, name, value)
    record = measured(tmp_path, "llama_1b_protocol", "--model=rose-tiny", "--repeats=3")
    repeats = record["figures"]["repeats"]
    assert len(repeats) == 2 * 3 and len({one["tokens_sha256"] for one in repeats}) == 2
    for one in repeats:  # a call has one prefill more than the 3 decode steps
        assert 4 * one["call_us"] > 3 * one["decode_us"] > 0
    assert f"{record['figures']['medians']['decode_us']:.1f} µs per decode step" in capsys.readouterr().out
