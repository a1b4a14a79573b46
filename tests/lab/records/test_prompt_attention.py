"""The command that measures attention of prompts beside torch's libraries; here on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend

from rosellm.errors import OptionError
from rosellm.lab.records import prompt_attention
from tests.helpers import MODERN, small_config
from tests.lab.measuring import measured


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


def test_a_library_that_refuses_such_heads_is_left_out_and_without_any_one_line_says_so(
    tmp_path, capsys, monkeypatch
) -> None:
    library = prompt_attention._library

    def refused(backend, *operands):
        if backend == refused.backend:
            raise RuntimeError("No viable backend\nmore")
        return library(backend, *operands)

    monkeypatch.setattr(prompt_attention, "_library", refused)
    shape, device = small_config(), torch.device("cpu")
    names = list(prompt_attention.ways(shape, 9, 1, device))
    refused.backend = SDPBackend.FLASH_ATTENTION
    with pytest.raises(OptionError, match="no attention library supports these heads"):
        prompt_attention.measure_length(shape, 9, 9, device, 1, seconds=0.0)
    assert names == ["rosellm", "FlashAttention"]
    assert capsys.readouterr().err == "FlashAttention is left out: No viable backend\n"
