"""The benchmarks of drafts: what texts gain, and what steps that verify take."""

from __future__ import annotations

import json

from rosellm.bench.__main__ import main
from rosellm.bench.drafts import RANDOM, TEXTS
from rosellm.bench.verify import RUN_STEPS

CPU = ["--device", "cpu", "--turns", "1"]


def test_the_record_of_texts_is_that_whose_steps_are_replayed(tmp_path, capsys):
    """Each step of a replay accepts as many drafts as the record says, at most as many as there are."""
    texts, steps = tmp_path / "drafts.json", tmp_path / "verify.json"
    options = ["--rows", "1,9", "--new-tokens", "6", "--texts", "completion", RANDOM]
    assert main(["drafts", *options, *CPU, "--json", str(texts)]) == 0
    figures = json.loads(texts.read_text())["figures"]
    assert list(figures) == ["completion", RANDOM]
    for one in figures.values():
        assert {way for own in one["seconds"].values() for way in own} == {"plain", "ngram", "draft"}
        after_prefill = (6 - 1) * len(TEXTS["completion"])
        assert all(sum(own) == after_prefill for own in one["tokens of every step"].values())
    options = ["verify", "--rows", "1", "--drafts", "3", "--prompt-tokens", "9", *CPU]
    assert main([*options, "--traces", str(texts), "--json", str(steps)]) == 0
    found = json.loads(steps.read_text())["figures"]["1 × 9"]["3"]
    assert min(found["plain"] + found["verify"]) > 0
    for name, one in found["replayed"].items():
        counts = [min(n, 4) for n in figures[name]["tokens of every step"]["ngram"]]
        repeated = (counts * RUN_STEPS)[:RUN_STEPS]
        assert one["tokens_per_step"] == sum(repeated) / RUN_STEPS
    assert "tokens per step that drafts" in capsys.readouterr().out


def test_a_record_of_something_else_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "other.json").write_text("{}")
    assert main(["verify", "--rows", "1", *CPU, "--traces", str(tmp_path / "other.json")]) == 2
    assert "is not a record of rosellm.bench drafts" in capsys.readouterr().err
