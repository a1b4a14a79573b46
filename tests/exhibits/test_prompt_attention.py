"""The command that measures attention of prompts beside torch's libraries; here on a CPU."""

from __future__ import annotations

import pytest
import torch

from rosellm.roseinfer.exhibits import load_exhibit
from tests.helpers import MODERN, small_config
from tests.lab.measuring import measured

prompt_attention = load_exhibit("prompt_attention")


@pytest.mark.parametrize("shape", [{}, MODERN], ids=["gpt2", "qwen3"])
def test_every_way_gives_the_same_attention_of_the_same_prompts(shape) -> None:
    calls = prompt_attention.ways(small_config(**shape), 70, 3, torch.device("cpu"))
    ours, library = (calls[name]() for name in (prompt_attention.OURS, prompt_attention.FLASH))
    assert ours.shape == library.shape and ours.shape[:2] == (3, 70)
    torch.testing.assert_close(ours, library, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_small_record_has_the_turns_of_every_way_and_what_they_multiply(
    tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(prompt_attention, "LENGTHS", (9, 64))
    monkeypatch.setattr(prompt_attention, "TOKENS", 128)
    record = measured(tmp_path, "prompt_attention", "--model=rose-tiny", "--repeats=2")
    (heads, _, head_dim), figures = record["heads"], record["figures"]
    for length, prompts in ((9, 14), (64, 2)):
        found = figures[str(length)]
        pairs = sum(token + 1 for token in range(length))  # of a query and a key that it sees
        assert found["prompts"] == prompts and found["flop"] == 4 * head_dim * heads * prompts * pairs
        assert all(len(us) == 2 and min(us) > 0 for us in found["us"].values())
        assert 0 <= found["largest_difference"][prompt_attention.FLASH] < 1e-4
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in said[:2]] == ["14 × 9", "2 × 64"]
